"""The choice of a backend: an explicit choice must work; the automatic one may fall back, and logs the reason."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable

from dgc_horovod import envvars
from dgc_horovod.errors import BackendUnavailable
from dgc_horovod.kernels.contract import Kernels
from dgc_horovod.wire.packet import Coder

_log = logging.getLogger(__name__)


def _native(device: str, threads: int) -> Kernels:
    if not device.startswith("cpu"):
        raise BackendUnavailable(f"it has no kernels for {device.split(':')[0]} tensors")
    from dgc_horovod.kernels.native.kernels import NativeKernels

    return NativeKernels(threads)


def _torch_eager(device: str, threads: int) -> Kernels:
    try:
        from dgc_horovod.kernels.torch_eager import TorchEagerKernels
    except ImportError:
        raise BackendUnavailable("torch is not installed") from None
    return TorchEagerKernels(device)


def _triton(device: str, threads: int) -> Kernels:
    if device.startswith("cpu") and envvars.value(envvars.BACKEND) != "triton":
        raise BackendUnavailable("its kernels are for CUDA tensors")  # the interpreter is for tests only
    if "tensorflow" in sys.modules and "triton" not in sys.modules:  # both load LLVM, which aborts the process
        raise BackendUnavailable("Triton cannot be loaded after TensorFlow: import triton before it")
    try:
        from dgc_horovod.kernels.triton.kernels import TritonKernels
    except ImportError as error:
        raise BackendUnavailable(f"torch or triton is not installed ({error})") from None
    return TritonKernels(device, host_coder(threads))


def host_coder(threads: int) -> Coder | None:
    """Return the native coder, for packets that the host writes, or None."""
    try:
        return _native("cpu", threads).coder
    except BackendUnavailable:
        return None


def _reference(device: str, threads: int) -> Kernels:
    if not device.startswith("cpu"):
        raise BackendUnavailable(f"NumPy cannot hold {device.split(':')[0]} tensors")
    from dgc_horovod.kernels.reference import ReferenceKernels

    return ReferenceKernels()


# Name -> function that makes the kernels for a device ("cpu", "cuda:0") and a number of threads, or raises
# BackendUnavailable; in order of preference.
BACKENDS: dict[str, Callable[[str, int], Kernels]] = {
    "native": _native,
    "triton": _triton,
    "torch_eager": _torch_eager,
    "reference": _reference,
}


@functools.cache
def _say_once(level: int, words: str) -> None:
    _log.log(level, "dgc_horovod: compressing %s", words)


def choose(device: str, threads: int = 0) -> Kernels:
    """Choose the kernels for tensors of `device` by ``DGC_BACKEND``.

    Args:
        device: device that holds the gradients, such as "cpu" or "cuda:0".
        threads: largest number of threads of the native kernels, >= 0; 0: as many as torch uses.

    Raises:
        ConfigError: ``DGC_BACKEND`` names no backend.
        BackendUnavailable: the named backend cannot serve this device.
    """
    wanted = envvars.value(envvars.BACKEND)
    reasons: dict[str, str] = {}
    best = "native" if device.startswith("cpu") else "triton"
    for name, create in BACKENDS.items():
        if wanted not in ("auto", name):
            continue
        try:
            kernels = create(device, threads)
        except BackendUnavailable as error:
            reasons[name] = f"{name}: {error}"
            continue
        if best in reasons and wanted == "auto":
            words = f"with {name} kernels, several times slower than the {best} ones ({reasons[best]})"
            _say_once(logging.WARNING, words)
        elif best != "native":
            _say_once(logging.INFO, f"on {device} with {name} kernels")
        return kernels
    advice = "install torch, or with a C++ compiler at hand install dgc_horovod again"
    if wanted != "auto":
        advice = f"unset {envvars.BACKEND.name}"
    raise BackendUnavailable(f"no kernels for {device} ({'; '.join(reasons.values())}); {advice}")
