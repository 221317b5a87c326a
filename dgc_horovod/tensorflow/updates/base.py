"""How a Keras optimizer's arithmetic is split: what enters the residual before the exchange, what is applied after.

For plain error feedback the user's optimizer takes what the exchange brings as a gradient. For SGD with momentum and
for Adam the momentum or the direction has been formed locally, before selection: what is left is the plain step
``w -= lr * mean(s)``. Keras' weight decay is decoupled for every optimizer, and stays its own.

A checkpoint's slots (velocity, moments) are taken over by the engine at the first step after they were loaded, and
emptied: by linearity nothing is lost, and nothing is applied twice. When Keras saves, they get what the rank has. The
reverse is `hand_back`, inside a graph or out of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from dgc_horovod.core.engine import BucketEngine
from dgc_horovod.core.optimizer_exchange import OptimizerExchange
from dgc_horovod.kernels.contract import Accumulation, ErrorFeedback
from dgc_horovod.state.residual_state import RESIDUAL, Arrays
from dgc_horovod.tensorflow.wrapping.variables import Key, key_of, native

Left = Mapping[str, Any]  # arrays or tensors of a variable, by part


class PlainUpdate:
    """Error feedback alone.

    Args:
        notices: texts for the user, each said once.
        unknown: name of an optimizer of whose arithmetic nothing is known; "" for others.
    """

    is_split = False
    is_optimizers = True  # and not a tape's, which knows no optimizer
    dense_is_stock = False  # whether a step at which everything is sent is the optimizer's own; Adam's alone
    flush_is_step = True  # of the user's optimizer
    parts: tuple[str, ...] = (RESIDUAL,)  # what a rank keeps, and hands back

    def __init__(self, *notices: str, unknown: str = "") -> None:
        self.notices, self.unknown = list(notices), unknown

    def accumulation(self, buckets: OptimizerExchange, name: str) -> Accumulation:
        """How the gradient of the compressed variable `name` enters the residual at this step."""
        return ErrorFeedback()

    def slots(self, key: Key) -> list[Any]:
        """The optimizer's own variables for the variable `key` whose place the engine takes."""
        return []

    def take_over(
        self, buckets: OptimizerExchange, name: str, slots: list[np.ndarray], rate: float, iterations: int
    ) -> None:
        """Put into `buckets` what stood in `slots`, which are emptied.

        Args:
            buckets: all that this rank keeps.
            name: name of the variable there.
            slots: values of the optimizer's variables that `slots` names, whole and flat, float32.
            rate: learning rate; for a sum over ranks, times their number.
            iterations: number of steps that the optimizer has made, >= 0.
        """

    def for_slots(self, buckets: OptimizerExchange, name: str, rate: float) -> list[np.ndarray]:
        """The reverse: what this rank has, as the optimizer's slots would hold it, for a file; [] if they have it."""
        return []

    def own(self, key: Key) -> Arrays:
        """The slots of the variable `key` that are this rank's alone, for its record."""
        return {}

    def without_own(self, key: Key, arrays: Arrays) -> Arrays:
        """The rest of a record's `arrays` of the variable `key`.

        Raises:
            CheckpointError: they are of another model.
        """
        return arrays

    def take_own(self, key: Key, arrays: Arrays) -> None:
        """Put the slots in `arrays` back."""

    def hand_back(self, key: Key, variable: Any, left: Left, rate: Any, compressed: bool) -> Any:
        """Apply what all ranks together had kept of a variable, before a step of the user's own optimizer.

        Args:
            key, variable: key of the variable, and the tf.Variable.
            left: what is left of it, in its shape, by part: arrays or tensors.
            rate: learning rate, a number or a scalar tensor.
            compressed: whether it is on the sparse path.

        Returns:
            What cannot be applied, as it is a gradient, to be added to that of the next step; or None.
        """
        return left[RESIDUAL]

    def flush(self, optimizer: Any, left: Sequence[tuple[Any, Left]], compressed: Collection[Key]) -> list[Any]:
        """Apply what all ranks together had kept, where that is no step of the user's optimizer.

        Args:
            optimizer: wrapped Keras optimizer.
            left: variables and what is left of each, in its shape, by part.
            compressed: keys of the variables on the sparse path.

        Returns:
            For each variable what cannot be applied, and is to be kept on every rank; or None.
        """
        raise NotImplementedError


class TapeUpdate(PlainUpdate):
    """The update of gradients that go back to the script."""

    is_optimizers = False


class SplitUpdate(PlainUpdate):
    """Variables on the sparse path are stepped by what comes back alone."""

    is_split = True
    flush_is_step = False

    def flush(self, optimizer: Any, left: Sequence[tuple[Any, Left]], compressed: Collection[Key]) -> list[Any]:
        rate = float(optimizer.learning_rate)
        return [self._flushed(native(variable), parts, rate, key_of(variable), compressed) for variable, parts in left]

    def _flushed(self, variable: Any, left: Left, rate: float, key: Key, compressed: Collection[Key]) -> Any:
        return self.hand_back(key, variable, left, rate, key in compressed)


def index_of(optimizer: Any, key: Key) -> int:
    """Where Keras keeps what belongs to a variable."""
    return optimizer._trainable_variables_indices[key[0]]


def part_of(engine: BucketEngine, i: int, state: Any) -> np.ndarray:
    """A copy on the host of what `engine` keeps of a variable."""
    return engine.kernels.to_host(state[engine.bucket.segments[i].place]).copy()


def kept_of(engine: BucketEngine, i: int, values: np.ndarray) -> np.ndarray:
    """What `engine` keeps of `values` of a whole variable, flat."""
    segment = engine.bucket.segments[i]
    return values[segment.offset :][: segment.numel]
