"""What a training run must keep beside a Keras model, and how it is saved and loaded."""

from __future__ import annotations

import io
import json
import os
import zipfile
from typing import Any

import numpy as np

from dgc_horovod import envvars
from dgc_horovod.config_check import together
from dgc_horovod.errors import CheckpointError, UnsupportedUse
from dgc_horovod.state import checkpoint
from dgc_horovod.state.residual_state import UNDECIDED
from dgc_horovod.tensorflow.auto.agreed import those_of_any
from dgc_horovod.tensorflow.broadcast import shared_variables
from dgc_horovod.tensorflow.distribution import Distribution
from dgc_horovod.tensorflow.flush import passes_of
from dgc_horovod.tensorflow.gradients.transport import Collectives
from dgc_horovod.tensorflow.wrapping.variables import native

_HEAD = "head"


def save_checkpoint(directory: str | os.PathLike[str], model: Any, optimizer: Any = None, **extra: Any) -> None:
    """Save a model, its optimizer's variables and every rank's residuals; called on every rank, between two steps.

    Args:
        directory: path, made if it is not there. A checkpoint in it is replaced once the new one is complete; other
            files are left alone.
        model: Keras model, built.
        optimizer: optimizer of ``DistributedOptimizer``; None: the one compiled into the model.
        extra: more values to keep, as JSON can: numbers, texts, lists, dicts (the epoch); those of rank 0 are kept.

    Raises:
        CheckpointError: on every rank, if any rank could not write.

    Cost: u and v of every rank are written, twice the model's size each with momentum.
    """
    distribution, collectives, variables = _parts(model, optimizer)
    used = _inner(optimizer or model.optimizer)
    used._dgc_finish_round()

    def content() -> checkpoint.Content:
        made, passes = int(used._iterations), passes_of(used)
        if made % passes:
            raise UnsupportedUse(
                f"{made % passes} of {passes} passes of a step are accumulated, which a checkpoint does not hold; save "
                "after the last one"
            )
        distribution.clock.look(int(used.iterations))
        state = distribution.residuals()
        saved = _dumped(variables, extra) if collectives.rank == 0 else b""
        shapes = [str(_described(variable)) for variable in variables]
        holds = checkpoint.digest_of_names(shapes, distribution.settings.process_set.process_set_id)
        return checkpoint.Content(holds, saved, state, distribution.settings.config)

    checkpoint.save(directory, collectives, content)


def load_checkpoint(
    directory: str | os.PathLike[str], model: Any, optimizer: Any = None, residuals: str = checkpoint.REQUIRED
) -> dict[str, Any]:
    """Go on from ``save_checkpoint``; called on every rank, whatever their number is now.

    With the same number of ranks training goes on bit for bit. With another number the combined residual of all ranks
    stays the same (to fp32 rounding); all ranks must then see the directory.

    Args:
        directory: path of the checkpoint.
        model, optimizer: model and optimizer, built as they were when it was saved.
        residuals: demand on them: "required"; "if sound": go on without those missing or damaged, whose content
            is lost; "ignored": all start from zero.

    Returns:
        The `extra` of ``save_checkpoint``.

    Raises:
        CheckpointError: on every rank, if a file is missing or damaged on any, or of another model or method.
    """
    distribution, collectives, variables = _parts(model, optimizer)
    settings = distribution.settings
    node_size = distribution.topology_for([variable.shape for variable in model.trainable_variables]).node_size
    found = checkpoint.load(directory, collectives, settings.config, settings.averages, residuals, node_size)
    if settings.config is not None and settings.config.automatic:
        found.state.directions = those_of_any(found.state.directions, collectives)
    with together(collectives, f"loading {directory}"):
        extra = _assigned(variables, found.model)
        _inner(optimizer or model.optimizer)._dgc_weights_loaded()
        if settings.config is not None:
            if found.manifest.workers not in (0, collectives.workers):
                found.state.mode = UNDECIDED  # what was fastest for other ranks
            distribution.resume(found.state, int((optimizer or model.optimizer).iterations))
            checkpoint.tell_if_empty(found, directory)
    return extra


def _parts(model: Any, optimizer: Any) -> tuple[Distribution, Collectives, list[Any]]:
    optimizer = optimizer or getattr(model, "optimizer", None)
    distribution = getattr(optimizer, "_dgc", None)
    if distribution is None:
        raise UnsupportedUse("compile the model with the optimizer that DistributedOptimizer has returned, or pass it")
    if not distribution.takes_part:
        raise UnsupportedUse("this rank is not in the optimizer's process set; call it on those that are")
    if not model.built:
        raise UnsupportedUse("the model must be built: call model.build(input_shape)")
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    everything = (*model.weights, *shared_variables(optimizer), *_inner(optimizer)._dgc_outer())
    variables = [native(variable) for variable in everything]
    patient = Collectives(distribution.settings.process_set, checkpoint.CALLS, envvars.checkpoint_seconds())
    return distribution, patient, variables


def _inner(optimizer: Any) -> Any:
    """Without a LossScaleOptimizer around it."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def _dumped(variables: list[Any], extra: dict[str, Any]) -> bytes:
    try:
        head = json.dumps({"variables": [_described(variable) for variable in variables], "extra": extra})
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"keep numbers, texts, lists and dicts only ({error})") from None
    arrays = {str(i): np.frombuffer(variable.numpy().tobytes(), np.uint8) for i, variable in enumerate(variables)}
    out = io.BytesIO()
    np.savez(out, **{_HEAD: np.frombuffer(head.encode(), np.uint8)}, **arrays)  # type: ignore[arg-type]
    return out.getvalue()


def _described(variable: Any) -> list[Any]:
    return [list(map(int, variable.shape)), variable.dtype.name]


def _assigned(variables: list[Any], data: bytes) -> dict[str, Any]:
    """Set the variables to what `_dumped` was given; returns its `extra`."""
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            head = json.loads(arrays[_HEAD].tobytes())
            values = [arrays[str(i)] for i in range(len(head["variables"]))]
    except (ValueError, KeyError, OSError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"the model's file is damaged ({error})") from None
    ours = [_described(variable) for variable in variables]
    if ours != head["variables"]:
        raise CheckpointError(
            f"the checkpoint is of another model: it has {len(head['variables'])} variables, this model and optimizer "
            f"{len(ours)}, or their shapes or dtypes differ"
        )
    for variable, value in zip(variables, values, strict=True):
        variable.assign(np.frombuffer(value.tobytes(), variable.numpy().dtype).reshape(variable.shape))
    return dict(head["extra"])
