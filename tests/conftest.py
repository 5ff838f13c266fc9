"""Settings of all tests."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

import penstock.cli  # noqa: F401 (first, so that the tests' own clients have gRPC as a command has it: it forks)

NAMED = os.environ.get("GRPC_EXPERIMENTS")

import services  # noqa: E402, F401

if NAMED is None:
    # The services that tests start choose for themselves.
    del os.environ["GRPC_EXPERIMENTS"]

# For every engine that tests start: on cores that others want as well, threads that spin until the last of them had its
# turn cost many times what they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests share two cores with real services: how long an example takes says nothing about the code.
settings.register_profile("penstock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("penstock")
