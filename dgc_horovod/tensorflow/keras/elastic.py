"""Horovod Elastic for Keras 3: ``KerasState``, and the parts of Horovod's that work as they are."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
from horovod.common.elastic import ObjectState
from horovod.tensorflow.elastic import run
from horovod.tensorflow.functions import broadcast_object
from horovod.tensorflow.keras.elastic import CommitStateCallback, UpdateBatchStateCallback, UpdateEpochStateCallback

from dgc_horovod.errors import ConfigError
from dgc_horovod.tensorflow.broadcast import broadcast_variables, shared_variables

__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"]


class KerasState(ObjectState):
    """Weights and the optimizer's variables of a Keras 3 model, saved, restored and sent to newcomers.

    Args:
        model: built.
        optimizer: of the model, if it is not compiled into it.
        kwargs: more values to keep in step, attributes of this object.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if not model.built:
            raise ConfigError("the model must be built before its state can be kept: call model.build(input_shape)")
        self.model, self.optimizer = model, optimizer or model.optimizer
        if not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)
        self._save_variables()
        super().__init__(bcast_object=broadcast_object, get_rank=hvd.rank, **kwargs)

    @property
    def _variables(self) -> list[Any]:
        return [*self.model.weights, *shared_variables(self.optimizer)]

    def _save_variables(self) -> None:
        self._saved = [variable.numpy() for variable in self._variables]

    def save(self) -> None:
        """Remember the present values."""
        self._save_variables()
        super().save()

    def restore(self) -> None:
        """Go back to the values last saved."""
        for variable, value in zip(self._variables, self._saved, strict=True):
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        """Give every rank the values of rank 0, and save them."""
        broadcast_variables(self._variables, root_rank=0)
        self._save_variables()
        super().sync()
