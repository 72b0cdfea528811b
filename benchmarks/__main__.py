"""Run every benchmark that needs no accelerator, one after the other, each in a process of its own; then the report."""

from __future__ import annotations

import subprocess
import sys
import time

SCRIPTS = ("overhead", "baseline", "peers", "loading", "evaluation", "memory", "ablation", "report")


def main() -> int:
    for name in SCRIPTS:
        print(f"\n=== {name}", flush=True)
        start = time.monotonic()
        done = subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=False)
        if done.returncode:
            return done.returncode
        print(f"({time.monotonic() - start:.0f} s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
