"""Horovod's Keras callbacks, for Keras 3."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from horovod._keras.callbacks import LearningRateScheduleCallbackImpl

from dgc_horovod.config_check import check_agreement
from dgc_horovod.errors import ConfigError, UnsupportedUse
from dgc_horovod.tensorflow.distribution import Distribution
from dgc_horovod.tensorflow.gradients.transport import Collectives, watched
from dgc_horovod.tensorflow.session import has_unused, session_of
from dgc_horovod.tensorflow.variables import broadcast_variables, key_of, keys_of, shared_variables

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]
_log = logging.getLogger("dgc_horovod")
_INSIDE, _BUILT = b"inside", b"built"  # states that ranks compare when training begins


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Gives every rank the weights and the optimizer's variables of `root_rank`, when training begins.

    If the model is built by its first batch only, this happens after that batch, as in Horovod; the residuals of the
    first gradients are then dropped. Random generators stay each rank's own.

    It also gives a distributed optimizer the epoch, which a density warm-up may need, and checks that it is used.

    Args:
        root_rank: rank whose variables are sent, 0 <= root_rank < hvd.size().
        device: TensorFlow device from which they are sent; "": TensorFlow's choice.
        local_variables: variable, or several, that are not sent; None: all are.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: object = None) -> None:
        super().__init__()
        self.root_rank, self.device = root_rank, device
        self._done = False
        self._local = keys_of(local_variables, "local_variables")

    def register_local_var(self, var: keras.Variable | Iterable[keras.Variable]) -> None:
        """Do not send `var`."""
        self._local |= keys_of(var, "var")

    @property
    def _distribution(self) -> Distribution | None:
        session = session_of(self.model.optimizer)
        return None if session is None else session.distribution

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        epochs, steps = (self.params or {}).get("epochs"), (self.params or {}).get("steps")
        if self._distribution is not None and epochs and steps:
            self._distribution.run_steps = epochs * steps // self._distribution.ownership.stride
        self._done = False
        own = _INSIDE if self._is_inside() else _BUILT if self.model.built else b""
        ours = Collectives(hvd.global_process_set, "built").gather_bytes(own, "model")
        if _INSIDE in ours:
            raise UnsupportedUse(
                f"the model of rank {ours.index(_INSIDE)} is compiled with the optimizer that DistributedOptimizer was "
                "given, which exchanges nothing: compile it with the one that DistributedOptimizer has returned"
            )
        if all(ours):  # else every rank waits for its first batch
            optimizer = self.model.optimizer
            if not optimizer.built:
                with keras.name_scope(optimizer.name):
                    optimizer.build(self.model.trainable_variables)
            self._broadcast()
        elif self._distribution is not None:
            self._distribution.broadcast_follows = True

    def _is_inside(self) -> bool:
        """Whether the model's optimizer was given to DistributedOptimizer, and is not the returned one."""
        optimizer = self.model.optimizer
        if self._distribution is not None or optimizer is None:
            return False
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if any(getattr(each, "_dgc_taken", False) for each in (optimizer, inner)):
            return True
        plain = type(self.model).train_step is keras.Model.train_step  # others may exchange gradients there
        if plain and has_unused() and hvd.rank() == 0:
            _log.warning(
                "dgc_horovod: this model's %s is not the optimizer that DistributedOptimizer has returned, which has "
                "made no step: its gradients are not exchanged. Compile the model with the returned optimizer",
                type(optimizer).__name__,
            )
        return False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._distribution is not None:
            self._distribution.epoch_begins(epoch)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        distribution = self._distribution
        is_unused = distribution is not None and distribution.takes_part and not distribution.used
        if is_unused and self.model.trainable_variables:
            raise UnsupportedUse(
                "this model trains without its DistributedOptimizer, which was put in after compile(): compile the "
                "model again with it"
            )
        if not self._done:
            self._broadcast()
            if distribution is not None:
                self.model.optimizer.clear_residuals()

    def _broadcast(self) -> None:
        optimizer, session = self.model.optimizer, session_of(self.model.optimizer)
        outer = [] if session is None else session.strategy.outer()
        variables = [*self.model.weights, *shared_variables(optimizer), *outer]
        with tf.device(self.device):
            broadcast_variables([v for v in variables if key_of(v) not in self._local], self.root_rank)
        self._done = True


class MetricAverageCallback(keras.callbacks.Callback):
    """Averages the epoch's metrics over the ranks, for the callbacks after it and the history.

    Args:
        device: TensorFlow device on which they are averaged; "": TensorFlow's choice.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        names = sorted(name for name, value in (logs or {}).items() if np.ndim(value) == 0)
        check_agreement(Collectives(hvd.global_process_set, "metrics"), {"metrics": "\n".join(names)})
        if not logs or not names:
            return
        values = tf.constant([float(logs[name]) for name in names], tf.float64)
        with tf.device(self.device), watched(hvd.global_process_set, "the metrics of an epoch"):
            averaged = hvd.allreduce(values, op=hvd.Average, name=f"dgc.metrics.{len(names)}").numpy()
        logs.update(zip(names, averaged.tolist(), strict=True))


class LearningRateScheduleCallback(LearningRateScheduleCallbackImpl, keras.callbacks.Callback):
    """Sets the learning rate to ``initial_lr * multiplier(epoch)`` between two epochs; when, is Horovod's code.

    Args:
        initial_lr: learning rate that is multiplied, > 0 and finite.
        multiplier: factor for each epoch after `start_epoch` (an exponential decay), or a function of the epoch.
        start_epoch, end_epoch: first epoch, and the one after the last (None: no end).
        staircase: whether the epoch is an integer, set at its first batch; otherwise a fraction, set at every batch.
        momentum_correction: whether a change of the learning rate scales the velocity of SGD, which has that rate in
            it, by the same factor (Goyal et al. 2017, section 3.1). Under DGC's momentum correction compressed tensors
            do not need it.
        steps_per_epoch: batches in an epoch; None: asked of Keras.
    """

    steps_per_epoch: int | None

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        if not isinstance(initial_lr, (int, float)) or not 0 < initial_lr < math.inf:
            raise ConfigError(f"initial_lr must be a positive number, got {initial_lr!r}")
        super().__init__(
            None, initial_lr, multiplier, start_epoch, end_epoch, staircase, momentum_correction, steps_per_epoch
        )

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if not isinstance(self._optimizer._learning_rate, keras.Variable):
            raise UnsupportedUse(
                f"the optimizer's learning rate is a schedule; {type(self).__name__} needs one that can be set: give "
                "the optimizer a number"
            )
        if not self.staircase and self.steps_per_epoch is None:
            self.steps_per_epoch = (self.params or {}).get("steps")
            if not self.steps_per_epoch:
                raise ConfigError("Keras does not know the number of batches in an epoch; pass steps_per_epoch")

    @property
    def _optimizer(self) -> Any:
        """The optimizer with the learning rate: the one inside a LossScaleOptimizer."""
        return getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)

    def _adjust_learning_rate(self, epoch: float) -> None:
        optimizer = self._optimizer
        old, new = float(optimizer.learning_rate.numpy()), self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = new
        has_rate = isinstance(optimizer, keras.optimizers.SGD)  # in its velocity
        if self.momentum_correction and old and new != old and has_rate and getattr(optimizer, "momentums", None):
            session = session_of(optimizer)
            ours = session.distribution.in_engines if session else set()
            for variable, velocity in zip(optimizer._trainable_variables, optimizer.momentums, strict=True):
                if key_of(variable) not in ours:
                    velocity.assign(velocity * (new / old))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["lr"] = float(self._optimizer.learning_rate.numpy())


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from ``initial_lr / N`` to ``initial_lr`` (Goyal et al. 2017, section 2.2).

    Args:
        initial_lr: learning rate after the warm-up, > 0 and finite.
        warmup_epochs: length of the warm-up in epochs.
        momentum_correction, steps_per_epoch: see `LearningRateScheduleCallback`.
        verbose: verbosity; above 0: say on rank 0 when it is over.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch is not None
            epoch += 1 / self.steps_per_epoch  # a round number at the end of each epoch
            return (epoch * (hvd.size() - 1) / warmup_epochs + 1) / hvd.size()

        super().__init__(initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.end_epoch is not None and epoch == self.end_epoch - 1 and self.verbose > 0 and hvd.rank() == 0:
            rate = float(self._optimizer.learning_rate.numpy())
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")
