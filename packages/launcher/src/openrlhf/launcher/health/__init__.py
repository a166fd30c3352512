"""Alarms of a run that is sick: what is wrong, by which numbers, and which flag to turn."""
