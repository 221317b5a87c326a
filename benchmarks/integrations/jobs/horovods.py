"""Jobs of Horovod: its ``run`` function with torch, and Keras."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.integrations import training as given
from benchmarks.integrations.training import Run, Trained

if TYPE_CHECKING:
    from keras import Model


def torch_job(run: Run) -> Trained:
    """A loop of Horovod's, SGD with momentum; ``save_checkpoint``."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    model = given.small_net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    if run.compression is not None:
        from dgc_horovod.torch import DistributedOptimizer, load_checkpoint, save_checkpoint

        optimizer = DistributedOptimizer(optimizer, model.named_parameters(), run.compression)
    else:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), 0)
    if run.resumes:
        load_checkpoint(run.folder, model, optimizer)
    given.train_digits(run, hvd.rank(), model, optimizer, lambda: save_checkpoint(run.folder, model, optimizer))
    return given.ended(model, optimizer, given.digit_loss(model))


def start(body: Callable[[], None]) -> None:
    """Start ranks by ``horovod.run``; the one line that unedited scripts need there is `activate`."""
    import horovod

    horovod.run(_activated, (body,), np=given.RANKS, use_gloo=True, executable=sys.executable)


def _activated(body: Callable[[], None]) -> None:
    from dgc_horovod.launch.activate import activate

    activate()
    body()


def keras_job(run: Run) -> Trained:
    """``model.fit`` with Horovod's callback, SGD with momentum, several steps in a call."""
    import horovod.tensorflow.keras as hvd
    import keras

    hvd.init()
    keras.utils.set_random_seed(0)
    layers = [keras.Input((64,)), keras.layers.Dense(256, "tanh"), keras.layers.Dense(10)]
    model = keras.Sequential(layers)
    optimizer = keras.optimizers.SGD(0.1, 0.9)
    if run.compression is not None:
        from dgc_horovod.tensorflow import DistributedOptimizer

        optimizer = DistributedOptimizer(optimizer, compression=run.compression)
    else:
        optimizer = hvd.DistributedOptimizer(optimizer)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, steps_per_execution=7)
    images, labels = (part.numpy()[hvd.rank() :: given.RANKS][:784] for part in given.digits()[0].tensors)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    model.fit(images, labels, 16, given.EPOCHS, shuffle=False, verbose=0, callbacks=callbacks)
    return _of_keras(model)


def _of_keras(model: Model) -> Trained:
    images, labels = (part.numpy() for part in given.digits()[1].tensors)
    weights = np.concatenate([np.ravel(each) for each in model.get_weights()])
    stats = getattr(model.optimizer, "compression_stats", dict)()
    return Trained(weights, float(model.evaluate(images, labels, verbose=0)), stats)
