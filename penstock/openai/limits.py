"""How much of what a body may hold; of its fields for the sampling the queue takes no more either."""

from __future__ import annotations

MAX_PROMPTS = 1024
"""In one body: each is a request of its own, and all of them are watched at once."""

MAX_STOP_STRINGS = 4
"""vLLM's own limit."""

MAX_ENTRIES = 1024
"""Of `logit_bias`, `stop_token_ids`, `allowed_token_ids` and `bad_words`, each: vLLM's engine on a GPU raises within a
step of all requests for one more bias or allowed token, and its scheduler looks through the stop tokens at every token.
OpenAI takes 300 biases, vLLM by default 128 bad words."""

MAX_TOKEN_ID = 2**32 - 1
"""Ids are 32 bits wide on the wire."""

MAX_OBJECTS = 262_144
"""Strings and opening brackets of a body, whatever field they are in: they are parsed and looked at in a fifth of a
second, and take some 50 MiB. Twice what the queue takes of messages, or of tools."""

MAX_COMMAS = 1_310_720
"""Of a body, outside of its strings: the ids of a prompt of a million tokens, beside as many objects as there may be.
They are parsed and looked at in a quarter of a second, and take some 50 MiB."""
