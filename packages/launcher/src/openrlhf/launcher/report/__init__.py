"""One page for a browser that shows what a run did: curves, phases, alarms, configuration, episodes."""
