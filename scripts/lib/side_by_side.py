"""Train one example without compression and with DGC, and print what each sent and how good it became."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any

import psutil

RANK_PREFIX = re.compile(r"^\[(?:\d+,)?(\d+)\]<(stdout|stderr)>:\s?")  # what horovodrun puts before each line
RESULT = "RESULT "
NEEDED = ("quality", "quality_name", "bytes_sent", "bytes_dense", "ratio", "received_ratio", "seconds")
TAIL_LINES = 50


class RunFailed(Exception):
    """A run ended without a result; the message carries the end of its output."""


def end(process: subprocess.Popen[str]) -> None:
    """Stop `process` and every rank under it: horovodrun starts them in process groups of their own."""
    try:
        parent = psutil.Process(process.pid)
        family = [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:
        return
    for sign in (signal.SIGTERM, signal.SIGKILL):
        for member in family:
            try:
                member.send_signal(sign)
            except psutil.NoSuchProcess:
                continue
        _, family = psutil.wait_procs(family, timeout=5)


def train(example: Path, compression: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run the example on `options.ranks` ranks, show rank 0's lines, return its RESULT."""
    command = ["horovodrun", "--gloo", "-np", str(options.ranks), sys.executable, "-u", str(example),
               "--compression", compression, *options.arguments]  # fmt: skip
    print(f"== {compression}: {Path(command[0]).name} {' '.join(command[1:4])} {example.name}", flush=True)
    environment = {"OMP_NUM_THREADS": "1", **os.environ}  # the ranks share the cores
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    late = threading.Event()
    timer = threading.Timer(options.timeout, lambda: (late.set(), end(process)))
    timer.daemon = True
    timer.start()
    result, last = None, deque[str](maxlen=TAIL_LINES)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            prefix = RANK_PREFIX.match(line)
            text = line[prefix.end() :].rstrip() if prefix else line.rstrip()
            last.append(text)
            if text.startswith(RESULT):
                result = json.loads(text.removeprefix(RESULT))
            elif prefix and prefix.groups() == ("0", "stdout"):
                print(f"  {text}", flush=True)
        process.wait()
    finally:
        timer.cancel()
        end(process)
    if process.returncode or result is None:
        reason = f"was stopped after {options.timeout:g} s" if late.is_set() else f"ended with {process.returncode}"
        raise RunFailed(f"the run with {compression} {reason} and {'a' if result else 'no'} result; its last lines:\n  "
                        + "\n  ".join(last))  # fmt: skip
    if missing := [name for name in NEEDED if name not in result]:
        raise RunFailed(f"the RESULT line of {example.name} lacks {', '.join(missing)}")
    return result


def megabytes(count: float) -> str:
    """`count` bytes, readable from kilobytes to gigabytes."""
    return f"{count / 1e6:.3g} MB" if count < 1e9 else f"{count / 1e9:.3g} GB"


def table(results: dict[str, dict[str, Any]]) -> str:
    """One column per run."""
    rows = {
        "": list(results),
        next(iter(results.values()))["quality_name"]: [f"{r['quality']:.4g}" for r in results.values()],
        "sent per rank": [megabytes(r["bytes_sent"]) for r in results.values()],
        "less sent": [f"{r['ratio']:.3g}x" for r in results.values()],
        "less received": [f"{r['received_ratio']:.3g}x" for r in results.values()],
        "training time": [f"{r['seconds']:.1f} s" for r in results.values()],
    }
    width = max(map(len, rows))
    return "\n".join(f"  {name:<{width}}" + "".join(f"{cell:>12}" for cell in cells) for name, cells in rows.items())


def verdict(dense: dict[str, Any], dgc: dict[str, Any]) -> str:
    """The comparison in one line."""
    return (
        f"DGC sent {dgc['ratio']:.3g} times less than dense training; "
        f"{dgc['quality_name']} {dgc['quality']:.4g} against {dense['quality']:.4g}."
    )


def main() -> int:
    """Both runs, then the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("example", type=Path, help="a script that takes --compression and prints a RESULT line")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on to the example")
    parser.add_argument("--ranks", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for each run (default: %(default)s)")
    options = parser.parse_args()
    if not options.example.is_file():
        parser.error(f"there is no example {options.example}")
    try:
        results = {name: train(options.example, name, options) for name in ("none", "dgc")}
    except (RunFailed, json.JSONDecodeError) as error:
        print(f"side_by_side: {error}", file=sys.stderr)
        return 1
    print(f"\n{table(results)}\n\n{verdict(results['none'], results['dgc'])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
