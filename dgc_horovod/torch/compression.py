"""``Compression`` for PyTorch: Horovod's own choices and the presets."""

from __future__ import annotations

from horovod.torch.compression import Compression as HorovodCompression
from horovod.torch.compression import Compressor

from dgc_horovod.compression import ConfiguredCompressor, Presets


class DGCCompressor(ConfiguredCompressor, Compressor):
    """See `ConfiguredCompressor`."""

    framework = "torch"


class Compression(Presets):
    """Compression methods. ``none`` and ``fp16`` are Horovod's; the others take any field of DGCConfig as keyword."""

    compressor = DGCCompressor
    none = HorovodCompression.none
    fp16 = HorovodCompression.fp16
