"""The same client without an event loop: `python examples/blocking_client.py`.

Needs running services: `penstock up`.
"""

from __future__ import annotations

import penstock

with penstock.SyncClient("127.0.0.1:7410") as client:
    try:
        result = client.generate(prompt="The gate opens", max_tokens=16, temperature=0.0)
        print(result.outcome.name, repr(result.text))
    except penstock.InvalidRequest as error:
        print(f"field {error.param}: {error}")
    except penstock.Unavailable as error:
        print(error)
