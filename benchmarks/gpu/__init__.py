"""The CUDA kernels, checked and timed on a machine with one GPU, torch and Triton: ``scripts/gpu_check``."""

from __future__ import annotations

import time

_start = time.monotonic()


def say(text: str) -> None:
    """Print a line with the time so far."""
    print(f"[{time.monotonic() - _start:4.0f} s] {text}", flush=True)
