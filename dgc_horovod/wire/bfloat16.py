"""bfloat16 in NumPy, which has none: the upper 16 bits of a float32."""

from __future__ import annotations

import numpy as np

_HALF = np.uint32(16)  # bits
_NAN = np.uint16(0x7FC0)


def rounded(values: np.ndarray) -> np.ndarray:
    """Float32 values as the bits of bfloat16 ones, uint16; to nearest, halves to even, infinite beyond the largest."""
    values = np.ascontiguousarray(values, np.float32)
    bits = values.view(np.uint32)
    nearest = ((bits + np.uint32(0x7FFF) + ((bits >> _HALF) & np.uint32(1))) >> _HALF).astype(np.uint16)
    return np.where(np.isnan(values), _NAN, nearest)


def widened(bits: np.ndarray) -> np.ndarray:
    """Bits of bfloat16 values as float32, exactly."""
    return (bits.astype(np.uint32) << _HALF).view(np.float32)
