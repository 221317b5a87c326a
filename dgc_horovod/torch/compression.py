"""``Compression``: Horovod's own choices and ours, each a preset of DGCConfig."""

from __future__ import annotations

from typing import Any

import torch
from horovod.torch.compression import Compression as HorovodCompression
from horovod.torch.compression import Compressor

from dgc_horovod.config import DGCConfig, check_field_names
from dgc_horovod.errors import ConfigError, UnsupportedUse

_TOPK = {"momentum_correction": False, "factor_masking": False}

# The fields in which a preset differs from DGCConfig's defaults.
PRESETS: dict[str, dict[str, Any]] = {
    "dgc": {"rule": "exact", "momentum_correction": True, "factor_masking": True},
    "topk": {"rule": "exact", **_TOPK},
    "sampled": {"rule": "sampled", **_TOPK},
    "gaussian": {"rule": "gaussian", **_TOPK},
    "random": {"rule": "random", **_TOPK},
    "threshold": {"rule": "threshold", **_TOPK},
}


class DGCCompressor(Compressor):
    """A configured compression, for ``dgc_horovod.torch.DistributedOptimizer`` only.

    Horovod's own optimizer can hand a compressor one tensor without its name or state; that cannot carry
    a residual, so there it raises on the first step instead of training uncompressed.
    """

    def __init__(self, config: DGCConfig) -> None:
        self.config = config

    def __repr__(self) -> str:
        return f"DGCCompressor({self.config})"

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Raises UnsupportedUse: see the class."""
        raise UnsupportedUse(
            "this compression was given to horovod.torch.DistributedOptimizer, which cannot run it; use "
            "`from dgc_horovod.torch import DistributedOptimizer` in the script, or launch the unchanged script "
            "with dgcrun"
        )

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Raises UnsupportedUse: see the class."""
        return self.compress(tensor)[0]


class Compression:
    """What to send. ``none`` and ``fp16`` are Horovod's; each other takes any field of DGCConfig as keyword."""

    none = HorovodCompression.none
    fp16 = HorovodCompression.fp16

    @staticmethod
    def dgc(density: float = 0.001, **fields: Any) -> DGCCompressor:
        """Deep Gradient Compression: exact top-k with momentum correction and factor masking."""
        return _preset("dgc", density=density, **fields)

    @staticmethod
    def topk(density: float = 0.001, **fields: Any) -> DGCCompressor:
        """TopK-SGD: exact top-k and residual; the wrapped optimizer keeps its momentum."""
        return _preset("topk", density=density, **fields)

    @staticmethod
    def sampled(density: float = 0.001, **fields: Any) -> DGCCompressor:
        """TopK-SGD with the threshold taken from a 1% sample."""
        return _preset("sampled", density=density, **fields)

    @staticmethod
    def gaussian(density: float = 0.001, **fields: Any) -> DGCCompressor:
        """GaussianK-SGD: threshold from mean and deviation, then a bracketed search."""
        return _preset("gaussian", density=density, **fields)

    @staticmethod
    def random(density: float = 0.001, **fields: Any) -> DGCCompressor:
        """Random-k with residual: the baseline."""
        return _preset("random", density=density, **fields)

    @staticmethod
    def threshold(value: float, *, max_density: float = 0.01, **fields: Any) -> DGCCompressor:
        """Everything of magnitude `value` or more, at most `max_density` of a bucket."""
        return _preset("threshold", threshold=value, max_density=max_density, **fields)


def _preset(name: str, **fields: Any) -> DGCCompressor:
    check_field_names(fields)
    return DGCCompressor(DGCConfig(**{**PRESETS[name], **fields}))


def config_of(compression: Any) -> DGCConfig | None:
    """The config of one of our compressions or of a DGCConfig; None for Horovod's own compressors.

    Raises:
        ConfigError: it is neither, e.g. ``Compression.dgc`` without the call.
    """
    if isinstance(compression, DGCConfig):
        return compression
    if isinstance(compression, DGCCompressor):
        return compression.config
    if hasattr(compression, "compress") and hasattr(compression, "decompress"):
        return None
    name = getattr(compression, "__name__", "dgc")
    raise ConfigError(
        f"compression must be Compression.none, Compression.fp16 or a call such as Compression.{name}(density=0.001), "
        f"got {compression!r}"
    )
