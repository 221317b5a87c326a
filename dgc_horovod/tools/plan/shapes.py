"""The shapes of a model for a plan: made up from its size, or those of a user's function.

The function runs in a process of its own, as it may import anything.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Sequence
from decimal import Decimal

from dgc_horovod.config import DGCConfig
from dgc_horovod.core.bucketing import TensorSpec
from dgc_horovod.errors import ConfigError
from dgc_horovod.launch.child import MARK, marked

_SMALL = 0.002  # of the elements are biases and norms: ResNet-50's share
_LARGEST_TENSOR = 2**30
MOST_ELEMENTS, _MOST_TENSORS = 10**12, 1000  # each tensor is priced by every method and number of workers
_SIZES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9}
_SECONDS = 300
_CODE = f"""
import importlib, importlib.util, json, operator, os, sys
module, name = sys.argv[1].rsplit(":", 1)
is_file = module.endswith(".py")
sys.path.insert(0, os.path.dirname(os.path.abspath(module)) if is_file else "")  # as python FILE and python -m have it
if is_file:
    spec = importlib.util.spec_from_file_location("planned_model", module)
    loaded = importlib.util.module_from_spec(spec)
    sys.modules["planned_model"] = loaded
    spec.loader.exec_module(loaded)
else:
    loaded = importlib.import_module(module)
def whole(name, size):
    if isinstance(size, bool) or not hasattr(size, "__index__"):
        raise TypeError(f"the shape of {{name!r}} has the size {{size!r}}; sizes must be whole numbers")
    return operator.index(size)
made = getattr(loaded, name)()
if hasattr(made, "named_parameters"):
    shapes = [(name, each.shape) for name, each in made.named_parameters() if each.requires_grad]
elif hasattr(made, "trainable_variables"):
    shapes = [(each.path, each.shape) for each in made.trainable_variables]
else:
    shapes = made.items() if hasattr(made, "items") else made
print({MARK!r} + json.dumps([[str(name), [whole(name, size) for size in shape]] for name, shape in shapes]))
"""


def parse_size(text: str) -> int:
    """Parse a number of elements: ``25.6M`` -> 25600000. K, M, and G or B; plain numbers too.

    Raises:
        ConfigError: it is no such number, not whole, below 1, or above a million million.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGB]?)", text.strip().upper())
    size = Decimal(found[1]) * _SIZES[found[2]] if found else Decimal(0)
    if not 1 <= size <= MOST_ELEMENTS or size != int(size):
        raise ConfigError(
            f"--model-size must be a whole number of elements, from 1 to {MOST_ELEMENTS // 10**9}B, such as 25.6M, "
            f"350K, 1.3B or 25557032, got {text!r}"
        )
    return int(size)


def tensors(elements: int, config: DGCConfig) -> list[TensorSpec]:
    """Return shapes for a model of which only the size is known: square matrices, and one vector.

    Args:
        elements: number of elements of the model, n >= 1.
        config: compression settings; a matrix fills a bucket, or is larger if there would be more than 1,000.
    """
    small = round(_SMALL * elements)
    most = min(max(config.bucket_bytes // 4, 2**20, -(-elements // _MOST_TENSORS)), _LARGEST_TENSOR)
    matrices = [
        TensorSpec(f"weight{start}", _nearly_square(min(most, elements - small - start)))
        for start in range(0, elements - small, most)
    ]
    return [TensorSpec("biases", (small,)), *matrices]


def _nearly_square(numel: int) -> tuple[int, int]:
    rows = next(rows for rows in range(int(numel**0.5), 0, -1) if numel % rows == 0)
    return rows, numel // rows


def shapes_of(target: str, interpreter: str = sys.executable) -> Sequence[TensorSpec]:
    """Return the tensors of a model, in its order.

    Args:
        target: ``module:function`` or ``file.py:function``; the function, without arguments, returns a torch module, a
            Keras model that is built, or (name, shape) of every tensor.
        interpreter: Python that runs it.

    Raises:
        ConfigError: there is no such function, it fails, or it returns no model.
    """
    if not all(target.rpartition(":")):
        raise ConfigError(f"--model must be module:function or file.py:function, got {target!r}")
    command = [interpreter, "-c", _CODE, target]
    try:
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"--model {target}: not done after {_SECONDS} s") from None
    found = marked(ended.stdout)
    if found is None:
        said = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
        raise ConfigError(
            f"--model {target}: {said[-1]}; it must return a torch module, a built Keras model, or (name, shape) pairs"
        )
    for name, shape in found:
        if min(shape, default=0) < 0:
            raise ConfigError(f"--model {target}: the shape of {name!r} is {tuple(shape)}; sizes must be at least 0")
    elements = sum(math.prod(shape) for _, shape in found)
    if not 1 <= elements <= MOST_ELEMENTS:
        raise ConfigError(
            f"--model {target}: there must be from 1 to {MOST_ELEMENTS // 10**9}B elements to train in it, got "
            f"{elements if elements < 10**99 else 'more than 1e99'}"
        )
    return [TensorSpec(name, tuple(shape)) for name, shape in found]
