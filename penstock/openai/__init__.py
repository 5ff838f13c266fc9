"""The OpenAI dialect: bodies in, bodies and stream chunks out, as vLLM reads and writes them."""
