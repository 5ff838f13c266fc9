"""The parts of `benchmarks.bench_recovery`: stores of any size, and processes that are killed and come back."""
