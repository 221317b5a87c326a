"""The native library (csrc/): found, loaded, its functions declared, its threads those of torch.

The library is built with the package where there is a C++ compiler. It picks the widest instruction set of the
processor; the results are the same bits for each of them, and for any number of threads.
"""

from __future__ import annotations

import ctypes
import sys
import sysconfig
from pathlib import Path
from typing import Any

from dgc_horovod.errors import BackendUnavailable

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
_INTERFACE = 9  # of dispatch.cpp
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "dgc_interface": (_INT, ()),
    "dgc_use_openmp": (None, (_POINTER,)),
    "dgc_instructions": (ctypes.c_char_p, ()),
    "dgc_use_instructions": (_INT, (ctypes.c_char_p,)),
    "dgc_pass": (
        _INT,
        (
            _POINTER,
            _POINTER,
            _INT,
            _POINTER,
            _LONG,
            _FLOAT,
            _POINTER,
            _LONG,
            _POINTER,
            _POINTER,
            _LONG,
            _INT,
            _POINTER,
            _LONG,
        ),
    ),
    "dgc_sums": (None, (_POINTER, _LONG, _POINTER, _LONG, _POINTER)),
    "dgc_measure": (None, (_POINTER, _LONG, _LONG, _POINTER, _LONG, _POINTER)),
    "dgc_count_at_least": (_LONG, (_POINTER, _LONG, _FLOAT, _LONG)),
    "dgc_kth_largest": (_FLOAT, (_POINTER, _LONG, _LONG)),
    "dgc_keep_largest": (_LONG, (_POINTER, _POINTER, _LONG, _LONG, _POINTER, _POINTER)),
    "dgc_keep_at_least": (_LONG, (_POINTER, _POINTER, _LONG, _FLOAT)),
    "dgc_settle": (None, (_POINTER, _POINTER, _INT, *[_POINTER] * 3, _LONG, _POINTER)),
    "dgc_put": (None, (_POINTER, _POINTER, _POINTER, _LONG)),
    "dgc_fill": (_INT, (_POINTER, _LONG, _POINTER, _LONG, _FLOAT, _INT, _POINTER, _LONG)),
    "dgc_fill_summed": (_INT, (_POINTER, _LONG, _POINTER, _FLOAT)),
    "dgc_encode": (_LONG, (_POINTER, _POINTER, _POINTER, _LONG, _POINTER, _POINTER)),
    "dgc_decode": (_INT, (_POINTER, _POINTER, _LONG, _POINTER, _POINTER)),
    "dgc_checksum": (ctypes.c_uint32, (_POINTER, _LONG, _LONG)),
}


def library_paths() -> list[Path]:
    """The built libraries beside this file, that of this Python first: a folder may serve several machines."""
    ours = f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    return sorted(Path(__file__).parent.glob("_native*.so"), key=lambda path: (path.name != ours, path.name))


def load(path: Path | None = None) -> ctypes.CDLL:
    """The library with its functions declared: that at `path`, else the first of `library_paths` that loads.

    Raises:
        BackendUnavailable: it was not built, or does not load; or this machine orders bytes as packets do not.
    """
    if sys.byteorder != "little":
        raise BackendUnavailable("the native library writes packets as memory has them; this machine is big-endian")
    problems = []
    for each in [path] if path else library_paths():
        try:
            return _loaded(each)
        except BackendUnavailable as problem:
            problems.append(problem)
    if problems:
        raise problems[0]
    raise BackendUnavailable("the native library was not built (no C++ compiler when dgc_horovod was installed)")


def _loaded(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise BackendUnavailable(f"the native library does not load: {error}") from error
    if (theirs := library.dgc_interface()) != _INTERFACE:
        raise BackendUnavailable(
            f"{path.name} has interface {theirs}, this version needs {_INTERFACE}; install dgc_horovod again"
        )
    library.dgc_use_openmp(openmp_of_the_process())
    return library


def openmp_of_the_process() -> int | None:
    """Address of GOMP_parallel in the OpenMP runtime that torch has loaded, or None."""
    if "torch" not in sys.modules:
        return None
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    paths = {line.split(maxsplit=5)[-1] for line in lines if "omp" in line and ".so" in line}
    for path in sorted(paths, key=lambda path: ("/torch/lib/" not in path and "/torch.libs/" not in path, path)):
        name = Path(path).name
        if name.startswith(("libgomp", "libiomp", "libomp")):
            try:
                return ctypes.cast(ctypes.CDLL(path).GOMP_parallel, _POINTER).value
            except (OSError, AttributeError):
                continue
    return None
