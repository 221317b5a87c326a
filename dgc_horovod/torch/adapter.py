"""The PyTorch adapter for Horovod: checks the installed Horovod, and replaces its names.

It has the public names of `dgc_horovod.torch`.
"""

try:
    import horovod.torch
except ImportError as error:
    raise ImportError(
        "dgc_horovod.torch needs Horovod built for this PyTorch (horovod.torch does not import: "
        f"{error}); dgcrun --build-horovod builds it for the torch that is installed"
    ) from error
from horovod.torch.optimizer import _DistributedOptimizer

_NEEDED = ("_allreduce_grad_async", "_register_hooks", "set_backward_passes_per_step")
if _missing := [name for name in _NEEDED if not hasattr(_DistributedOptimizer, name)]:
    raise ImportError(
        f"Horovod {horovod.__version__} differs from 0.28.1 (its optimizer lacks {', '.join(_missing)}); install "
        "horovod 0.28.1"
    )

from dgc_horovod.torch import elastic  # noqa: E402
from dgc_horovod.torch.horovod_carrier import node_process_sets  # noqa: E402
from dgc_horovod.torch.horovod_functions import join  # noqa: E402
from dgc_horovod.torch.optimizer import (  # noqa: E402
    Compression,
    DistributedOptimizer,
    load_checkpoint,
    save_checkpoint,
)

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "elastic",
    "join",
    "load_checkpoint",
    "node_process_sets",
    "save_checkpoint",
]

elastic.register()
