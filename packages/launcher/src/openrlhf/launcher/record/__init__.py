"""The record of a run: every trained sample with its tokens and numbers, to look at and to train on again."""
