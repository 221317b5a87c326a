"""Horovod for TensorFlow as a transport, on real ranks: eager and in a graph."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("horovod.tensorflow", reason="Horovod is not built for TensorFlow here")

import horovod.tensorflow as hvd
import tensorflow as tf

from dgc_horovod.tensorflow.gradients.transport import Collectives
from tests.helpers.transports import check, started

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2)]


@pytest.mark.parametrize("name", ["eager", "graph"])
def test_of_all_ranks(name):
    transport = Collectives(hvd.global_process_set, name)

    def together() -> dict[str, Any]:
        return {key: transport.wait(x) for key, x in started(transport, tf.constant).items()}

    check(transport, tf.constant, together() if name == "eager" else tf.function(together)())
