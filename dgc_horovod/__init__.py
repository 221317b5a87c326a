"""Deep Gradient Compression and GaussianK-SGD for unmodified Horovod.

This module imports no framework. The adapters are ``dgc_horovod.torch`` and ``dgc_horovod.tensorflow``.
"""

from dgc_horovod.config import DGCConfig, WarmupSchedule

__all__ = ["DGCConfig", "WarmupSchedule", "__version__"]
__version__ = "0.1.0"
