"""vLLM as the worker's engine; nothing outside this folder imports vLLM."""
