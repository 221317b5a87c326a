"""Run Horovod's own examples as they are, under horovodrun and under dgcrun, and print what came of each."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from side_by_side import end
from sklearn.datasets import load_digits

HOROVOD = "v0.28.1"
ACCURACY, SPEED = r"Accuracy: [\d.]+%", r"Total img/sec on .*"
SUMMARY = r"dgc, density .*? less than fp32"
NETWORK = ["--model", "resnet18", "--batch-size", "2", "--num-warmup-batches", "1"]
ITERATIONS = ["--num-batches-per-iter", "2", "--num-iters", "3"]
LAST_LINES = 25


class Example(NamedTuple):
    """A script of Horovod.

    Args:
        path: in its checkout.
        arguments: of the script.
        result: what is looked for in its output; the last match counts.
        elastic: whether hosts come from a discovery script.
    """

    path: str
    arguments: Sequence[str]
    result: str
    elastic: bool = False


EXAMPLES = {
    "synthetic": Example("pytorch/pytorch_synthetic_benchmark.py", [*NETWORK, *ITERATIONS], SPEED),
    "mnist": Example("pytorch/pytorch_mnist.py", ["--batch-size", "16", "--lr", "0.02"], ACCURACY),
    "elastic": Example(
        "elastic/pytorch/pytorch_synthetic_benchmark_elastic.py", [*NETWORK, *ITERATIONS], SPEED, elastic=True
    ),
}


def write_digits(folder: Path) -> None:
    """scikit-learn's 1,797 digits, enlarged to 28 x 28, as the files that torchvision takes for MNIST."""
    images, labels = load_digits(return_X_y=True)
    large = (images.reshape(-1, 8, 8) * 255 / 16).astype(np.uint8).repeat(3, 1).repeat(3, 2)
    large, labels = np.pad(large, ((0, 0), (2, 2), (2, 2))), labels.astype(np.uint8)
    order = np.random.default_rng(0).permutation(len(labels))
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, part in (("train", order[:1500]), ("t10k", order[1500:])):
        sizes = struct.pack(">4i", 0x803, len(part), 28, 28)
        (raw / f"{name}-images-idx3-ubyte").write_bytes(sizes + large[part].tobytes())
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 0x801, len(part)) + labels[part].tobytes())


def command(example: Example, launcher: Sequence[str], checkout: Path, folder: Path, ranks: int) -> list[str]:
    """The command line of one run."""
    where = ["-np", str(ranks)]
    if example.elastic:
        script = folder / "discover"
        script.write_text(f"#!/bin/sh\necho localhost:{ranks}\n")
        script.chmod(0o755)
        # without an interface Horovod waits for a second host, to find out by which they reach each other
        where += ["--min-np", str(ranks), "--host-discovery-script", str(script), "--network-interfaces", "lo"]
    data = ["--data-dir", str(folder)] if example.result == ACCURACY else []
    return [
        *launcher, "--gloo", *where, sys.executable, "-u", str(checkout / "examples" / example.path),
        *example.arguments, *data,
    ]  # fmt: skip


def run(words: Sequence[str], seconds: float) -> tuple[str, str]:
    """How a command has ended, "" if well, and its output; after `seconds` it is stopped."""
    environment = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **os.environ}
    with subprocess.Popen(
        words, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace",
    ) as process:  # fmt: skip
        try:
            output = process.communicate(timeout=seconds)[0]
            return f"exit status {process.returncode}" if process.returncode else "", output
        except subprocess.TimeoutExpired:
            end(process)
            return f"stopped after {seconds:g} s", process.communicate()[0]
        except BaseException:
            end(process)
            raise


def found(pattern: str, output: str) -> str:
    """The last match in what the ranks have printed, "-" without one."""
    return ([match[0] for match in re.finditer(pattern, output)] or ["-"])[-1]


def compare(name: str, options: argparse.Namespace) -> bool:
    """Run one example under every launcher and print a line for each; returns whether all ended well."""
    example, well = EXAMPLES[name], True
    launchers = {
        "horovodrun": ["horovodrun"],
        "dgcrun, none": ["dgcrun", "--compression", "none"],
        "dgcrun, dgc": ["dgcrun", "--dgc", "--density", options.density],
    }
    for launched_by, launcher in launchers.items():
        with tempfile.TemporaryDirectory() as folder:
            write_digits(Path(folder))
            words = command(example, launcher, options.checkout, Path(folder), options.ranks)
            problem, output = run(words, options.timeout)
        well = well and not problem
        summary = found(SUMMARY, output)
        print(f"{name:<11}{launched_by:<14}{problem or 'ended well'}; {found(example.result, output)}", flush=True)
        if summary != "-":
            print(f"{'':<25}{summary}", flush=True)
        if problem:
            print("  " + "\n  ".join(output.splitlines()[-LAST_LINES:]), flush=True)
    return well


def parse() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(prog="horovod_examples", description=__doc__)
    parser.add_argument("checkout", type=Path, help=f"a checkout of Horovod {HOROVOD}")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of: {', '.join(EXAMPLES)} (default: all)")
    parser.add_argument("--ranks", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--density", default="0.01", help="default: %(default)s")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for each run (default: %(default)s)")
    options = parser.parse_args()
    options.names = options.names or list(EXAMPLES)
    for name in options.names:
        if name not in EXAMPLES:
            parser.error(f"there is no example {name!r}; there are {', '.join(EXAMPLES)}")
        if not (options.checkout / "examples" / EXAMPLES[name].path).is_file():
            parser.error(f"{options.checkout} has no examples/{EXAMPLES[name].path}: it must be Horovod {HOROVOD}")
    if importlib.util.find_spec("torchvision") is None:
        parser.error(f"{sys.executable} has no torchvision, which the examples need; install the one for its torch")
    return options


def main() -> int:
    """Every example under every launcher."""
    options = parse()
    return int(not all([compare(name, options) for name in options.names]))


if __name__ == "__main__":
    sys.exit(main())
