"""PyTorch's own tests of DistributedDataParallel with our hook in it, at density 1, on CPU and Gloo.

A test of hooks gets ours in the place of its own, and compares it with DDP's allreduce. Every other test has ours in
every DistributedDataParallel. What fails is run again without it: what fails then as well cannot run here, as it
needs a GPU.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import re
import sys
import tempfile
import unittest
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("BACKEND", "gloo")
os.environ.setdefault("WORLD_SIZE", "2")
os.environ.setdefault("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "90")

import ddp_in_ranks
import torch
from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

FILES = ("algorithms/ddp_comm_hooks/test_ddp_hooks.py", "test_c10d_gloo.py")
PASSED, REFUSED, DIFFERS, NOT_OURS = "passed", "refused", "differs as documented", "not ours"
NOT_HERE, FAILED = "not here", "failed"
# Tests of DDP's own insides and of hooks themselves: with ours in the place of theirs there is nothing to see.
INSIDES = {
    "test_is_last_hook": "reads what its own hook has noted",
    "test_ddp_comm_hook_future_passing_cpu": "its hook makes twos of the gradients",
    "test_ddp_comm_hook_future_passing_gpu_gloo": "its hook makes twos of the gradients",
    "test_ddp_comm_hook_logging": "reads the name of its own hook",
    "test_ddp_comm_hook_register_just_once": "expects torch's error for a second hook",
    "test_ddp_sink_noclone": "expects no copy anywhere; our exchange makes one of a gradient",
    "test_ddp_invalid_comm_hook_init": "expects torch's errors for hooks that are none",
    "test_ddp_invalid_comm_hook_return_type": "expects torch's errors for hooks that are none",
    "test_ddp_python_error_logged": "expects torch's errors for hooks that are none",
}
ZEROS = "a parameter that no rank has used gets zeros and not None: docs/ddp.md"
DIFFERENT = {
    "test_dataclass_output_unused_param": ZEROS,
    "test_ddp_checkpointing_dynamic_module": ZEROS,
    "test_ddp_checkpointing_dynamic_weight_sharing": ZEROS,
    "test_global_local_unused_params_grad": ZEROS,
    "test_global_local_unused_params_grad_with_grad_is_view": ZEROS,
    "test_global_local_unused_params_grad_with_static_graph": ZEROS,
    "test_output_unused_in_loss_dict_module": ZEROS,
    "test_output_unused_in_loss_tuple_module": ZEROS,
    "test_undefined_grad_parity_unused_parameters": ZEROS,
}
DEPTH = 4  # helpers of helpers that are looked into
LAST_LINES = 25
ABORTED = re.compile(r"exit code.* -6\b")  # as Gloo may, where a process ends at once: PyTorch's issue 190489


class InsideTorch(TestDistBackend, DistributedTest._DistTestBase):  # type: ignore[name-defined]
    """The tests that the installed torch brings with it; test_distributed_spawn.py makes the same class."""

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()


class Outcome(NamedTuple):
    """What came of a test: one of the words above, and why."""

    file: str
    test: str
    word: str
    why: str = ""


def source(case: type, name: str, depth: int = DEPTH) -> str:
    """The text of a method and of the helpers that it calls."""
    method = getattr(case, name, None)
    if not callable(method):
        return ""
    try:
        text = inspect.getsource(inspect.unwrap(method))
    except (OSError, TypeError):
        return ""
    called = set(re.findall(r"self\.(_\w+)\(", text)) - {name} if depth else set()
    return text + "".join(source(case, helper, depth - 1) for helper in sorted(called))


def mode_of(case: type, name: str) -> str | None:
    """Where our hook goes in a test; None: it makes no DistributedDataParallel."""
    text = source(case, name)
    if "DistributedDataParallel" not in text and "DDP(" not in text:
        return None
    return ddp_in_ranks.HOOKS if "comm_hook" in text else ddp_in_ranks.ALL


def run(case: type[unittest.TestCase], name: str, mode: str, again: bool = True) -> tuple[str, str, bool]:
    """Run one test: "", "skipped" or "failed"; the error's text; whether anything was exchanged by our hook."""
    result = unittest.TestResult()
    with tempfile.TemporaryDirectory() as folder:
        os.environ[ddp_in_ranks.MODE] = mode
        mark = Path(folder) / "mark"
        os.environ[ddp_in_ranks.MARK] = str(mark)
        case(name).run(result)
        exchanged = mark.exists()
    problems = [text for _, text in [*result.errors, *result.failures]]
    if problems and again and ABORTED.search(problems[0]):
        return run(case, name, mode, again=False)
    if problems:
        return "failed", problems[0], exchanged
    return ("skipped", result.skipped[0][1], exchanged) if result.skipped else ("", "", exchanged)


def last_error(text: str) -> str:
    """The line of a traceback that says what was wrong."""
    found = re.findall(r"^(?:\w+\.)*(\w+(?:Error|Exception|UnsupportedUse|Mismatch)\b.*)$", text, re.MULTILINE)
    words = re.findall(r"^(?:\w+\.)*(UnsupportedUse: .*)$", text, re.MULTILINE)
    return (words or [line for line in found if "exited with error" not in line] or text.splitlines())[-1]


def outcome(file: str, case: type[unittest.TestCase], name: str, mode: str, verbose: bool) -> Outcome:
    """Run a test with our hook, and without it if that fails."""
    if name in INSIDES:
        return Outcome(file, name, NOT_OURS, INSIDES[name])
    if "SyncBatchNorm" in source(case, name):
        return Outcome(file, name, NOT_HERE, "SyncBatchNorm is for GPUs alone")
    word, text, exchanged = run(case, name, mode)
    if not word and not exchanged and mode == ddp_in_ranks.HOOKS:  # it registers none
        word, text, exchanged = run(case, name, ddp_in_ranks.ALL)
    if not word:
        return Outcome(file, name, PASSED) if exchanged else Outcome(file, name, NOT_OURS, "exchanges nothing")
    why = last_error(text)
    if word == "skipped":
        return Outcome(file, name, NOT_HERE, f"skips itself: {why}")
    if "UnsupportedUse" in why:
        return Outcome(file, name, REFUSED, why)
    stock, stock_text, _ = run(case, name, ddp_in_ranks.STOCK)
    if stock:
        return Outcome(file, name, NOT_HERE, last_error(stock_text))
    if verbose:
        print("\n".join(text.splitlines()[-LAST_LINES:]), file=sys.stderr)
    return Outcome(file, name, DIFFERS, DIFFERENT[name]) if name in DIFFERENT else Outcome(file, name, FAILED, why)


def cases(folder: Path | None) -> dict[str, list[type[unittest.TestCase]]]:
    """The classes of tests, by file."""
    found: dict[str, list[type[unittest.TestCase]]] = {}
    for path in FILES if folder is not None else ():
        assert folder is not None
        sys.path[:0] = [str((folder / path).parent), str(folder)]
        module = importlib.import_module(Path(path).stem)
        classes = [value for value in vars(module).values() if inspect.isclass(value)]
        own = [value for value in classes if value.__module__ == module.__name__]
        found[Path(path).name] = [value for value in own if issubclass(value, MultiProcessTestCase)]
    found["distributed_test.py"] = [InsideTorch]
    return found


def table(outcomes: list[Outcome]) -> str:
    """A line for each file, and one for each test that did not pass."""
    words = (PASSED, REFUSED, DIFFERS, NOT_OURS, NOT_HERE, FAILED)
    lines = [f"| torch {torch.__version__} | tests | {' | '.join(words)} |", "|---" * (len(words) + 2) + "|"]
    for file in dict.fromkeys(each.file for each in outcomes):
        found = [each.word for each in outcomes if each.file == file]
        lines.append(f"| {file} | {len(found)} | " + " | ".join(str(found.count(word)) for word in words) + " |")
    others = [each for word in words[1:] for each in outcomes if each.word == word]
    lines += ["", "| test | | |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| `{each.test}` | {each.word} | {each.why} |" for each in others)])


def main() -> int:
    """All tests, one after the other."""
    parser = argparse.ArgumentParser(prog="pytorch_hook_tests", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="test/distributed in a checkout of PyTorch")
    parser.add_argument("-k", default="", metavar="TEXT", help="only tests whose name has this in it, as an expression")
    parser.add_argument("-v", action="store_true", help="print the end of what a failed test has said")
    options = parser.parse_args()
    outcomes = []
    for file, classes in cases(options.folder and options.folder.resolve()).items():
        for case in classes:
            for name in unittest.TestLoader().getTestCaseNames(case):
                mode = mode_of(case, name)
                if mode is not None and re.search(options.k, name):
                    outcomes.append(outcome(file, case, name, mode, options.v))
                    print(" ".join(outcomes[-1]), file=sys.stderr, flush=True)
    print(table(outcomes))
    return int(any(each.word == FAILED for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())
