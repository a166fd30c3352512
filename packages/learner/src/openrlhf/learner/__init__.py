"""Training engines on DeepSpeed. Import from the module that owns a name."""
