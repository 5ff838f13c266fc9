"""Admission policies compared: the same requests, pushed into vLLM and granted by Penstock, real and simulated."""
