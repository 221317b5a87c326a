"""Checkpoints and flushes of a Keras optimizer's residuals."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from keras import Model
from keras.optimizers import Optimizer

from dgc_horovod import envvars
from dgc_horovod.config_check import together
from dgc_horovod.errors import CheckpointError, UnsupportedUse
from dgc_horovod.files import AnyPath
from dgc_horovod.state import checkpoint
from dgc_horovod.state.kinds import NAMED, TEXT, checked, list_of, optional, tuple_of, whole
from dgc_horovod.state.parts import is_flushed
from dgc_horovod.state.residual_state import FROZEN_SINCE, UNDECIDED, ResidualState, from_npz, to_npz
from dgc_horovod.tensorflow.gradients.transport import Collectives
from dgc_horovod.tensorflow.session import Session, passes_of, session_of
from dgc_horovod.tensorflow.variables import is_frozen, key_of, native, own_variables, shared_variables

_log = logging.getLogger("dgc_horovod")
_OUTER, _TRAINED, _EXCHANGED = "outer", "trained", "exchanged"
_HEAD_KINDS = {
    "variables": list_of(tuple_of(list_of(whole(0)), TEXT)), _OUTER: whole(0), _TRAINED: list_of(whole(-1)),
    _EXCHANGED: optional(list_of(whole(-1))), "extra": NAMED,
}  # fmt: skip


def save_checkpoint(directory: AnyPath, model: Model, optimizer: Optimizer | None = None, **extra: object) -> None:
    """Save a model, its optimizer's variables and every rank's residuals; called on every rank, between two steps.

    Args:
        directory: path, made if it is not there. A checkpoint in it is replaced once the new one is complete; other
            files are left alone.
        model: Keras model, built.
        optimizer: optimizer of ``DistributedOptimizer``; None: the one compiled into the model.
        extra: more values to save, as JSON can: numbers, texts, lists, dicts (the epoch); those of rank 0 are saved.

    Raises:
        CheckpointError: on every rank, if any rank could not write.

    Cost: u and v of every rank are written, twice the model's size each with momentum.
    """
    session, collectives, variables, outer = _parts(model, optimizer)
    session.strategy.conclude()

    def content() -> checkpoint.Content:
        used, distribution = session.optimizer, session.distribution
        made, passes = int(used._iterations), passes_of(used)
        if made % passes:
            raise UnsupportedUse(
                f"{made % passes} of {passes} passes of a step are accumulated, which a checkpoint does not hold; save "
                "after the last one"
            )
        distribution.ownership.look(session.iterations)
        state = distribution.residuals()
        trained = _trained_in(model, session)
        saved = _dumped(variables, outer, trained, extra) if collectives.rank == 0 else b""
        shapes = [str(_described(variable)) for variable in (*variables, *outer)]
        holds = checkpoint.digest_of_names(shapes, distribution.settings.process_set.process_set_id)
        return checkpoint.Content(holds, saved, state, distribution.settings.config)

    checkpoint.save(directory, collectives, content)


def load_checkpoint(
    directory: AnyPath, model: Model, optimizer: Optimizer | None = None, residuals: str = checkpoint.REQUIRED
) -> dict[str, Any]:
    """Go on from ``save_checkpoint``; called on every rank, whatever their number is now.

    With the same number of ranks training goes on bit for bit. With another number the combined residual of all ranks
    stays the same (to fp32 rounding); all ranks must then see the directory.

    Args:
        directory: path of the checkpoint.
        model, optimizer: model and optimizer, built as they were when it was saved.
        residuals: demand on the residuals: "required"; "if sound": missing or damaged ones are dropped; "ignored":
            all start from zero.

    Returns:
        The `extra` of ``save_checkpoint``.

    Raises:
        CheckpointError: on every rank, if a file is missing or damaged on any, or of another model or method.
    """
    session, collectives, variables, outer = _parts(model, optimizer)
    distribution, settings = session.distribution, session.distribution.settings
    node_size = distribution.topology_for([variable.shape for variable in model.trainable_variables]).node_size
    found = checkpoint.load(directory, collectives, settings.config, settings.averages, residuals, node_size)
    with together(collectives, f"loading {directory}"):  # before anything is changed, on any rank
        saved = _Saved.read(found.manifest.file(checkpoint.MODEL).name, found.model)
        saved.check(variables, outer)
        if settings.config is not None:
            state = _of_these(found.state, saved.head, _trained_in(model, session))
            distribution.check(state)
    with together(collectives, f"loading {directory}"):
        saved.assign(variables, outer, collectives.rank)
        for accumulator in own_variables(session.optimizer):  # gradients of the weights before
            native(accumulator).assign(tf.zeros_like(native(accumulator)))
        session.strategy.begin_anew()
        if settings.config is not None:
            if found.manifest.workers not in (0, collectives.workers):
                state.mode = UNDECIDED  # the choice was for other ranks
            distribution.resume(state, session.iterations)
            checkpoint.tell_if_empty(found, directory)
    return dict(saved.head["extra"])


def _parts(model: Model, optimizer: Optimizer | None) -> tuple[Session, Collectives, list[Any], list[Any]]:
    """Return session, transport, the variables of every method, and the outer momenta of local steps."""
    used: Any = optimizer or getattr(model, "optimizer", None)
    session = session_of(used)
    if session is None:
        raise UnsupportedUse("compile the model with the optimizer that DistributedOptimizer has returned, or pass it")
    if not session.distribution.takes_part:
        raise UnsupportedUse("this rank is not in the optimizer's process set; call it on those that are")
    if not model.built:
        raise UnsupportedUse("the model must be built: call model.build(input_shape)")
    if not used.built:
        used.build(model.trainable_variables)
    variables = [native(variable) for variable in (*model.weights, *shared_variables(used))]
    outer = [native(variable) for variable in session.strategy.outer()]
    patient = Collectives(session.distribution.settings.process_set, checkpoint.CALLS, envvars.checkpoint_seconds())
    return session, patient, variables, outer


def _dumped(variables: list[Any], outer: list[Any], trained: dict[str, Any], extra: dict[str, Any]) -> bytes:
    variables = [*variables, *outer]
    fields = {"variables": [_described(variable) for variable in variables], _OUTER: len(outer), **trained}
    arrays = {str(i): np.frombuffer(variable.numpy().tobytes(), np.uint8) for i, variable in enumerate(variables)}
    try:
        return to_npz({**fields, "extra": extra}, arrays)
    except (TypeError, ValueError) as error:  # of JSON
        raise CheckpointError(f"extra values must be numbers, texts, lists or dicts ({error})") from None


def _described(variable: tf.Variable) -> list[Any]:
    return [list(map(int, variable.shape)), variable.dtype.name]


@dataclass(frozen=True)
class _Saved:
    """The content of the model's file: head, and the bytes of each variable; outer momenta come last."""

    name: str  # of the file
    head: dict[str, Any]
    values: list[np.ndarray]

    @classmethod
    def read(cls, name: str, data: bytes) -> _Saved:
        """Read the bytes of `_dumped`; raise CheckpointError for others. `name`: of the file, for messages."""
        what = f"the model's file, {name}, is damaged"
        head, arrays = from_npz(what, data)
        head = checked(what, head, _HEAD_KINDS)
        numbers = [str(i) for i in range(len(head["variables"]))]
        if missing := [number for number in numbers if number not in arrays]:
            raise CheckpointError(f"{what}: array {missing[0]!r} is missing")
        if head[_OUTER] > len(numbers):
            raise CheckpointError(f"{what}: {_OUTER} is {head[_OUTER]}, and there are {len(numbers)} variables")
        return cls(name, head, [arrays[number] for number in numbers])

    def check(self, variables: list[tf.Variable], outer: list[tf.Variable]) -> None:
        """Raise CheckpointError unless the variables can be set; outer momenta may be missing now, or in the file."""
        others, given = len(self.values) - int(self.head[_OUTER]), self.head["variables"]
        ours, momenta = ([_described(variable) for variable in each] for each in (variables, outer))
        if ours != given[:others] or (momenta and given[others:] and momenta != given[others:]):
            raise CheckpointError(
                f"the checkpoint is of another model: it has {others} variables, this model and optimizer {len(ours)}, "
                "or their shapes or dtypes differ; an optimizer has variables of the layers that were trained when it "
                "was built: freeze the same layers, or freeze and thaw after it is built"
            )
        for i, (variable, value) in enumerate(zip((*variables, *outer), self.values, strict=False)):
            expected = variable.shape.num_elements() * variable.dtype.size
            if value.dtype != np.uint8 or value.shape != (expected,):
                raise CheckpointError(
                    f"the model's file, {self.name}, is damaged: array '{i}' must be a vector of {expected} bytes, got "
                    f"{value.dtype}, shape {value.shape}"
                )

    def assign(self, variables: list[tf.Variable], outer: list[tf.Variable], rank: int) -> None:
        """Set the variables; outer momenta that were not saved begin with zero."""
        for variable, value in zip((*variables, *outer), self.values, strict=False):
            variable.assign(np.frombuffer(value.tobytes(), variable.numpy().dtype).reshape(variable.shape))
        if bool(outer) == bool(self.head[_OUTER]):
            return
        for momentum in outer:
            momentum.assign(tf.zeros_like(momentum))
        if rank == 0:
            told = "has no outer momentum, which starts from zero" if outer else "has outer momentum, which is dropped"
            _log.info("dgc_horovod: the checkpoint %s", told)


# -- the variables of a record


def _trained_in(model: Model, session: Session) -> dict[str, list[int] | None]:
    """Return the indices of the trained weights, and of the exchanged ones if known, to which residuals refer.

    Args:
        model: Keras model, built.
        session: session of its optimizer, which is built.

    Returns:
        Indices in ``model.weights``, by `_TRAINED` and `_EXCHANGED`.
    """
    index = {key_of(weight): i for i, weight in enumerate(model.weights)}
    config = session.distribution.settings.config
    all_kept = config is not None and config.exchanges_weights  # of all that the optimizer was built with
    kept = [v for v in session.optimizer._trainable_variables if all_kept or not is_frozen(v)]
    trained = [index.get(key_of(v), -1) for v in kept if key_of(v) not in session.local]
    exchanged = [[index.get(source.key, -1) for source in each.sources] for each in session.distribution.exchanges]
    return {_TRAINED: trained, _EXCHANGED: exchanged[0] if len(exchanged) == 1 else None}


def _of_these(state: ResidualState, then: dict[str, Any], now: dict[str, list[int] | None]) -> ResidualState:
    """Return `state` if its tensors are those trained now; otherwise, after a flush, without tensors.

    Args:
        state: record of this rank.
        then, now: results of `_trained_in`.

    Raises:
        CheckpointError: the residuals are of other weights, and not flushed.
    """
    if not state.tensors:
        return state
    exchanged = then[_EXCHANGED]
    if now[_EXCHANGED] is not None and exchanged is not None:
        one, other = exchanged, now[_EXCHANGED]
    else:  # a trained variable without a gradient is not exchanged
        one, other = then[_TRAINED], now[_TRAINED]
        if one == other and not set(exchanged or ()) <= set(other or ()):
            one = exchanged
    if one == other:
        return state
    if is_flushed(state):
        return dataclasses.replace(state, tensors={}, runs={}, second={}, thresholds={})
    raise CheckpointError(
        f"the residuals are of other variables: those of model.weights at {_few(one)} were trained, now those at "
        f"{_few(other)}: {FROZEN_SINCE}"
    )


def _few(indices: list[int] | None) -> str:
    told = [str(i) for i in indices or ()]
    return ", ".join([*told[:8], "..."] if len(told) > 8 else told)
