"""Train on what a run recorded, without engines: the same batches, and with the same flags the same weights."""
