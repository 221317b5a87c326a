"""An optimizer that is gone leaves nothing behind: no file, no thread, no memory, however many there have been."""

from __future__ import annotations

import weakref
from typing import Any

import horovod.torch as hvd
import pytest

from dgc_horovod.testing.torch import session
from dgc_horovod.torch import Compression
from tests.helpers.growth import check_growth, each_length, growth
from tests.helpers.training import made, train

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2, timeout=280)]
COMPRESSIONS = {
    "dgc": Compression.dgc(0.05, min_numel=16),
    "auto": Compression.auto(),
    "local": Compression.local(2),
}


@each_length
@pytest.mark.parametrize("name", COMPRESSIONS)
def test_optimizers(name, cycles):
    """Steps of each kind of exchange."""
    hvd.init()

    def cycle() -> list[weakref.ref[Any]]:
        model, optimizer = made(COMPRESSIONS[name])
        hvd.broadcast_optimizer_state(optimizer, 0)
        train(model, optimizer, 3)
        return [weakref.ref(optimizer), weakref.ref(session(optimizer).exchange), *map(weakref.ref, model.parameters())]

    check_growth(growth(cycle, cycles))
