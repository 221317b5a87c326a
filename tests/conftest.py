"""Settings of all tests."""

import contextlib
import os

# Before anything imports Triton: its kernels run on CPU tensors then
os.environ["TRITON_INTERPRET"] = "1"

with contextlib.suppress(ImportError):
    import triton  # noqa: F401 - before TensorFlow: after it Triton's library ends the process

from hypothesis import HealthCheck, settings

# The first draw looks through the source of every local module that is loaded, which takes seconds on a busy machine.
settings.register_profile("here", suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=20)
settings.register_profile("thorough", parent=settings.get_profile("here"), max_examples=200)
settings.load_profile("here")
