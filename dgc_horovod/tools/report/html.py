"""A page as a tree of elements, which escapes all text; its style is `page.css`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

Content = str | Element
_STYLE = Path(__file__).with_name("page.css")


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
        tag("style", _STYLE.read_text("utf-8")),
    )
    root = tag("html", head, tag("body", tag("main", *content)), lang="en")
    return "<!doctype html>\n" + ElementTree.tostring(root, encoding="unicode", method="html") + "\n"
