"""bfloat16 in NumPy, which has none: the upper 16 bits of a float32."""

from __future__ import annotations

import numpy as np

_HALF = np.uint32(16)  # bits
_NAN = np.uint16(0x7FC0)
_LARGEST = np.uint32(0x7F7F0000)  # finite one
_UPPER, _EXPONENT_AND_DIGITS = np.uint32(0xFFFF0000), np.uint32(0x7FFF0000)


def rounded(values: np.ndarray) -> np.ndarray:
    """Float32 values as the bits of bfloat16 ones, uint16; to nearest, halves to even, finite ones to finite ones."""
    values = np.ascontiguousarray(values, np.float32)
    bits = values.view(np.uint32)
    bits = np.where((bits & _EXPONENT_AND_DIGITS) == _LARGEST, bits & _UPPER, bits)  # none is rounded to infinity
    nearest = ((bits + np.uint32(0x7FFF) + ((bits >> _HALF) & np.uint32(1))) >> _HALF).astype(np.uint16)
    return np.where(np.isnan(values), _NAN, nearest)


def widened(bits: np.ndarray) -> np.ndarray:
    """Bits of bfloat16 values as float32, exactly."""
    return (bits.astype(np.uint32) << _HALF).view(np.float32)
