"""Files of requests in the OpenAI batch format: read, submit, watch, answer."""
