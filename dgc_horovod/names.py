"""Names of other libraries are replaced by identity, wherever scripts have imported them."""

from __future__ import annotations

import sys
from typing import Any


def replace_everywhere(old: Any, new: Any) -> None:
    """Let every module that has `old`, under whatever name, have `new` instead.

    What is held elsewhere (in a closure, as an attribute of a class) stays.
    """
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if isinstance(names, dict):
            for name in [name for name, value in list(names.items()) if value is old]:
                names[name] = new
