"""Losses as pure functions: tensors in, `LossOutput` out."""
