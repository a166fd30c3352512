"""Generation: engines, router, weight transfer. Import from the module that owns a name."""
