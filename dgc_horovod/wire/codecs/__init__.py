"""How positions and values are written in a packet: the NumPy reference, which other coders match byte for byte."""

from dgc_horovod.wire.codecs.indices import INDEX_CODECS, IndexCodec
from dgc_horovod.wire.codecs.values import VALUE_CODECS, ValueCodec

__all__ = ["INDEX_CODECS", "VALUE_CODECS", "IndexCodec", "ValueCodec"]
