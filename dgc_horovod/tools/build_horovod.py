"""Build unmodified Horovod for the frameworks of this environment, and cache the wheel.

Horovod 0.28.1 does not build against today's torch and TensorFlow as published: its CMake asks for
C++14 (torch >= 2.1 needs 17, later ones 20), its headers forget some that GCC 13 wants, and one source file includes
XLA headers that moved after TF 2.17. A CMake toolchain file cures it from outside; not a byte of its source is touched.

It uses the standard library only and is run by path (``scripts/build_horovod``): nothing else can be imported before.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

HOROVOD_VERSION = "0.28.1"
BUILD_TOOLS = ("cmake==3.31.6", "ninja", "setuptools<81", "wheel", "packaging", "cffi")
RUN_NEEDS = ("cloudpickle", "numpy", "psutil", "pyyaml", "packaging")
FRAMEWORKS = {"torch": ("torch",), "tensorflow": ("tensorflow", "tensorflow-cpu")}
HOROVODS_NAMES = {"torch": "pytorch", "tensorflow": "tensorflow"}  # in its metadata.json
LOG_TAIL_LINES, MOST_ERRORS, FAILED = 40, 10, "failed"  # a file in place of the wheel: this build does not work here
HOW_TO_GO_ON = {
    "joined": "Horovod did not build with its source files joined; building them one by one: twice the time.",
    "cuda": "Horovod did not build with CUDA; building it with CPU operations.",
    "mpi": "Horovod did not build against this MPI; building it with Gloo alone. For MPI, install a system MPI "
    "(Debian: libopenmpi-dev openmpi-bin) and run scripts/build_horovod --force.",
}
# Variables of the caller's environment that change the build of Horovod, not its run-time settings.
BUILD_SETTINGS = re.compile(r"HOROVOD_(WITH|GPU|CPU_OPERATIONS|CUDA|ROCM|NCCL|CCL|BUILD|ALLOW_MIXED|DEBUG|CMAKE)")

# Included by CMake right after Horovod's own project() call.
AFTER_PROJECT = """\
set(standard 17)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND NOT CMAKE_CXX_COMPILER_VERSION VERSION_LESS 14)
  set(standard 20) # GCC 14 refuses flatbuffers' own span; in C++20 <version> has it take the standard's
  string(APPEND CMAKE_CXX_FLAGS " -include version")
endif()
foreach(asked 14 17)
  set(CMAKE_CXX${asked}_STANDARD_COMPILE_OPTION "-std=c++${standard}")
  set(CMAKE_CXX${asked}_EXTENSION_COMPILE_OPTION "-std=gnu++${standard}")
endforeach()
string(APPEND CMAKE_CXX_FLAGS " -include string -include stdexcept -include cstdint") # forgotten
string(REPLACE "-g " "" CMAKE_CXX_FLAGS_RELWITHDEBINFO "${CMAKE_CXX_FLAGS_RELWITHDEBINFO}") # 33 of 35 MB
# The wheel is used in other environments too: each must find its own pip-installed MPI, in lib/.
set(CMAKE_BUILD_RPATH "$ORIGIN/../../../..")
# XLA operations are off by default in Horovod; their one source no longer compiles.
function(add_library name)
  set(sources ${ARGN})
  list(FILTER sources EXCLUDE REGEX "xla_mpi_ops\\\\.cc$")
  _add_library(${name} ${sources})
endfunction()
"""
# In that function: compile 12 files as one, which reads their common headers once. Half the time of the build.
JOINED = """\
  if(name MATCHES "^(pytorch|tensorflow)$")
    set_target_properties(${name} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 12)
  endif()
"""
# In that function, for a torch that asks for more.
NEWER_TORCH = '  if(name STREQUAL "pytorch")\n    target_compile_features(pytorch PRIVATE cxx_std_{})\n  endif()\n'
TORCH_HEADER = Path("torch", "include", "torch", "csrc", "api", "include", "torch", "all.h")

# Horovod's setup.py passes `VERBOSE=1`, which only make understands, and -j8 whatever the machine.
CMAKE_WRAPPER = """\
#!/bin/sh
for word do shift; case $word in VERBOSE=1 | -j8) ;; *) set -- "$@" "$word" ;; esac; done
exec {cmake} "$@"
"""

# torch takes any nvcc on PATH, or /usr/local/cuda, for a reason to build CUDA code, GPU or not.
HIDE_CUDA = """\
import os.path, shutil
exists, which = os.path.exists, shutil.which
os.path.exists = lambda path: path != "/usr/local/cuda" and exists(path)
shutil.which = lambda command, *args, **kwargs: None if command == "nvcc" else which(command, *args, **kwargs)
"""


class BuildFailed(Exception):
    """The build stopped; the message says why, or carries the end of its log."""


def installed_version(*distributions: str) -> str | None:
    """Version of the first of `distributions` that is installed here, or None."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def command_output(*command: str) -> str:
    """Standard output of `command`, or '' when it cannot be run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def pip(*arguments: str) -> None:
    """Run this environment's pip, quietly."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    if code := subprocess.run(command).returncode:
        raise BuildFailed(f"pip stopped with exit code {code}, its reason stands above: {' '.join(command)}")


@dataclass(frozen=True)
class Build:
    """The environment that Horovod is built for.

    Args:
        frameworks: versions of those installed here, by name.
        mpi: path of the MPI C++ compiler wrapper; None for Gloo alone.
        cuda: whether Horovod compiles its CUDA code for a CUDA torch.
        joined: whether several source files are compiled as one.
    """

    frameworks: dict[str, str]
    mpi: str | None
    cuda: bool
    joined: bool = True

    def key(self) -> str:
        """Return a name of the wheel, from everything that changes its content."""
        parts = [f"horovod-{HOROVOD_VERSION}", f"py{sys.version_info[0]}.{sys.version_info[1]}"]
        parts += [f"{name}-{version}" for name, version in sorted(self.frameworks.items())]
        parts += ["mpi" if self.mpi else "nompi", *(["cuda"] if self.cuda else [])]
        options = sorted(f"{k}={v}" for k, v in os.environ.items() if BUILD_SETTINGS.match(k))
        compiler = command_output(os.environ.get("CXX", "g++"), "-dumpfullversion")
        added = after_project(self.joined)
        fingerprint = "\n".join([*options, mpi_version(self.mpi), compiler, os.uname().machine, added])
        return "-".join([*parts, hashlib.sha256(fingerprint.encode()).hexdigest()[:8]])


def mpi_version(mpicxx: str | None) -> str:
    """Version of this MPI, without the folder that stands in the same line; '' for none."""
    found = re.search(r"\d+(\.\d+)+", command_output(mpicxx, "--showme:version")) if mpicxx else None
    return found[0] if found else ""


def find_cuda() -> bool:
    """Whether CUDA code can be built and run here: an NVIDIA GPU and nvcc, or HOROVOD_GPU* in the environment."""
    asked_for = any(name.startswith("HOROVOD_GPU") for name in os.environ)
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]  # where torch looks for it
    path = os.pathsep.join([os.environ.get("PATH", ""), *(f"{home}/bin" for home in homes if home)])
    return asked_for or (Path("/dev/nvidiactl").exists() and bool(shutil.which("nvcc", path=path)))


def torch_standard() -> int:
    """The C++ standard, at least 17, that the headers of the installed torch say they need."""
    header = Path(sysconfig.get_path("platlib")) / TORCH_HEADER
    asked = re.search(r"#error C\+\+(\d+) or later", header.read_text()) if header.exists() else None
    return max(17, int(asked[1])) if asked else 17


def after_project(joined: bool) -> str:
    """Return the file that CMake includes after Horovod's project()."""
    standard, end = torch_standard(), "endfunction()\n"
    newer = NEWER_TORCH.format(standard) if standard > 17 else ""
    return AFTER_PROJECT.removesuffix(end) + newer + JOINED * joined + end


def cache_folder() -> Path:
    """Return the folder of built wheels, for all environments of the same user."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "dgc_horovod", "wheels")
    if not folder.is_absolute():
        raise BuildFailed("this user has no home folder for the wheels; name a folder with --cache")
    return folder


def build_environment(work: Path, build: Build) -> dict[str, str]:
    """Return the environment of the build; variables HOROVOD_* of the caller have priority."""
    included, toolchain, wrapper = work / "after_project.cmake", work / "toolchain.cmake", work / "cmake"
    included.write_text(after_project(build.joined))
    toolchain.write_text(f'set(CMAKE_PROJECT_horovod_INCLUDE "{included}")\n')
    cmake = shutil.which("cmake")
    if cmake is None:
        raise BuildFailed("cmake was not found; install it with: pip install " + BUILD_TOOLS[0])
    wrapper.write_text(CMAKE_WRAPPER.format(cmake=shlex.quote(cmake)))
    wrapper.chmod(0o755)
    defaults = {
        "CMAKE_TOOLCHAIN_FILE": str(toolchain),
        "CMAKE_GENERATOR": "Ninja",
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # Gloo's own minimum is older than CMake 4 accepts
        "HOROVOD_CMAKE": str(wrapper),
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_MPI" if build.mpi else "HOROVOD_WITHOUT_MPI": "1",
        # The MPI compiler wrappers name the prefix they were packed in unless told where they are.
        **({"OPAL_PREFIX": sys.prefix} if build.mpi and Path(build.mpi).parent == Path(sys.prefix) / "bin" else {}),
    }
    for name in FRAMEWORKS:
        has = "WITH" if name in build.frameworks else "WITHOUT"
        defaults[f"HOROVOD_{has}_{HOROVODS_NAMES[name].upper()}"] = "1"
    environment = {**defaults, **os.environ}
    if not build.cuda:
        (work / "sitecustomize.py").write_text(HIDE_CUDA)
        environment["PYTHONPATH"] = os.pathsep.join([str(work), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        for name in ("CUDA_HOME", "CUDA_PATH"):
            environment.pop(name, None)
    return environment


def run_logged(command: list[str], environment: dict[str, str], log: Path) -> None:
    """Run `command` with its output in `log`, and tell every 10% how far ninja is; raise BuildFailed if it fails."""
    start, shown = time.monotonic(), 0
    with (
        log.open("w") as sink,
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            sink.write(line)
            if not (match := re.match(r"\s*\[(\d+)/(\d+)\]", line)):
                continue
            done, total = int(match[1]), int(match[2])
            if done * 10 // total != shown:
                shown = done * 10 // total
                tell(f"building Horovod: {done}/{total} files, {(time.monotonic() - start) / 60:.1f} min")
    if process.returncode:
        raise BuildFailed(f"Horovod did not build (exit {process.returncode}). Whole log: {log}\n{tail(log)}")


def tail(log: Path) -> str:
    """Return the compiler's errors; if there are none, the end of the log without the lines of pip."""
    text = log.read_text(errors="replace").split("error: subprocess-exited-with-error")[0]
    before, found, _ = text.rpartition("Traceback (most recent call last)")
    lines = (before if found else text).splitlines()
    wrong = [line for line in lines if re.search(r"\b(FAILED|error|fatal error|CMake Error\b.*): ", line)]
    return "\n".join(wrong[:MOST_ERRORS] or lines[-LOG_TAIL_LINES:])


def build_wheel(build: Build, target: Path) -> Path:
    """Compile Horovod from its published source into `target`; returns the wheel's path."""
    target.mkdir(parents=True, exist_ok=True)
    tell(f"building Horovod for {target.name}: 2-5 minutes on 2 cores, log in {target / 'build.log'}")
    with tempfile.TemporaryDirectory(prefix="horovod-build-") as folder:
        work = Path(folder)
        # pip's wheel cache would hand back an earlier build whatever HOROVOD_* says: --no-cache-dir
        command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-cache-dir",
                   "--no-build-isolation", "--no-binary", "horovod", "--wheel-dir", str(work / "out"),
                   f"horovod=={HOROVOD_VERSION}"]  # fmt: skip
        run_logged(command, build_environment(work, build), target / "build.log")
        (wheel,) = (work / "out").glob("horovod-*.whl")
        partial = target / (wheel.name + ".partial")
        shutil.copy(wheel, partial)
        return partial.rename(target / wheel.name)


def builds_from(build: Build) -> Iterator[Build]:
    """`build`, and those to try if it fails: file by file, then without CUDA, then without MPI."""
    yield build
    for less in ({"joined": False}, {"cuda": False}, {"mpi": None}):
        if (simpler := replace(build, **less)) != build:
            yield (build := simpler)


def buildable(build: Build, cache: Path) -> Build:
    """Return `build`, or the first simpler one that is not known to fail here, which saves minutes of trials."""
    return next((each for each in builds_from(build) if not (cache / each.key() / FAILED).exists()), build)


def build_with_fallback(wanted: Build, cache: Path) -> Path:
    """The cached wheel, or a fresh one; where Horovod does not build with CUDA or MPI, one without them."""
    failed: list[Build] = []
    for build in builds_from(buildable(wanted, cache)):
        folder = cache / build.key()
        if cached := sorted(folder.glob("horovod-*.whl")):
            tell(f"Horovod wheel from the cache: {folder.name}")
            return cached[0]
        try:
            wheel = build_wheel(build, folder)
        except BuildFailed as error:
            less = next((part for part in HOW_TO_GO_ON if getattr(build, part)), None)
            if less is None:
                raise
            tell(str(error))
            tell(HOW_TO_GO_ON[less])
            failed.append(build)
        else:
            # the simpler build works, so the cause was what it leaves out, and not the network, say
            for each in failed:
                (cache / each.key() / FAILED).touch()
            return wheel
    raise AssertionError("unreachable: the last build returns or raises")


def already_right(build: Build) -> bool:
    """Whether the installed Horovod was built for all of `build`: these framework versions, MPI and CUDA."""
    if installed_version("horovod") != HOROVOD_VERSION:
        return False
    try:
        built = json.loads((Path(sysconfig.get_path("platlib")) / "horovod" / "metadata.json").read_text())
    except (OSError, ValueError):
        return False
    if any(built.get(HOROVODS_NAMES[name]) != version for name, version in build.frameworks.items()):
        return False
    parts = [name for name, wanted in (("mpi", build.mpi), ("cuda", build.cuda)) if wanted]
    first = min(build.frameworks, key=list(FRAMEWORKS).index)
    return not parts or not imported(first, f"assert all(getattr(module, p + '_built')() for p in {parts})").returncode


def imported(framework: str, check: str = "pass") -> subprocess.CompletedProcess[str]:
    """The end of a process that imports Horovod for `framework`, and makes a `check` of that `module`."""
    code = f"import horovod.{framework} as module; {check}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def install(wheel: Path, build: Build) -> None:
    """Install `wheel` here and prove that it imports for every framework."""
    pip("install", "-q", "--no-deps", "--force-reinstall", str(wheel))
    for name in build.frameworks:
        result = imported(name)
        if result.returncode:
            advice = f"remove {wheel.parent} and run this again to build it anew"
            raise BuildFailed(f"Horovod was built but `import horovod.{name}` fails; {advice}\n{result.stderr[-2000:]}")


def tell(line: str) -> None:
    """Print one line of progress."""
    print(f"  {line}", file=sys.stderr, flush=True)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line of ``scripts/build_horovod``."""
    description = (
        f"Build Horovod {HOROVOD_VERSION} from its published source for the torch and TensorFlow of this Python "
        "environment, keep the wheel in the cache, and install it. 2-5 minutes on 2 cores; seconds from the cache."
    )
    parser = argparse.ArgumentParser(prog="build_horovod", description=description)
    parser.add_argument("--force", action="store_true", help="build and install even if a working Horovod is there")
    parser.add_argument("--cache", type=Path, help="folder of wheels (default: ~/.cache/dgc_horovod/wheels)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Build and install what is missing; the exit code is 0 when Horovod is right in the end."""
    options = parse(arguments)
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.prefix) / "bin"), os.environ.get("PATH", "")])
    frameworks = {key: version for key, names in FRAMEWORKS.items() if (version := installed_version(*names))}
    if not frameworks:
        tell("build_horovod: neither torch nor tensorflow is installed here; first, e.g., pip install torch==2.13.0")
        return 2
    mpi = shutil.which("mpicxx") if shutil.which("mpirun") else None
    wanted = Build(frameworks, mpi, cuda=find_cuda())
    names = ", ".join(f"{name} {version}" for name, version in frameworks.items())
    if not wanted.cuda and Path("/dev/nvidiactl").exists():
        tell("there is a GPU here and no nvcc: Horovod is built without CUDA, and ends a process that gives it a CUDA "
             "tensor; docs/cuda.md says how to build it with CUDA from pip's packages alone")  # fmt: skip
    try:
        cache = options.cache or cache_folder()
        for build in builds_from(wanted) if options.force else ():
            shutil.rmtree(cache / build.key(), ignore_errors=True)
        if not options.force and already_right(buildable(wanted, cache)):
            tell(f"Horovod {HOROVOD_VERSION} is already built for {names}")
            return 0
        pip("install", "-q", *BUILD_TOOLS, *RUN_NEEDS)
        install(build_with_fallback(wanted, cache), wanted)
    except BuildFailed as error:
        tell(f"build_horovod: {error}")
        return 1
    tell(f"Horovod {HOROVOD_VERSION} installed for {names}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
