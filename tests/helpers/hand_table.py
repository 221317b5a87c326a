"""Three steps of DGC worked out by hand: 6 elements, 2 ranks, m = 0.5, two elements sent a step, masking on.

Every number is a multiple of 1/16, so every result is exact. Written as (u, v) after each step per
rank, and the mean of what both sent. Ties go to the lower position: rank 1 has one in step 2.
"""

from __future__ import annotations

NAN = float("nan")
DENSITY, MOMENTUM = 0.33, 0.5

GRADIENTS = [  # step -> rank -> g
    ([4, -2, 1, 0, 3, -1], [1, 5, -3, 2, 0, -4]),
    ([1, 1, 1, 1, 1, 1], [0, 2, 0, -2, 0, 2]),
    ([0, 0, -2, 0, 0, 4], [-3, 1, 0, 0, 2, 0]),
]
GRADIENTS_WITH_NAN = [GRADIENTS[0], (GRADIENTS[1][0], [0, 2, NAN, -2, 0, 2]), GRADIENTS[2]]

# u = 0.5*u + g; v += u
MOMENTUM_TABLE = [
    {
        "u": ([0, -2, 1, 0, 0, -1], [1, 0, -3, 2, 0, 0]),
        "v": ([0, -2, 1, 0, 0, -1], [1, 0, -3, 2, 0, 0]),
        "mean": [2, 2.5, 0, 0, 1.5, -2],
    },
    {
        "u": ([1, 0, 0, 1, 1, 0.5], [0.5, 0, 0, -1, 0, 2]),
        "v": ([1, 0, 0, 1, 1, -0.5], [1.5, 0, 0, 1, 0, 2]),
        "mean": [0, 0, -1, 0, 0, 0],
    },
    {
        "u": ([0.5, 0, 0, 0.5, 0.5, 0], [-2.75, 1, 0, -0.5, 0, 0]),
        "v": ([1.5, 0, 0, 1.5, 1.5, 0], [-1.25, 1, 0, 0.5, 0, 0]),
        "mean": [0, 0, -1, 0, 1, 3.375],
    },
]

# u = 0.5*u + g; v += g + 0.5*u
NESTEROV_TABLE = [
    {
        "u": ([0, -2, 1, 0, 0, -1], [1, 0, -3, 2, 0, 0]),
        "v": ([0, -3, 1.5, 0, 0, -1.5], [1.5, 0, -4.5, 3, 0, 0]),
        "mean": [3, 3.75, 0, 0, 2.25, -3],
    },
    {
        "u": ([1, 0, 0, 1, 1, 0.5], [0.5, 0, 0, -1, 0, 2]),
        "v": ([1.5, 0, 0, 1.5, 1.5, -0.25], [1.75, 0, 0, 0.5, 0, 3]),
        "mean": [0, 0.5, -1, 0, 0, 0],
    },
    {
        "u": ([0.5, 0, 0, 0.5, 0.5, 0], [-2.75, 1, 0, -0.5, 0, 0]),
        "v": ([1.75, 0, 0, 1.75, 1.75, 0], [-2.625, 1.5, 0, 0.25, 0, 0]),
        "mean": [0, 0, -1.5, 0, 1.5, 4.6875],
    },
]

# As MOMENTUM_TABLE, with a NaN in rank 1's gradient of step 2. There that element enters as 0, and the rank sends
# nothing; rank 0 gets back what it had sent; nobody applies the step.
NAN_TABLE = [
    MOMENTUM_TABLE[0],
    {
        "u": ([1, 0, 1.5, 1, 1, 0.5], [0.5, 2, -1.5, -1, 0, 2]),
        "v": ([1, -2, 2.5, 1, 1, -0.5], [1.5, 2, -4.5, 1, 0, 2]),
        "mean": None,
    },
    {
        "u": ([0.5, 0, -1.25, 0.5, 0.5, 0], [-2.75, 0, 0, -0.5, 2, 1]),
        "v": ([1.5, 0, 1.25, 1.5, 1.5, 0], [-1.25, 0, 0, 0.5, 2, 3]),
        "mean": [0, 1, -2.625, 0, 0, 1.875],
    },
]
