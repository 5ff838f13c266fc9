"""Benchmarks: paired, alternating, ratios with spread, one JSON line at the end."""
