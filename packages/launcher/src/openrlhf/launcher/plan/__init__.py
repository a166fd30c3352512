"""`openrlhf-launch plan`: what a command line would do, computed without starting anything."""
