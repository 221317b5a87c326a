"""Language model: an LSTM that predicts the next character of Python's own standard library sources.

    horovodrun -np 2 python examples/torch_lstm.py --compression dgc

Shows gradient clipping under compression: an update that has been compressed must not be clipped any more,
so the limit is given to the compression, which clips each rank's gradient before it is accumulated.
"""

from __future__ import annotations

import sysconfig
import time
from pathlib import Path

import common
import horovod.torch as hvd
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from dgc_horovod.torch import Compression, DistributedOptimizer, WarmupSchedule

TEXT_BYTES = 1_500_000
WINDOW = 32  # characters predicted per sample
STEPS_PER_EPOCH = 100  # a real pass over the text would take minutes
SYMBOLS = 97  # newline, the 95 printable ASCII characters, and one for all others


def text() -> tuple[torch.Tensor, torch.Tensor]:
    """Training and validation text as symbol numbers; the validation part is the last 5%."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    source = bytearray()
    for file in files:
        source += file.read_bytes()
        if len(source) >= TEXT_BYTES:
            break
    symbol = torch.zeros(256, dtype=torch.long)
    symbol[10] = 1
    symbol[32:127] = torch.arange(2, SYMBOLS)
    numbers = symbol[torch.frombuffer(source[:TEXT_BYTES], dtype=torch.uint8).long()]
    split = len(numbers) * 95 // 100
    return numbers[:split], numbers[split:]


class CharacterModel(nn.Module):
    """Embedding, one LSTM layer, linear output: 108,305 parameters."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, 48)
        self.lstm = nn.LSTM(48, width, batch_first=True)
        self.output = nn.Linear(width, SYMBOLS)
        for p in self.parameters():
            nn.init.uniform_(p, -0.1, 0.1)

    def loss(self, windows: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy of every next symbol in `windows` (samples x (WINDOW + 1)), in nats."""
        hidden, _ = self.lstm(self.embedding(windows[:, :-1]))
        return cross_entropy(self.output(hidden).flatten(0, 1), windows[:, 1:].flatten())


def random_windows(numbers: torch.Tensor, count: int, draw: torch.Generator) -> torch.Tensor:
    """`count` windows from random places of the text."""
    starts = torch.randint(0, len(numbers) - WINDOW, (count, 1), generator=draw)
    return numbers[starts + torch.arange(WINDOW + 1)]


def validation_loss(model: CharacterModel, numbers: torch.Tensor) -> float:
    """Mean loss over this rank's share of the validation text."""
    windows = numbers[: len(numbers) // (WINDOW + 1) * (WINDOW + 1)].view(-1, WINDOW + 1)
    share = len(windows) // hvd.size()
    with torch.no_grad():
        return float(model.loss(windows[hvd.rank() * share :][:share]))


def main() -> None:
    """Train on all ranks and report from rank 0."""
    args = common.arguments(
        f"A character LSTM on Python's standard library. An epoch is {STEPS_PER_EPOCH} steps here.",
        density=0.005,
        epochs=10,
        batch_size=8,
        lr=10.0,
        lr_warmup_epochs=1,
        warmup_epochs=1,
        clip_norm=0.1,
    ).parse_args()
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    train, validation = text()
    draw = torch.Generator().manual_seed(1000 * args.seed + hvd.rank())
    model = CharacterModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    compressed = args.compression not in common.UNCOMPRESSED
    compression = getattr(Compression, args.compression)
    if compressed:
        warmup = WarmupSchedule(steps=args.warmup_epochs * STEPS_PER_EPOCH) if args.warmup_epochs else None
        compression = compression(**common.fields(args), clip_norm=args.clip_norm, warmup=warmup)
    optimizer = DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)

    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, common.learning_rate(args, STEPS_PER_EPOCH))
    progress, start = common.Progress(args.epochs, hvd.rank()), time.perf_counter()
    for _ in range(args.epochs):
        for _ in range(STEPS_PER_EPOCH):
            optimizer.zero_grad()
            loss = model.loss(random_windows(train, args.batch_size, draw))
            loss.backward()
            if compressed:
                optimizer.step()  # clip_norm has been applied on the way
            else:
                optimizer.synchronize()
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_norm)
                with optimizer.skip_synchronize():
                    optimizer.step()
            schedule.step()
        progress.advance(loss.item())
    seconds = time.perf_counter() - start
    numel = sum(p.numel() for p in model.parameters())
    sent = common.traffic(optimizer, numel, args.compression, args.epochs * STEPS_PER_EPOCH, hvd.size())
    quality = float(hvd.allreduce(torch.tensor(validation_loss(model, validation)), name="metric"))
    if hvd.rank() == 0:
        common.report(args, "nats/char", quality, seconds, sent)


if __name__ == "__main__":
    main()
