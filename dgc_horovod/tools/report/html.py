"""A page as a tree of elements, which escapes all text, and its style."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

Content = str | Element
# light and dark, on a telephone and on a wide screen
STYLE = """
:root {
  color-scheme: light dark;
  --ink: #1c2126; --faint: #59626b; --paper: #ffffff; --panel: #f4f6f8; --line: #d5dbe0;
  --good: #23845a; --look: #c2333f; --marked: #fbe7e9;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e4e8ec; --faint: #9ba5ae; --paper: #14181c; --panel: #1e242a; --line: #37404a;
    --good: #4fbf8b; --look: #f0717b; --marked: #43242a;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); }
body { font: 15px/1.45 system-ui, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1560px; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; margin: 0.2rem 0; }
h2 { font-size: 1.1rem; margin: 1.6rem 0 0.5rem; }
h3 { font-size: 0.8rem; margin: 0; color: var(--faint); text-transform: uppercase; letter-spacing: 0.04em; }
p { margin: 0.3rem 0; overflow-wrap: anywhere; }
code { font: 0.9em ui-monospace, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
.note { color: var(--faint); max-width: 75ch; font-size: 0.9rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 15rem), 1fr)); gap: 0.7rem; }
.tiles { margin: 1rem 0; }
.tile { background: var(--panel); border-left: 5px solid var(--line); border-radius: 4px; padding: 0.6rem 0.8rem; }
.tile p { font-size: 0.9rem; }
.tile .answer { font-size: 1.2rem; font-weight: 600; }
.good { border-left-color: var(--good); }
.look { border-left-color: var(--look); }
.look .answer, .word { color: var(--look); }
.word { float: right; font-weight: 700; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: 0.7rem; }
figure { margin: 0; background: var(--panel); border-radius: 4px; padding: 0.5rem; }
figure svg { width: 100%; height: auto; display: block; }
figcaption { font-size: 0.9rem; color: var(--faint); padding: 0.2rem 0.3rem; }
.scroll { overflow-x: auto; }
.tables { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 46rem), 1fr)); gap: 0 2rem; }
.tables > section { min-width: 0; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
table { width: max-content; max-width: 46rem; }
th, td { text-align: left; vertical-align: top; padding: 0.25rem 0.9rem 0.25rem 0; }
th, td { border-bottom: 1px solid var(--line); }
th { color: var(--faint); font-weight: 600; }
td { overflow-wrap: break-word; }
.marked td { background: var(--marked); color: var(--look); font-weight: 600; }
"""


def tag(name: str, *content: Content, **attributes: str) -> Element:
    """An element; ``class_`` stands for the attribute ``class``."""
    made = Element(name, {key.rstrip("_").replace("_", "-"): text for key, text in attributes.items()})
    for part in content:
        if isinstance(part, Element):
            made.append(part)
        elif len(made):
            made[-1].tail = (made[-1].tail or "") + part
        else:
            made.text = (made.text or "") + part
    return made


def table(head: Sequence[str], rows: Iterable[Sequence[Content]], marked: int | None = None) -> Element:
    """A table that scrolls by itself where the screen is narrow; row `marked` stands out."""
    lines = [
        tag("tr", *(tag("td", cell) for cell in row), **({"class_": "marked"} if i == marked else {}))
        for i, row in enumerate(rows)
    ]
    heads = tag("tr", *(tag("th", text, scope="col") for text in head))
    return tag("div", tag("table", tag("thead", heads), tag("tbody", *lines)), class_="scroll")


def document(title: str, *content: Content) -> str:
    """Return a whole page, which may not load or run anything.

    Args:
        title: title of the page.
        content: elements of the body.
    """
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name_="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", STYLE),
    )
    root = tag("html", head, tag("body", tag("main", *content)), lang="en")
    return "<!doctype html>\n" + ElementTree.tostring(root, encoding="unicode", method="html") + "\n"
