"""Tools beside a job: the doctor, the plan, the report, the build of Horovod.

Tools import the rest of the package; the rest gets a tool by `load` alone, when it is used.
"""

import importlib
from types import ModuleType


def load(name: str) -> ModuleType:
    """Return the tool of that name, a module of this package."""
    return importlib.import_module(f"{__name__}.{name}")
