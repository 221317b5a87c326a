"""Horovod's half of test_ddp_state.py: it writes what DDP resumes from, and resumes from what DDP has written."""

from __future__ import annotations

import os
from typing import Any

import horovod.torch as hvd

from dgc_horovod.torch import DistributedOptimizer, load_checkpoint, save_checkpoint
from tests.helpers.regression import fingerprint, smooth_model
from tests.parallel.cases.ddp_state import compression, sgd, train


def _made() -> tuple[Any, Any]:
    hvd.init()
    model = smooth_model()
    return model, DistributedOptimizer(sgd(model), model.named_parameters(), compression().config)


def saved() -> dict[str, Any]:
    """Half a training, a checkpoint, and the second half."""
    model, optimizer = _made()
    train(model, optimizer, hvd.rank(), 0)
    save_checkpoint(os.environ["DGC_TEST_FOLDER"], model, optimizer, epoch=7)
    train(model, optimizer, hvd.rank(), 1)
    return {"weights": fingerprint(model)}


def resumed() -> dict[str, Any]:
    """The second half, from a checkpoint of either adapter."""
    model, optimizer = _made()
    extra = load_checkpoint(os.environ["DGC_TEST_FOLDER"], model, optimizer)
    train(model, optimizer, hvd.rank(), 1)
    return {"weights": fingerprint(model), **extra}
