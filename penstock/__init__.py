"""Penstock: credit-based flow control for vLLM fleets. The public package."""
