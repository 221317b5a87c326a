"""Draws docs/images/architecture.svg, the picture in docs/design.md: ``python scripts/lib/architecture.py``."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from mechanism import ACCENT, DARK, GREY, LIGHT, arrow, head, text

FILE = Path(__file__).resolve().parents[2] / "docs" / "images" / "architecture.svg"
WIDTH, HEIGHT, HIGH = 880, 470, 56
LEFT, RIGHT = 92, 788  # of the boxes


class Box(NamedTuple):
    """A part: what it is, a line on what it does, and where it is drawn."""

    title: str
    line: str
    x: int
    y: int
    width: int


WHOLE = RIGHT - LEFT
BOXES = (
    Box("dgcrun", "launch/: for unmodified scripts", 92, 14, WHOLE),
    Box("PyTorch on Horovod", "torch/", 92, 92, 224),
    Box("PyTorch DDP", "torch/ddp/", 328, 92, 224),
    Box("Keras 3 on Horovod", "tensorflow/", 564, 92, 224),
    Box("session", "one per optimizer: carrier, strategy, arithmetic of the optimizer", 92, 170, WHOLE),
    Box("engine", "core/: one per bucket, holds u and v; accumulate, select, encode; decode, sum", 92, 248, WHOLE),
    Box("kernels", "kernels/: C++, Triton, torch, NumPy", 92, 326, 276),
    Box("packet", "wire/: header, codecs", 380, 326, 196),
    Box("checkpoints", "state/: records of u and v", 588, 326, 200),
    Box("exchange", "exchange/: rounds of collectives; flat, nodes, owners", 92, 404, 400),
    Box("transport", "Horovod, torch.distributed, in process", 504, 404, 284),
)


def drawn(box: Box) -> list[str]:
    """A part."""
    middle = box.x + box.width / 2
    return [
        f'<rect x="{box.x}" y="{box.y}" width="{box.width}" height="{HIGH}" rx="8" fill="{LIGHT}" '
        f'stroke="{DARK}" stroke-width="1.5"/>',
        text(middle, box.y + 23, box.title, 15, weight="bold"),
        text(middle, box.y + 43, box.line, 13),
    ]


def picture() -> str:
    """All parts, with the way of a gradient down and of an update up."""
    top, bottom = 92 + HIGH / 2, 404 + HIGH / 2
    parts = [
        *(part for box in BOXES for part in drawn(box)),
        arrow(f"M{LEFT - 24} {top}V{bottom}", DARK),
        text(LEFT - 48, top - 12, "gradient", 13, GREY),
        arrow(f"M{RIGHT + 24} {bottom}V{top}", ACCENT),
        text(RIGHT + 46, top - 12, "update", 13, ACCENT),
    ]
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">'
    background = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    return "\n".join([opening, f"<defs>{head(DARK)}{head(ACCENT)}</defs>", background, *parts, "</svg>\n"])


if __name__ == "__main__":
    FILE.write_text(picture())
    print(f"wrote {FILE}")
