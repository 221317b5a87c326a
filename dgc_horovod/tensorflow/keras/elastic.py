"""Horovod Elastic for Keras 3: ``run``, ``KerasState``, and the callbacks of Horovod's, which work as they are."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.common.elastic import ObjectState, run_fn
from horovod.common.exceptions import HorovodInternalError
from horovod.tensorflow.functions import broadcast_object
from horovod.tensorflow.keras.elastic import CommitStateCallback, UpdateBatchStateCallback, UpdateEpochStateCallback
from keras import Model

from dgc_horovod import envvars
from dgc_horovod.config_check import check_agreement
from dgc_horovod.errors import CollectiveTimeout, ConfigError, DGCError
from dgc_horovod.notices import going_back
from dgc_horovod.state.residual_state import ResidualState
from dgc_horovod.tensorflow.gradients.transport import Collectives, wait_for_shutdown
from dgc_horovod.tensorflow.session import passes_of, session_of
from dgc_horovod.tensorflow.variables import assign, broadcast_variables, own_variables, shared_variables, values_of

__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"]
# Texts of errors of Horovod's operations when another rank is gone; paths of files in them may contain more
_OF_A_LOST_RANK = re.compile(
    r"Horovod has been shut down|Horovod(Allreduce|Allgather|Broadcast)|gloo/(transport|rendezvous)/|nccl\w+ failed"
)
# Errors that each rank would raise again after going back
_OURS = re.compile(
    "|".join(rf"\b{kind.__name__}: " for kind in DGCError.__subclasses__() if kind is not CollectiveTimeout)
)


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """``hvd.elastic.run`` for Keras 3.

    Horovod's own recognizes errors of its operations by names that Keras 3 does not show, and drops every other error
    of TensorFlow: the training function would end there without an error.

    Args:
        func: function that takes a state first, and is run again from its last commit whenever the ranks change.
    """

    @functools.wraps(func)
    def telling(state: ObjectState, *args: Any, **kwargs: Any) -> Any:
        with _lost_ranks():
            return func(state, *args, **kwargs)

    return run_fn(telling, _reset)


@contextmanager
def _lost_ranks() -> Iterator[None]:
    """Turn TensorFlow's errors for a lost rank into the error on which Horovod goes back to a commit."""
    try:
        yield
    except (CollectiveTimeout, tf.errors.OpError) as error:
        text = str(error)
        if isinstance(error, tf.errors.OpError) and (_OURS.search(text) or not _OF_A_LOST_RANK.search(text)):
            raise
        raise HorovodInternalError(text) from error


def _reset() -> None:
    wait_for_shutdown()  # two of them at once would wait for each other
    hvd.shutdown()
    hvd.init()


class KerasState(ObjectState):
    """Weights and the optimizer's variables of a Keras 3 model, saved, restored and sent to newcomers.

    Residual and momentum of a rank (v, u) are saved and restored with them, and never sent. When N ranks become M, the
    survivors scale theirs by M/N (if gradients are averaged), so that the combined residual stays the same; newcomers
    begin with zeros. With local steps: see `LocalSteps.meet`.

    Args:
        model: Keras 3 model, built.
        optimizer: optimizer of the model; None: the one compiled into it.
        flush_on_commit: whether residuals are flushed before each commit: a lost rank then loses nothing that was
            committed (see ``flush`` for Adam).
        kwargs: more values to synchronize, attributes of this object.
    """

    def __init__(self, model: Model, optimizer: Any = None, flush_on_commit: bool = False, **kwargs: object) -> None:
        if not model.built:
            raise ConfigError("the model must be built before its state can be kept: call model.build(input_shape)")
        self.model, self.optimizer, self._flushes = model, optimizer or model.optimizer, flush_on_commit
        if not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)
        session = self._session = session_of(self.optimizer)
        compresses = session is not None and session.distribution.settings.config is not None
        self._distribution = session.distribution if session is not None and compresses else None
        self._settled_at: int | None = None  # iterations at which there is nothing to flush
        self._remember()
        super().__init__(bcast_object=broadcast_object, get_rank=hvd.rank, **kwargs)

    @property
    def _variables(self) -> list[Any]:
        return [*self.model.weights, *shared_variables(self.optimizer)]

    @property
    def _all_variables(self) -> list[Any]:
        return [*self._variables, *own_variables(self.optimizer)]

    @property
    def _iterations(self) -> int:
        return int(self.optimizer.iterations)

    def _remember(self) -> None:
        self._saved = values_of(self._all_variables)
        self._round = None if self._session is None else self._session.strategy.remembered()
        self._kept: ResidualState | None = None
        if self._distribution is not None:
            self._distribution.ownership.look(self._iterations)
            self._kept = self._distribution.residuals(own=False)

    def commit(self) -> None:
        """Commit, as Horovod does, after a flush if asked for."""
        # a newcomer cannot flush before its first step; and with some methods a flush is a step
        if self._flushes and self._distribution is not None and self._iterations != self._settled_at:
            self.optimizer.flush()
            self._settled_at = self._iterations
        super().commit()

    def save(self) -> None:
        """Store the present values."""
        self._remember()
        super().save()

    def restore(self) -> None:
        """Go back to the values last saved."""
        going_back(sys.exc_info()[1])
        assign(self._all_variables, self._saved)
        if self._session is not None:
            self._session.strategy.go_back(self._round)
        if self._distribution is not None:
            self._distribution.carry_on(self._kept, self._iterations)
        super().restore()

    def reset(self) -> None:
        """Adapt to other ranks."""
        super().reset()
        if self._distribution is not None:
            self._distribution.renew(self._iterations)

    def sync(self) -> None:
        """Give every rank the values of rank 0, and save them; residuals stay each rank's own.

        Raises:
            RankMismatch: on every rank, if a newcomer has another model, compression or version.
        """
        with _lost_ranks():
            # a newcomer may have data to read before it comes here
            meeting = Collectives(hvd.global_process_set, "the newcomers' sync", envvars.checkpoint_seconds())
            fields = {"compression": "an optimizer that is not distributed"}
            if self._session is not None:
                fields = {
                    **self._session.distribution.settings.agreed_fields(),
                    "optimizer": type(self.optimizer).__name__,
                    "gradient accumulation": str(passes_of(self.optimizer)),
                    "flush_on_commit": str(self._flushes),
                }
            check_agreement(meeting, fields)
            share = partial(broadcast_variables, self._variables, root_rank=0)
            if self._session is None:
                share()
            else:
                self._session.strategy.meet(share)
            if self._distribution is not None:
                self._distribution.join(self._iterations)
            self._settled_at = self._iterations
            self._remember()
            super().sync()
