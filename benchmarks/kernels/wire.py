"""Size of packets: bits a selected element, and bits an index, on recorded gradients."""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.kernels.bench import MOMENTUM, Model, Recorded
from benchmarks.report import markdown, where
from dgc_horovod import DGCConfig
from dgc_horovod.core.engine import BucketEngine
from dgc_horovod.kernels.native.kernels import NativeKernels
from dgc_horovod.wire.codecs import INDEX_CODECS, VALUE_CODECS
from dgc_horovod.wire.packet import HEADER

STEPS, BATCH, WINDOW, WIDTH, SYMBOLS = 40, 16, 32, 896, 128


class _Language(nn.Module):
    """Predicts the next character of Python's own sources: two LSTM layers, 10 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, 64)
        self.lstm = nn.LSTM(64, WIDTH, num_layers=2, batch_first=True)
        self.output = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(self.lstm(self.embedding(x))[0])


def recorded_gradients() -> tuple[list[tuple[str, tuple[int, ...]]], list[list[np.ndarray]]]:
    """Shapes of the model's matrices, and their gradients in each of the steps of a real training run."""
    torch.manual_seed(0)
    source = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60])
    text = torch.frombuffer(bytearray(source), dtype=torch.uint8).long() % SYMBOLS
    model = _Language()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=MOMENTUM)
    matrices = {name: p for name, p in model.named_parameters() if p.ndim > 1}
    steps = []
    for _ in range(STEPS):
        starts = torch.randint(0, len(text) - WINDOW - 1, (BATCH, 1))
        windows = text[starts + torch.arange(WINDOW + 1)]
        loss = cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        steps.append([p.grad.numpy().ravel().copy() for p in reversed(matrices.values()) if p.grad is not None])
        optimizer.step()
    return [(name, tuple(p.shape)) for name, p in matrices.items()], steps


def wire() -> list[dict[str, Any]]:
    """Bits of every rule, density and value codec; index codecs compared."""
    shapes, steps = recorded_gradients()
    choices = [("exact", d, v) for d in (0.001, 0.01) for v in VALUE_CODECS]
    choices += [(rule, d, "bf16") for d in (0.001, 0.01) for rule in ("sampled", "gaussian")]
    rows = [_bits(shapes, steps, *choice) for choice in choices]
    return rows + [_indices(shapes, steps, density) for density in (0.001, 0.01)]


def _replayed(shapes: Any, steps: Any, config: DGCConfig) -> list[tuple[BucketEngine, np.ndarray]]:
    """Each engine and its packet of the last step."""
    model = Model(shapes, config, NativeKernels(), gradients=lambda _: Recorded(steps))
    model.accumulate(len(steps) - 1)
    return list(zip(model.engines, [message.payload for message in model.compress()], strict=True))


def _field(packets: Any, name: str) -> int:
    """The sum of a header field over packets."""
    return sum(int(packet[: HEADER.itemsize].view(HEADER)[name][0]) for packet in packets)


def _bits(shapes: Any, steps: Any, rule: str, density: float, values: str) -> dict[str, Any]:
    packets = [p for _, p in _replayed(shapes, steps, DGCConfig(rule=rule, density=density, values=values))]
    count, room = _field(packets, "count"), _field(packets, "capacity")
    row = {"study": "bits", "rule": rule, "density": density, "values": values, "numel": _field(packets, "numel")}
    return {**row, "bits": 8 * sum(p.nbytes for p in packets) / count, "padding": 1 - count / room}


def _indices(shapes: Any, steps: Any, density: float) -> dict[str, Any]:
    """Bits an index that other codecs would need for the positions really selected."""
    bits = dict.fromkeys(("Elias-Fano", "Rice", "12 bits in blocks of 4096", "entropy of random positions"), 0.0)
    total = 0
    for engine, packet in _replayed(shapes, steps, DGCConfig(density=density)):
        engine.receive(packet)
        positions, n = engine.exchange.contributions[0].positions.astype(np.int64), engine.bucket.numel
        k, gaps = positions.size, np.diff(positions, prepend=-1) - 1
        total += k
        bits["Elias-Fano"] += 8 * INDEX_CODECS["elias-fano"].nbytes(n, k)
        bits["Rice"] += min(float((gaps >> r).sum() + k * (1 + r)) for r in range(20))
        bits["12 bits in blocks of 4096"] += 12 * k + 16 * -(-n // 4096)  # a 16-bit count each
        p = k / n
        bits["entropy of random positions"] += -n * (p * np.log2(p) + (1 - p) * np.log2(1 - p))
    return {"study": "indices", "density": density, **{name: value / total for name, value in bits.items()}}


def wire_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: two tables."""
    bits, indices = (where(rows, study=study) for study in ("bits", "indices"))
    names = [name for name in indices[0] if name not in ("study", "density")]
    lines = []
    for rule, values in dict.fromkeys((r["rule"], r["values"]) for r in bits):
        pair = [
            *where(bits, rule=rule, values=values, density=0.001),
            *where(bits, rule=rule, values=values, density=0.01),
        ]
        shown = [*(f"{r['bits']:.2f}" for r in pair), *(f"{r['padding']:.1%}" for r in pair)]
        lines.append([f"{rule}, {values}", *shown])
    of_indices = [[name, *(f"{r[name]:.2f}" for r in indices)] for name in names]
    parts = [
        markdown(["bits a selected element", "0.1%", "1%", "padding 0.1%", "padding 1%"], lines),
        markdown(["bits an index", *(f"{r['density']:.1%}" for r in indices)], of_indices),
    ]
    return "\n\n".join(parts)
