"""The learner's backend on DeepSpeed: the only modules that import it or know what it puts on parameters."""
