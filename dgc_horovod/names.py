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


def put_around(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Return a decorator: the function takes the place of `name` of a class or object, or of a module and every other.

    It gets the stock function as its first argument, then the arguments of the call. A second time changes nothing.
    """

    def put(ours: Callable[..., Any]) -> None:
        stock = getattr(owner, name)
        if getattr(stock, "_dgc_ours", None) is ours:
            return

        @functools.wraps(stock)
        def around(*args: Any, **kwargs: Any) -> Any:
            return ours(stock, *args, **kwargs)

        vars(around)["_dgc_ours"] = ours
        setattr(owner, name, around)
        if isinstance(owner, ModuleType):
            replace_everywhere(stock, around)

    return put


@contextlib.contextmanager
def replaced(module: ModuleType, **names: object) -> Iterator[None]:
    """Give `module` these names while inside."""
    before = {name: getattr(module, name) for name in names}
    vars(module).update(names)
    try:
        yield
    finally:
        vars(module).update(before)
