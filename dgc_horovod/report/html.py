"""A page as a tree of elements: text is escaped because it is text, whoever wrote it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

Content = str | Element


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


def document(title: str, style: str, *content: Content) -> str:
    """A whole page, which may load nothing from anywhere and run nothing.

    Args:
        title: title of the page.
        style: style sheet, of our own: it is not escaped.
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
        tag("style", style),
    )
    root = tag("html", head, tag("body", tag("main", *content)), lang="en")
    return "<!doctype html>\n" + ElementTree.tostring(root, encoding="unicode", method="html") + "\n"
