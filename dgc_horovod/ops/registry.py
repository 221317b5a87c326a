"""Which kernels run: an explicit choice must work, the automatic one may fall back and says why."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

from dgc_horovod import envvars
from dgc_horovod.errors import BackendUnavailable, ConfigError
from dgc_horovod.ops import native
from dgc_horovod.ops.schema import Kernels

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Backend:
    """One entry of the registry; earlier entries are preferred.

    `reason_against` takes a device type ("cpu", "cuda") and returns why the backend cannot serve it, or "".
    """

    name: str
    reason_against: Callable[[str], str]
    create: Callable[[str], Kernels]


def _torch_missing(device: str) -> str:
    try:
        importlib.import_module("torch")
    except ImportError:
        return "torch is not installed"
    return ""


def _native_missing(device: str) -> str:
    if device != "cpu":
        return f"it has no kernels for {device} tensors"
    try:
        native.load()
    except BackendUnavailable as error:
        return str(error)
    return ""


def _create_native(device: str) -> Kernels:
    from dgc_horovod.ops.native_kernels import NativeKernels

    return NativeKernels()


def _create_torch_eager(device: str) -> Kernels:
    from dgc_horovod.ops.torch_eager import TorchEagerKernels

    return TorchEagerKernels(device)


def _create_reference(device: str) -> Kernels:
    from dgc_horovod.ops.reference import ReferenceKernels

    return ReferenceKernels()


BACKENDS = (
    Backend("native", _native_missing, _create_native),
    Backend("torch_eager", _torch_missing, _create_torch_eager),
    Backend(
        "reference", lambda device: "" if device == "cpu" else f"NumPy cannot hold {device} tensors", _create_reference
    ),
)


@functools.cache
def _say_once_that_it_is_slower(name: str, reason: str) -> None:
    _log.warning(
        "dgc_horovod: compressing with %s kernels, several times slower than the native ones (%s)", name, reason
    )


def choose(device: str) -> Kernels:
    """The kernels for tensors of `device` ("cpu", "cuda:0"), as ``DGC_BACKEND`` asks.

    Raises:
        ConfigError: ``DGC_BACKEND`` names no backend.
        BackendUnavailable: the named backend cannot serve this device.
    """
    wanted = envvars.BACKEND.read()
    names = [backend.name for backend in BACKENDS]
    if wanted != "auto" and wanted not in names:
        raise ConfigError(f"{envvars.BACKEND.name} must be one of auto, {', '.join(names)}, got {wanted!r}")
    reasons: list[str] = []
    for backend in BACKENDS:
        if wanted not in ("auto", backend.name):
            continue
        reason = backend.reason_against(device.split(":")[0])
        if not reason:
            _log.debug("kernels on %s: %s%s", device, backend.name, f" ({'; '.join(reasons)})" if reasons else "")
            if device == "cpu" and wanted == "auto" and reasons:
                _say_once_that_it_is_slower(backend.name, reasons[0])
            return backend.create(device)
        reasons.append(f"{backend.name}: {reason}")
    raise BackendUnavailable(
        f"no kernels for {device} ({'; '.join(reasons)}); unset {envvars.BACKEND.name}, install torch, or with a C++ "
        "compiler at hand install dgc_horovod again"
    )
