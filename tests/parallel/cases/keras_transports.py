"""Horovod for TensorFlow as a transport, on real ranks: eager and in a graph."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from dgc_horovod.tensorflow.gradients.transport import Collectives
from tests.helpers.transports import checked, started


def of_all() -> dict[str, dict[str, bool]]:
    """All ranks."""
    hvd.init()
    found = {}
    for name in ("eager", "graph"):
        transport = Collectives(hvd.global_process_set, name)

        def together(transport: Any = transport) -> dict[str, tf.Tensor]:
            return {key: transport.wait(x) for key, x in started(transport, tf.constant).items()}

        under_way = together() if name == "eager" else tf.function(together)()
        found[name] = checked(transport, tf.constant, under_way)
    return found
