"""The simulated engine: vLLM's scheduling and block arithmetic without a model."""
