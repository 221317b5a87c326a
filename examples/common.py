"""What the examples share and a reader may skip: arguments, learning rate, progress bar, the last line.

The two lines that matter, the import and ``DistributedOptimizer(...)``, are in each example itself.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from typing import Any

from dgc_horovod.config import DENSE_VALUES
from dgc_horovod.wire.codecs import VALUE_CODECS

UNCOMPRESSED = ("none", "fp16")  # Horovod's own; the other choices keep a residual and take a density
CHOICES = (*UNCOMPRESSED, "dgc", "topk", "gaussian")


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Defaults behind every option, and a width that fits a screen."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=110)


def arguments(description: str, lr_falls: str = "to 0 along a cosine", **defaults: Any) -> argparse.ArgumentParser:
    """The options of all examples, with the example's own defaults.

    Args:
        description: for ``--help``.
        lr_falls: how the learning rate does.
        defaults: by option; there is ``--clip-norm`` and ``--lr-warmup-epochs`` only where they are given.
    """

    def fraction(text: str) -> float:
        value = float(text)
        if not 0 < value <= 1:
            raise argparse.ArgumentTypeError(f"{text} is not in (0, 1]")
        return value

    def positive(text: str) -> float:
        value = float(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not a positive number")
        return value

    def count(text: str) -> int:
        value = int(text)
        if value < 0:
            raise argparse.ArgumentTypeError(f"{text} is negative")
        return value

    def some(text: str) -> int:
        if count(text) == 0:
            raise argparse.ArgumentTypeError("at least 1 is needed")
        return int(text)

    parser = argparse.ArgumentParser(description=description, formatter_class=_Help)
    add = parser.add_argument
    add("--compression", choices=CHOICES, default="dgc", help="what is sent each step")
    add("--values", choices=list(VALUE_CODECS), default="bf16", help="number format of the elements sent")
    add("--dense-values", choices=DENSE_VALUES, default="auto", help="and of the small tensors that are not compressed")
    add("--density", type=fraction, metavar="D", help="fraction of elements sent, in (0, 1]")
    add("--epochs", type=some, metavar="E", help="passes over the data")
    add("--batch-size", type=some, metavar="B", help="samples per rank and step")
    add("--lr", type=positive, metavar="LR", help=f"highest learning rate; falls {lr_falls}".replace("%", "%%"))
    if "lr_warmup_epochs" in defaults:
        add("--lr-warmup-epochs", type=count, metavar="E", help="learning rate rises linearly over these epochs")
    add("--warmup-epochs", type=count, metavar="E", help="density falls from 0.25 to D over these epochs; 0: D at once")
    if "clip_norm" in defaults:
        add("--clip-norm", type=positive, metavar="C", help="L2 norm at which the averaged gradient is clipped")
    add("--seed", type=count, default=0, metavar="S", help="of initial weights and of the order of the samples")
    parser.set_defaults(**defaults)
    return parser


def fields(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of the compression that every example lets be chosen."""
    return {name: getattr(args, name) for name in ("density", "values", "dense_values")}


def learning_rate(args: argparse.Namespace, steps_per_epoch: int) -> Callable[[int], float]:
    """Step -> factor on ``args.lr``, for ``LambdaLR``: a linear warm-up, then a cosine to 0."""
    warmup, total = args.lr_warmup_epochs * steps_per_epoch, args.epochs * steps_per_epoch

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))

    return factor


class Progress:
    """A bar on rank 0, advanced once an epoch: tqdm's where it is installed, otherwise a line an epoch."""

    def __init__(self, epochs: int, rank: int) -> None:
        self._bar, self._epoch, self._epochs, self._rank = None, 0, epochs, rank
        if rank == 0:
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self._bar = tqdm(total=epochs, unit="epoch", ncols=80)

    def advance(self, loss: float) -> None:
        """One epoch is over; `loss` is its last training loss on this rank."""
        self._epoch += 1
        if self._bar is not None:
            self._bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            self._bar.update()
            if self._epoch == self._epochs:
                self._bar.close()
        elif self._rank == 0:
            print(f"epoch {self._epoch}/{self._epochs}: loss {loss:.3f}", file=sys.stderr, flush=True)


def traffic(optimizer: Any, numel: int, compression: str, steps: int, ranks: int) -> dict[str, int]:
    """Bytes that this rank sent and received, and what dense fp32 would have cost, for a model of `numel` parameters.

    Stock Horovod keeps no count, so for ``none`` and ``fp16`` it is arithmetic: each gradient handed to
    allreduce once a step, of which a ring passes 2(N-1)/N through every rank.
    """
    if compression not in UNCOMPRESSED:
        stats = optimizer.compression_stats()
        return {key: stats[key] for key in ("bytes_sent", "bytes_dense", "bytes_received", "bytes_dense_received")}
    elements = steps * numel
    sent = elements * (2 if compression == "fp16" else 4)
    ring = 2 * (ranks - 1) / ranks
    return {
        "bytes_sent": sent,
        "bytes_dense": 4 * elements,
        "bytes_received": int(ring * sent),
        "bytes_dense_received": int(ring * 4 * elements),
    }


def report(args: argparse.Namespace, quality_name: str, quality: float, seconds: float, sent: dict[str, int]) -> None:
    """Print one sentence for people and one ``RESULT`` line for programs.

    `quality_name` is "accuracy", "perplexity", or the unit of a validation loss.
    """
    ratio = sent["bytes_dense"] / sent["bytes_sent"]
    shown = f"{quality:.1%}" if quality_name == "accuracy" else f"{quality:.3f}"
    name = quality_name if quality_name in ("accuracy", "perplexity") else f"validation loss ({quality_name})"
    print(
        f"{args.compression}: {name} {shown}, sent {sent['bytes_sent'] / 1e6:.1f} MB per rank, dense fp32 would have "
        f"sent {sent['bytes_dense'] / 1e6:.0f} MB: {ratio:.{0 if ratio >= 10 else 1}f}x less"
    )
    result = {
        "compression": args.compression,
        "quality_name": quality_name,
        "quality": quality,
        "epochs": args.epochs,
        "seconds": round(seconds, 2),
        **sent,
        "ratio": ratio,
        "received_ratio": sent["bytes_dense_received"] / max(1, sent["bytes_received"]),  # 0 on a single rank
    }
    print("RESULT", json.dumps(result), flush=True)
