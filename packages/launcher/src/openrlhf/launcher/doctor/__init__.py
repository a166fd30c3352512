"""What is wrong with a machine and the fix for each: checks without side effects, and the command that prints them."""
