"""The client process of `benchmarks.bench_soak`."""
