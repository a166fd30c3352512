"""Everything that touches Ray: cluster, placement, actors."""
