"""What stands beside a job and trains nothing: the doctor, the plan, the report, the build of Horovod, other metrics.

Tools import the rest of the package; the rest has them by `load` alone, once somebody asks for one.
"""

import importlib
from types import ModuleType


def load(name: str) -> ModuleType:
    """The tool of that name, a module of this package."""
    return importlib.import_module(f"{__name__}.{name}")
