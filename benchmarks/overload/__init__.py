"""The processes that `benchmarks.bench_overload` starts and measures."""
