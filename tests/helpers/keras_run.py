"""A Keras model in training."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf

from dgc_horovod.tensorflow.keras import DistributedOptimizer, elastic
from dgc_horovod.testing import tensorflow as testing
from tests.helpers.adapters import Adapter
from tests.helpers.keras_training import Compression, gradients_of, keras, loss_of, smooth_model
from tests.helpers.run import ALONE, RATES, Run


def named_as_in_keras(lr: float, betas: tuple[float, float] | None = None, **options: Any) -> dict[str, Any]:
    """Options of an optimizer that has torch's names for them."""
    return {"learning_rate": lr, **({"beta_1": betas[0], "beta_2": betas[1]} if betas else {}), **options}


class Dividing(keras.optimizers.SGD):  # type: ignore[misc]
    """SGD that divides a gradient by its own size."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """One step of a variable."""
        variable.assign_sub(learning_rate * gradient / tf.abs(gradient))


class KerasRun(Run):
    """See `Run`; the arguments are those of `Adapter.start`."""

    def __init__(
        self,
        adapter: Adapter,
        compression: Any,
        name: str,
        seed: int,
        wrap: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(adapter)
        self.model = smooth_model(seed)
        kind = Dividing if name == "Dividing" else getattr(keras.optimizers, name)
        inner = kind(**named_as_in_keras(**{"lr": RATES[name], **options}))
        compression = compression or Compression.none
        if compression == ALONE:
            self.optimizer = inner
        else:
            self.optimizer = DistributedOptimizer(inner, compression=compression, **(wrap or {}))
        self.model.compile(self.optimizer, "mse")
        if getattr(getattr(compression, "config", None), "automatic", False):
            self.optimizer.build(self.model.trainable_variables)
            testing.make_exchange(self.optimizer, self.model.trainable_variables)

    def on(self, x: np.ndarray, y: np.ndarray) -> float:
        return float(self.model.train_on_batch(x, y))

    def loss(self, x: np.ndarray, y: np.ndarray) -> float:
        return float(loss_of(self.model, x, y))

    def gradients(self, x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
        return [np.array(each) for each in gradients_of(self.model, x, y)]

    def apply(self, gradients: list[np.ndarray]) -> None:
        self.optimizer.apply([tf.constant(gradient) for gradient in gradients], self.model.trainable_variables)

    @property
    def rate(self) -> float:
        return float(self.optimizer.learning_rate)

    @rate.setter
    def rate(self, rate: float) -> None:
        self.optimizer.learning_rate = rate

    @property
    def names(self) -> list[str]:
        return [str(i) for i in range(len(self.model.weights))]

    @property
    def told(self) -> list[str]:
        return [weight.path for weight in self.model.weights]

    @property
    def arrays(self) -> list[np.ndarray]:
        return [np.array(weight) for weight in self.model.get_weights()]

    def assign(self, arrays: list[np.ndarray]) -> None:
        self.model.set_weights(arrays)

    @property
    def inner(self) -> list[float]:
        return [float(np.asarray(slot.numpy(), np.float64).sum()) for slot in self.optimizer.variables]

    def slots(self) -> list[np.ndarray]:
        slots = getattr(self.optimizer, "_velocities", self.optimizer.variables[2:])
        return [slot.numpy() for slot in slots]

    @property
    def session(self) -> Any:
        return testing.session(self.optimizer)

    @property
    def choice(self) -> Any:
        return self.session.choice

    def take(self, mode: str) -> None:
        self.choice.stay(mode)

    @property
    def of_round(self) -> int:
        return int(self.session.rounds.calls)

    def left_of_round(self, length: int) -> int:
        return length - int(self.optimizer.iterations) % length

    @property
    def copied(self) -> dict[str, dict[str, np.ndarray]]:
        state = self.session.residuals()
        return {} if state is None else state.tensors

    @property
    def exchange(self) -> Any:
        return self.session.buckets

    @property
    def counted(self) -> int:
        return int(self.optimizer.iterations)

    @property
    def outer(self) -> list[np.ndarray]:
        return [x.numpy() for x in self.session.rounds.outer]

    def push_outer(self, element: float) -> None:
        for momentum in self.session.rounds.outer:
            momentum.assign(element + 0 * momentum)

    def state(self, **options: Any) -> Any:
        return elastic.KerasState(self.model, batch=0, **options)

    def renew(self, state: Any) -> None:
        state.reset()

    def failing(self, error: Exception) -> AbstractContextManager[Any]:
        return mock.patch.object(self.session.buckets, "aggregate", side_effect=error)
