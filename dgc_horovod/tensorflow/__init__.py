"""The TensorFlow adapter: ``DistributedOptimizer``, ``DistributedGradientTape`` and ``Compression`` on Keras 3."""

try:
    import tensorflow as tf
except ImportError as error:
    raise ImportError(
        "dgc_horovod.tensorflow needs TensorFlow: pip install tensorflow, or dgc_horovod[tensorflow]"
    ) from error
try:
    import horovod.tensorflow  # noqa: F401
except ImportError as error:
    raise ImportError(
        "dgc_horovod.tensorflow needs Horovod built for this TensorFlow (horovod.tensorflow does not import: "
        f"{error}); dgcrun --build-horovod builds it for the TensorFlow that is installed"
    ) from error
import keras as _keras  # under its own name it would hide our submodule

_NEEDED = (
    "_apply_weight_decay",
    "_backend_update_step",
    "_clip_gradients",
    "_get_current_learning_rate",
    "_untrack_variable",
    "add_variable_from_reference",
    "apply",
    "update_step",
)
if _keras.backend.backend() != "tensorflow":
    raise ImportError(
        f"Keras runs on {_keras.backend.backend()} here; Horovod's operations are TensorFlow's: set "
        "KERAS_BACKEND=tensorflow before Keras is imported (for PyTorch use dgc_horovod.torch)"
    )
if _missing := [name for name in _NEEDED if not hasattr(_keras.optimizers.Optimizer, name)]:
    raise ImportError(
        f"dgc_horovod.tensorflow needs Keras 3 (tensorflow >= 2.16) laid out as 3.15 is; in TensorFlow "
        f"{tf.__version__} with Keras {_keras.__version__} the optimizer lacks {', '.join(_missing)}. Unset "
        "TF_USE_LEGACY_KERAS, or install a newer Keras"
    )

from dgc_horovod.config import DGCConfig, WarmupSchedule  # noqa: E402
from dgc_horovod.tensorflow.gradients.transport import node_process_sets  # noqa: E402
from dgc_horovod.tensorflow.optimizer import DistributedOptimizer  # noqa: E402
from dgc_horovod.tensorflow.settings import Compression  # noqa: E402
from dgc_horovod.tensorflow.state import load_checkpoint, save_checkpoint  # noqa: E402
from dgc_horovod.tensorflow.tape import DistributedGradientTape  # noqa: E402
from dgc_horovod.tensorflow.variables import broadcast_variables  # noqa: E402

__all__ = [
    "Compression",
    "DGCConfig",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "WarmupSchedule",
    "broadcast_variables",
    "load_checkpoint",
    "node_process_sets",
    "save_checkpoint",
]
