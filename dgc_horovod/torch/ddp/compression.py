"""``Compression`` for torch.distributed: DDP's own exchange, and the presets."""

from __future__ import annotations

from typing import Any

from dgc_horovod.compression import ConfiguredCompressor, Presets
from dgc_horovod.errors import UnsupportedUse


class Uncompressed:
    """DDP's own exchange of gradients.

    Args:
        name: "none", or "fp16": gradients travel as half precision.
    """

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __repr__(self) -> str:
        return f"Compression.{self.__name__}"

    def compress(self, tensor: Any) -> Any:
        """Raises UnsupportedUse: DDP compresses no tensor alone."""
        raise UnsupportedUse(f"{self!r} is for register() and DistributedOptimizer of dgc_horovod.torch.ddp alone")

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """Raises UnsupportedUse: see `compress`."""
        return self.compress(tensor)


class DGCCompressor(ConfiguredCompressor):
    """See `ConfiguredCompressor`."""

    framework = "torch"


class Compression(Presets):
    """What to send. ``none`` and ``fp16`` leave the exchange to DDP; each other takes any field of DGCConfig."""

    compressor = DGCCompressor
    none = Uncompressed("none")
    fp16 = Uncompressed("fp16")
