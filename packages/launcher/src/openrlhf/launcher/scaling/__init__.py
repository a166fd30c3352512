"""Engines that join and leave a run while it goes on: what is asked, from where, and how a further machine joins."""
