"""``Compression`` for TensorFlow: Horovod's own choices and the presets."""

from __future__ import annotations

from horovod.tensorflow.compression import Compression as HorovodCompression
from horovod.tensorflow.compression import Compressor

from dgc_horovod.compression import ConfiguredCompressor, Presets


class DGCCompressor(ConfiguredCompressor, Compressor):
    """See `ConfiguredCompressor`."""

    framework = "tensorflow"


class Compression(Presets):
    """What to send. ``none`` and ``fp16`` are Horovod's; each other takes any field of DGCConfig as keyword."""

    compressor = DGCCompressor
    none = HorovodCompression.none
    fp16 = HorovodCompression.fp16
