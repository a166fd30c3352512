"""The trainer: written against the Rollout and Learner protocols, knows nothing of Ray."""
