"""Run Horovod's own examples under horovodrun and under dgcrun, and print what came of each.

PyTorch's run as they are. TensorFlow's were written for Keras 2: `EDITS` lists all that is changed in them.
"""

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
FIT, LOSS = r"\baccuracy: [\d.]+ - loss: [\d.]+", r"Step #\d+\s+Loss: [\d.]+"
SUMMARY = r"dgc, density .*? less than fp32"
NETWORK = ["--model", "resnet18", "--batch-size", "2", "--num-warmup-batches", "1"]
ITERATIONS = ["--num-batches-per-iter", "2", "--num-iters", "3"]
KERAS_NETWORK = ["--model", "MobileNetV2", "--batch-size", "2", "--no-cuda"]
# What Keras 3 asks for; data from this machine; fewer steps, as the data are fewer.
EDITS = {
    "opt.variables()": "opt.variables",
    ",\n                        experimental_run_tf_function=False)": ")",
    ",\n              experimental_run_tf_function=False)": ")",
    "tf.keras.datasets.mnist.load_data": "__import__('digits').load_data",
    "10000 // hvd.size()": "400 // hvd.size()",
    "500 // hvd.size()": "80 // hvd.size()",
    "epochs=24": "epochs=4",
}
# Stock Horovod's tape fails on Keras 3's variables, which have no "ref": it is given TensorFlow's own.
STOCK_EDITS = {
    "tape.gradient(loss_value, mnist_model.trainable_variables)": (
        "tape.gradient(loss_value, [v.value for v in mnist_model.trainable_variables])"
    ),
    "tape.gradient(loss, model.trainable_variables)": (
        "tape.gradient(loss, [v.value for v in model.trainable_variables])"
    ),
}
LAST_LINES = 25


class Example(NamedTuple):
    """A script of Horovod.

    Args:
        path: in its checkout.
        arguments: of the script.
        result: what is looked for in its output; the last match counts.
        elastic: whether hosts come from a discovery script.
        edited: whether `EDITS` are made in a copy of it.
    """

    path: str
    arguments: Sequence[str]
    result: str
    elastic: bool = False
    edited: bool = False


EXAMPLES = {
    "synthetic": Example("pytorch/pytorch_synthetic_benchmark.py", [*NETWORK, *ITERATIONS], SPEED),
    "mnist": Example("pytorch/pytorch_mnist.py", ["--batch-size", "16", "--lr", "0.02"], ACCURACY),
    "elastic": Example(
        "elastic/pytorch/pytorch_synthetic_benchmark_elastic.py", [*NETWORK, *ITERATIONS], SPEED, elastic=True
    ),
    "tf synthetic": Example(
        "tensorflow2/tensorflow2_synthetic_benchmark.py",
        [*KERAS_NETWORK, "--num-warmup-batches", "1", *ITERATIONS], SPEED, edited=True,
    ),
    "keras synthetic": Example(
        "tensorflow2/tensorflow2_keras_synthetic_benchmark.py", [*KERAS_NETWORK, *ITERATIONS], SPEED, edited=True
    ),
    "tf mnist": Example("tensorflow2/tensorflow2_mnist.py", [], LOSS, edited=True),
    "keras mnist": Example("tensorflow2/tensorflow2_keras_mnist.py", [], FIT, edited=True),
}  # fmt: skip


def digits() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """scikit-learn's 1,797 digits, enlarged to MNIST's 28 x 28: images and labels to "train" and "t10k" (to test)."""
    images, labels = load_digits(return_X_y=True)
    large = (images.reshape(-1, 8, 8) * 255 / 16).astype(np.uint8).repeat(3, 1).repeat(3, 2)
    large, labels = np.pad(large, ((0, 0), (2, 2), (2, 2))), labels.astype(np.uint8)
    order = np.random.default_rng(0).permutation(len(labels))
    return {name: (large[part], labels[part]) for name, part in (("train", order[:1500]), ("t10k", order[1500:]))}


def write_digits(folder: Path) -> None:
    """`digits` as the files that torchvision takes for MNIST, and as a module for the edited examples."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, (images, labels) in digits().items():
        sizes = struct.pack(">4i", 0x803, len(labels), 28, 28)
        (raw / f"{name}-images-idx3-ubyte").write_bytes(sizes + images.tobytes())
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 0x801, len(labels)) + labels.tobytes())
    np.savez(folder / "digits.npz", images=digits()["train"][0], labels=digits()["train"][1])
    (folder / "digits.py").write_text(
        "import numpy, pathlib\n\n\ndef load_data(path):\n"
        "    kept = numpy.load(pathlib.Path(__file__).with_suffix('.npz'))\n"
        "    return (kept['images'], kept['labels']), None\n"
    )


def script_of(example: Example, stock: bool, checkout: Path, folder: Path) -> Path:
    """The script to run: Horovod's own file, or an edited copy."""
    path = checkout / "examples" / example.path
    if not example.edited:
        return path
    text = path.read_text()
    for old, new in {**EDITS, **(STOCK_EDITS if stock else {})}.items():
        text = text.replace(old, new)
    copy = folder / path.name
    copy.write_text(text)
    return copy


def command(example: Example, launcher: Sequence[str], script: Path, folder: Path, ranks: int) -> list[str]:
    """The command line of one run."""
    where = ["-np", str(ranks)]
    if example.elastic:
        discover = folder / "discover"
        discover.write_text(f"#!/bin/sh\necho localhost:{ranks}\n")
        discover.chmod(0o755)
        # without an interface Horovod waits for a second host, to find out by which they reach each other
        where += ["--min-np", str(ranks), "--host-discovery-script", str(discover), "--network-interfaces", "lo"]
    data = ["--data-dir", str(folder)] if example.result == ACCURACY else []
    return [
        *launcher, "--gloo", *where, sys.executable, "-u", str(script),
        *example.arguments, *data,
    ]  # fmt: skip


def run(words: Sequence[str], folder: Path, seconds: float) -> tuple[str, str]:
    """How a command in `folder` has ended, "" if well, and its output; after `seconds` it is stopped."""
    environment = {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1", "PYTHONWARNINGS": "ignore", **os.environ}
    with subprocess.Popen(
        words, env=environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
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
            script = script_of(example, launched_by == "horovodrun", options.checkout, Path(folder))
            words = command(example, launcher, script, Path(folder), options.ranks)
            problem, output = run(words, Path(folder), options.timeout)
        well = well and not problem
        summary = found(SUMMARY, output)
        print(f"{name:<17}{launched_by:<14}{problem or 'ended well'}; {found(example.result, output)}", flush=True)
        if summary != "-":
            print(f"{'':<31}{summary}", flush=True)
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
    options.checkout = options.checkout.resolve()
    if importlib.util.find_spec("torchvision") is None and any(not EXAMPLES[name].edited for name in options.names):
        parser.error(
            f"{sys.executable} has no torchvision, which PyTorch's examples need; install the one for its torch"
        )
    return options


def main() -> int:
    """Every example under every launcher."""
    options = parse()
    return int(not all([compare(name, options) for name in options.names]))


if __name__ == "__main__":
    sys.exit(main())
