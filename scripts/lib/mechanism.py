"""Draws docs/images/mechanism.svg, the picture in the README: ``python scripts/lib/mechanism.py``."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

FILE = Path(__file__).resolve().parents[2] / "docs" / "images" / "mechanism.svg"
WIDTH, HEIGHT, TOP, BOX_WIDTH, BOX_HEIGHT = 880, 250, 62, 196, 96
DARK, LIGHT, ACCENT, GREY = "#1f2937", "#f3f4f6", "#0072b2", "#6b7280"


class Step(NamedTuple):
    """One box: what is done, and two lines on how."""

    title: str
    lines: tuple[str, str]
    x: int


STEPS = (
    Step("1  accumulate", ("u = m·u + g", "v = v + u"), 92),
    Step("2  select", ("k largest |v|: 0.1–1%", "leave v; u = 0 there"), 340),
    Step("3  exchange", ("packets to every worker,", "mean, in rank order"), 588),
)


def text(x: float, y: float, words: str, size: int = 14, colour: str = DARK, weight: str = "normal") -> str:
    """A centred line."""
    style = f'font-size="{size}" fill="{colour}" font-weight="{weight}" text-anchor="middle"'
    return f'<text x="{x}" y="{y}" {style}>{escape(words)}</text>'


def arrow(path: str, colour: str = DARK) -> str:
    """A line with a head."""
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2" marker-end="url(#{colour[1:]})"/>'


def head(colour: str) -> str:
    """The head of an arrow."""
    return (
        f'<marker id="{colour[1:]}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        f'orient="auto"><path d="M0 0L10 5L0 10z" fill="{colour}"/></marker>'
    )


def box(step: Step) -> list[str]:
    """A step."""
    middle = step.x + BOX_WIDTH / 2
    return [
        f'<rect x="{step.x}" y="{TOP}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="8" fill="{LIGHT}" '
        f'stroke="{DARK}" stroke-width="1.5"/>',
        text(middle, TOP + 28, step.title, 16, weight="bold"),
        *(text(middle, TOP + 55 + 22 * i, line) for i, line in enumerate(step.lines)),
    ]


def picture() -> str:
    """The whole of it."""
    middle, bottom, low = TOP + BOX_HEIGHT / 2, TOP + BOX_HEIGHT, TOP + BOX_HEIGHT + 40
    first, second, third = (step.x for step in STEPS)
    right = third + BOX_WIDTH
    parts = [
        *(part for step in STEPS for part in box(step)),
        text(44, middle - 10, "gradient"),
        arrow(f"M14 {middle}H{first - 4}"),
        arrow(f"M{first + BOX_WIDTH} {middle}H{second - 4}"),
        arrow(f"M{second + BOX_WIDTH} {middle}H{third - 4}"),
        arrow(f"M{right} {middle}H{WIDTH - 12}"),
        text((right + WIDTH) / 2, middle - 10, "update"),
        arrow(f"M{second + BOX_WIDTH / 2} {bottom}V{low}H{first + BOX_WIDTH / 2}V{bottom + 4}", ACCENT),
        text((first + second + BOX_WIDTH) / 2, low + 20, "residual: all other elements stay in v", 14, ACCENT),
        text((first + second + BOX_WIDTH) / 2, low + 38, "and are sent later", 13, GREY),
        text(WIDTH / 2, 30, "every worker, every step, for every bucket of gradients", 14, GREY),
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
            f"<defs>{head(DARK)}{head(ACCENT)}</defs>",
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
            *parts,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    FILE.write_text(picture())
    print(f"wrote {FILE}")
