"""The composition root: configuration, trainer, Ray, Slurm, data, logging. Import from the module that owns a name."""
