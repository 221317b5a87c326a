"""A model as far as a plan needs it: its size in words, or shapes that stand for it."""

from __future__ import annotations

import re
from decimal import Decimal

from dgc_horovod.config import DGCConfig
from dgc_horovod.core.bucketing import TensorSpec
from dgc_horovod.errors import ConfigError

_SMALL = 0.002  # of the elements are biases and norms: ResNet-50's share
_LARGEST_TENSOR = 2**30
MOST_ELEMENTS, _MOST_TENSORS = 10**12, 1000  # each tensor is priced by every method and number of workers
_SIZES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9}


def parse_size(text: str) -> int:
    """A number of elements: ``25.6M`` -> 25600000. K, M, and G or B; plain numbers too.

    Raises:
        ConfigError: it is no such number, not whole, below 1, or above a million million.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGB]?)", text.strip().upper())
    size = Decimal(found[1]) * _SIZES[found[2]] if found else Decimal(0)
    if not 1 <= size <= MOST_ELEMENTS or size != int(size):
        raise ConfigError(
            f"--model-size must be a whole number of elements, from 1 to {MOST_ELEMENTS // 10**9}B, such as 25.6M, "
            f"350K, 1.3B or 25557032, got {text!r}"
        )
    return int(size)


def tensors(elements: int, config: DGCConfig) -> list[TensorSpec]:
    """Shapes that stand for a model of which only the size is known: square matrices, and one vector.

    Args:
        elements: number of elements of the model, n >= 1.
        config: compression settings; a matrix fills a bucket, or is larger where these would be more than 1,000.
    """
    small = round(_SMALL * elements)
    most = min(max(config.bucket_bytes // 4, 2**20, -(-elements // _MOST_TENSORS)), _LARGEST_TENSOR)
    matrices = [
        TensorSpec(f"weight{start}", _nearly_square(min(most, elements - small - start)))
        for start in range(0, elements - small, most)
    ]
    return [TensorSpec("biases", (small,)), *matrices]


def _nearly_square(numel: int) -> tuple[int, int]:
    rows = next(rows for rows in range(int(numel**0.5), 0, -1) if numel % rows == 0)
    return rows, numel // rows
