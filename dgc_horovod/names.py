"""Replacement of names of other libraries: by identity, in every module that imported them, or for a while."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any


def replace_everywhere(old: object, new: object, package: str = "") -> None:
    """Replace `old` by `new` in every module that has it, under any name.

    References elsewhere (in a closure, as an attribute of a class) stay.

    Args:
        old, new: what is replaced, and what takes its place.
        package: package in whose modules it is replaced; "" for all.
    """
    for key, module in list(sys.modules.items()):
        names = getattr(module, "__dict__", None)
        if isinstance(names, dict) and package in ("", key.split(".")[0]):
            for name in [name for name, value in list(names.items()) if value is old]:
                names[name] = new


def wrap_everywhere(stock: Callable[..., Any], made: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the function `stock` by ``made(stock)`` in every module that has it, unless that is done already."""
    if not hasattr(stock, "_dgc_stock"):
        ours: Any = functools.wraps(stock)(made(stock))
        ours._dgc_stock = stock
        replace_everywhere(stock, ours)


@contextlib.contextmanager
def replaced(module: ModuleType, **names: object) -> Iterator[None]:
    """Give `module` these names while inside."""
    before = {name: getattr(module, name) for name in names}
    vars(module).update(names)
    try:
        yield
    finally:
        vars(module).update(before)
