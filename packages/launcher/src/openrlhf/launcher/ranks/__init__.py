"""What runs in the learner ranks: batches of tensors out of samples, and one class per role. Nothing of Ray."""
