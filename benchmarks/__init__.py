"""The benchmarks. `python -m benchmarks` runs those that need no accelerator and writes `benchmarks/results/`."""
