"""Supervised and preference training: one loop for SFT, reward models and DPO, one process per device."""
