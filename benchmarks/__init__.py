"""The benchmarks. `python -m benchmarks` runs those that need no accelerator and writes `benchmarks/results/`."""

import os

# oneDNN keeps 1024 compiled primitives, enough for one model and not for several that take turns: over a cycle of shapes the
# first variant would compile everything anew in each round, and the others would find it compiled. Read when torch loads.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16384")
os.environ.setdefault("LRU_CACHE_CAPACITY", "16384")
