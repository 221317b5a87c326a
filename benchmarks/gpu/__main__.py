"""Checks the CUDA kernels on this machine's GPU and times them; prints tables, writes JSON."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

INTERPRETED = "--interpret" in sys.argv
if INTERPRETED:  # before Triton is imported
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402
import triton  # noqa: E402

from benchmarks.gpu import adapter, checks, say, timing  # noqa: E402
from benchmarks.gpu.page import tables, verdicts  # noqa: E402
from benchmarks.processes import ended_within  # noqa: E402
from benchmarks.report import environment, read_results, write_results  # noqa: E402
from dgc_horovod.kernels import registry  # noqa: E402

_SANITIZED = ("values bf16", "values 2bit", "off the grid", "damaged packets")
_SANITIZER_SECONDS, _PART_SECONDS = 90, 300
_TINY = {"tiny": lambda: [("a", (64, 100)), ("b", (31, 77)), ("c", (100, 40))]}
_USAGE = "scripts/gpu_check [FOLDER] [--interpret] [--only PART ...] [--only-checks CHECK ...]"


def check(size: checks.Size, names: list[str]) -> dict[str, str]:
    """The result of each check: nothing, or what is wrong."""
    found = {}
    for number, name in enumerate(names, start=1):
        try:
            found[name] = checks.run(name, size)
        except Exception as error:  # a kernel that does not compile here, say: the others still tell something
            found[name] = f"{type(error).__name__}: {error}"[:2000]
        say(f"check {number}/{len(names)} {name}: {found[name] or 'ok'}")
        if found[name] and lost():
            say("the device answers this process no more: the other checks are not run")
            break
    return found


def lost() -> bool:
    """Whether CUDA fails whatever it is asked, as it does after an access to wrong memory."""
    if INTERPRETED:
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def sanitize() -> dict[str, str]:
    """compute-sanitizer over a few checks, a process for each tool; racecheck looks at shared memory alone."""
    program = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if program is None:
        return {"compute-sanitizer": "not installed"}
    found = {}
    # without torch's own pool every tensor ends where its memory does
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    for tool in ("memcheck", "racecheck"):
        # torch asks the driver for functions that it may not have: no error
        quiet = ["--report-api-errors", "no"] if tool == "memcheck" else []
        command = [program, "--tool", tool, *quiet, "--error-exitcode", "9", sys.executable, "-m", "benchmarks.gpu"]
        outputs = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        try:
            command += ["--only-checks", *_SANITIZED]
            code, output = ended_within(command, _SANITIZER_SECONDS, env=environment, **outputs)
            found[tool] = "ok" if code == 0 else output[-2000:]
        except subprocess.TimeoutExpired:
            found[tool] = f"not done after {_SANITIZER_SECONDS} s"
        say(f"{tool}: {found[tool]}")
    return found


def in_turn(names: list[str], device: str) -> Iterator[tuple[str, Any]]:
    """The result of each part; the error of one that fails, since the others still tell something."""
    for name in names:
        try:
            yield name, PARTS[name](device) if len(names) == 1 else by_itself(name)
        except Exception as error:
            say(f"{name} FAILED: {type(error).__name__}: {error}")
            yield f"{name} failed", f"{type(error).__name__}: {error}"[:4000]


def by_itself(name: str) -> Any:
    """A part in a process of its own: a wrong access spoils the device for a whole process, and one may hang."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--interpret"] if INTERPRETED else []
        command = [sys.executable, "-m", "benchmarks.gpu", folder, "--only", name, "--quiet", *flags]
        code, _ = ended_within(command, _PART_SECONDS)
        figures = read_results(Path(folder, "gpu.json")).get("figures", {})
    if name not in figures:
        raise RuntimeError(figures.get(f"{name} failed", f"its process has ended with exit code {code}"))
    return figures[name]


RUNS = 3 if INTERPRETED else 20
PARTS: dict[str, Callable[[str], Any]] = {
    "checks": lambda device: check(checks.INTERPRETED if INTERPRETED else checks.ON_DEVICE, list(checks.CHECKS)),
    "horovod": adapter.check,
    "models": lambda device: timing.models(device, RUNS, _TINY if INTERPRETED else timing.MODELS),
    "steps": lambda device: timing.whole_steps(device, timing.TINY_TRAINED if INTERPRETED else timing.TRAINED),
    "sanitizer": lambda device: {} if INTERPRETED else sanitize(),
}


def main() -> None:
    """Do it."""
    parser = argparse.ArgumentParser(prog="scripts/gpu_check", usage=_USAGE, description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("gpu-results"), help="for gpu.json")
    parser.add_argument("--interpret", action="store_true", help="without a GPU, tiny: to see that it runs")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="these parts (default: all)")
    names = list(checks.CHECKS)
    parser.add_argument("--only-checks", nargs="+", metavar="CHECK", choices=names, help="these and nothing else")
    parser.add_argument("--quiet", action="store_true", help="say nothing before and after")
    args = parser.parse_args()
    if not INTERPRETED and not torch.cuda.is_available():
        parser.error("this machine has no CUDA device that torch can use; --interpret runs a tiny part without one")
    device = "cpu" if INTERPRETED else "cuda"
    if not args.quiet:
        say(f"device: {timing.device_name(device)}; torch {torch.__version__}, Triton {triton.__version__}")
    if args.only_checks:
        ended(check(checks.INTERPRETED if INTERPRETED else checks.SANITIZED, args.only_checks))
    coder = type(registry.host_coder(0)).__name__
    here = {**environment(), "triton": triton.__version__, "device": timing.device_name(device), "host coder": coder}
    found: dict[str, Any] = {}
    try:
        args.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"the folder {args.folder} cannot be made: {error}")
    for name, result in in_turn(args.only, device):
        found[name] = result
        write_results(args.folder / "gpu.json", {"environment": here, "figures": found})  # the rest may not come
    if not args.quiet:
        summary(found, args.folder)
    well = ("ok", "not installed", f"not done after {_SANITIZER_SECONDS} s")  # these have found nothing
    problems = {name: text for name, text in found.get("sanitizer", {}).items() if text not in well}
    failed = {name: text for name, text in found.items() if name.endswith(" failed")}
    ended({**found.get("checks", {}), **found.get("horovod", {}), **problems, **failed})


def summary(found: dict[str, Any], folder: Path) -> None:
    """The tables, and which bars are met."""
    print(f"\n{tables(found)}\n")
    if not INTERPRETED:
        print("\n".join(verdicts(found)))
    say(f"written to {folder}/gpu.json")


def ended(checked: dict[str, str]) -> None:
    """Exit, with an error if a check has failed."""
    wrong = [name for name, text in checked.items() if text]
    sys.exit(f"{len(wrong)} of {len(checked)} checks failed: {', '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    main()
