"""The processes that `benchmarks.bench_lifecycle` starts and measures."""
