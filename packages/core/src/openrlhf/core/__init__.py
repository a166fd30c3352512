"""Algorithms as pure functions on tensors. Import from the module that owns a name."""
