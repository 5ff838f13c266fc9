"""Settings of all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Tests share two cores with real services: how long an example takes says nothing about the code.
settings.register_profile("penstock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("penstock")
