"""Sources of the installed Python packages as tokens of a byte-pair code that is learnt from them.

Every machine has such sources, not the same ones: `digest` tells texts apart.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sysconfig
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

SYMBOLS = 50_304  # GPT-2's number of tokens, rounded up to a multiple of 64
BYTES, LEARNT_FROM = 96 << 20, 24 << 20  # of the text; of the parts that the code is learnt from
_PART = 1 << 16  # bytes; one part of every twenty is for the test


@functools.cache
def corpus() -> tuple[Tensor, Tensor]:
    """Tokens to train on and to test on; kept in a file, since coding them takes a while."""
    text = _read()
    file = Path(tempfile.gettempdir()) / f"dgc-tokens-{os.getuid()}-{digest()}.npz"
    if not file.exists():
        made = file.with_suffix(f".{os.getpid()}.npz")
        np.savez(made, **dict(zip(("train", "test"), _coded(text), strict=True)))
        made.replace(file)
    with np.load(file) as kept:
        return torch.from_numpy(kept["train"].astype(np.int32)), torch.from_numpy(kept["test"].astype(np.int32))


@functools.cache
def digest() -> str:
    """A hash of the text and of what is made of it."""
    return hashlib.sha256(_read() + f"{SYMBOLS} {LEARNT_FROM}".encode()).hexdigest()[:12]


def _coded(text: bytes) -> list[np.ndarray]:
    from tokenizers import ByteLevelBPETokenizer

    parts = [text[at : at + _PART].decode(errors="replace") for at in range(0, len(text), _PART)]
    tokenizer = ByteLevelBPETokenizer()
    learnt_from = parts[:: max(1, len(text) // LEARNT_FROM)]
    tokenizer.train_from_iterator(learnt_from, vocab_size=SYMBOLS, show_progress=False)
    coded = [np.array(each.ids, np.uint16) for each in tokenizer.encode_batch(parts)]
    return [np.concatenate([part for i, part in enumerate(coded) if i % 20]), np.concatenate(coded[::20])]


@functools.cache
def _read() -> bytes:
    """The first 96 MiB of the packages' sources, or all of them."""
    roots = [Path(sysconfig.get_path(name)) for name in ("purelib", "stdlib")]
    found, size = [], 0
    for file in (file for root in roots for file in sorted(root.rglob("*.py"))):
        found.append(file.read_bytes())
        size += len(found[-1]) + 1
        if size >= BYTES:
            break
    return b"\n".join(found)[:BYTES]
