"""The vLLM worker service."""
