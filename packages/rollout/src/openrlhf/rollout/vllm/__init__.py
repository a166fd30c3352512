"""The vLLM engine: all that rollout knows of vLLM beside the two ends of the weight transfer."""
