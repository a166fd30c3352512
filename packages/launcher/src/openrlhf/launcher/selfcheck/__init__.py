"""`openrlhf-launch selfcheck`: what a run relies on, tried out on this machine with models made on the spot."""
