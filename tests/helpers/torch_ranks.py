"""Names of cases on ranks of torchrun, until the last of them is moved."""

from tests.helpers.launchers import torchrun
from tests.helpers.ranks import run_torch_ranks

__all__ = ["run_torch_ranks", "torchrun"]
