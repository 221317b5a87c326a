"""A GPT of 124 M parameters on simulated ranks of one GPU: AdamW dense beside compressed, run by run.

A run that is kept is not done again, so that the study goes on over several loans of a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.timing import device_name
from benchmarks.quality import tokens
from benchmarks.quality.tasks import Tokens
from benchmarks.quality.training import Run, train
from benchmarks.report import keep, read_results

TASK, FILE = "gpt-124m", "gpu-quality.json"
DENSE, COMPRESSED, IN_2_BITS = "AdamW, dense", "AdamW, dgc", "AdamW, dgc, 0.3% in 2 bits"
PLAN = [Run(TASK, name, 4, seed) for seed in (0, 1) for name in (DENSE, COMPRESSED, IN_2_BITS)]
PLAN += [Run(TASK, name, 8, 100) for name in (DENSE, COMPRESSED)]
_SAID_EVERY = 50  # steps


def done(run: Run) -> dict[str, Any]:
    """Do a run; what `train` gives, with the seconds that it took, its text and its device."""
    start = time.monotonic()

    def watch(ranks: object, step: int, loss: float) -> None:
        if step % _SAID_EVERY == 0 or step <= 2:
            done = f"step {step} of {run.steps}, loss {loss:.3f}, {time.monotonic() - start:.0f} s"
            print(f"  {run.key}: {done}", flush=True)

    found = train(run, watch=watch)
    device = device_name("cuda" if torch.cuda.is_available() else "cpu")
    return {
        "run": dataclasses.asdict(run), "rate": Tokens.settings.adamw_lr, "steps": run.steps, "text": tokens.digest(),
        "device": device, "seconds": round(time.monotonic() - start, 1), **found,
    }  # fmt: skip


def main() -> None:
    """Do what is left of the plan in the time that there is."""
    parser = argparse.ArgumentParser(prog="scripts/gpu_quality", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("gpu-results"), help=f"for {FILE}")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run that would end later")
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    train_on, test_on = tokens.corpus()
    print(f"text {tokens.digest()}: {len(train_on):,} tokens to train on, {len(test_on):,} to test on", flush=True)
    args.folder.mkdir(parents=True, exist_ok=True)
    took: dict[bool, float] = {}  # seconds of the last run, by whether it was dense
    for run in PLAN:
        dense, before = run.variant == DENSE, read_results(args.folder / FILE).get(run.key, {})
        if (before.get("text"), before.get("steps")) == (tokens.digest(), run.steps):
            continue
        if time.monotonic() + took.get(dense, 0) > end:
            print(f"{run.key}: left for the next time")
            continue
        found = done(run)
        took[dense] = found["seconds"]
        keep(args.folder / FILE, run.key, found)
        print(f"{run.key}: loss {found['loss']}, {found['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
