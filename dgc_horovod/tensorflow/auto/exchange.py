"""`GradientExchange` beside the uncompressed one, in one graph: each step takes what the choice says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from keras.optimizers import Optimizer

from dgc_horovod.notices import JOINED, SEVERAL
from dgc_horovod.planning.trial import COMPRESSED, DENSE
from dgc_horovod.state.residual_state import RESIDUAL, SECOND
from dgc_horovod.tensorflow.auto.choice import BRANCHES, HANDED_BACK, GraphChoice
from dgc_horovod.tensorflow.clipping.of_optimizer import averages_clipped, clipped
from dgc_horovod.tensorflow.gradients.bucket_run import BucketRun
from dgc_horovod.tensorflow.gradients.dense_path import DensePath
from dgc_horovod.tensorflow.gradients.exchange import GradientExchange
from dgc_horovod.tensorflow.gradients.host_calls import behind, host_call
from dgc_horovod.tensorflow.wrapping.variables import Gradient


class AutomaticExchange(GradientExchange):
    """The exchange of the gradients of an optimizer that takes the fastest one by its own clock.

    Until it compresses, the optimizer's slots have all of its momentum, and its arithmetic is stock Horovod's. When
    compression begins, the engines take the slots over; when it ends, what they have is handed back.

    Args:
        optimizer: optimizer, weakly, which clips averages, or each rank's own gradient where they are compressed.
        arguments, named: see `GradientExchange`.
    """

    def __init__(self, *arguments: Any, optimizer: Optimizer, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._optimizer = optimizer
        self.auto = GraphChoice(self.steps)
        assert self.kept is not None
        self.kept.register(self.auto)
        groups = dict(enumerate(self.settings.group_numbers(self.sources)))
        self._stock_path = DensePath(self.collectives, self.settings, hvd.Compression.none, groups)

    @property
    def keeps_state(self) -> bool:
        return self.auto.holds

    @property
    def compresses(self) -> bool:
        return self.auto.holds and not self.auto.choice.given_up

    def give_up(self, why: str) -> None:
        self.auto.choice.give_up(why)

    def joins(self) -> None:
        if not self.auto.choice.trial.ended:
            self.give_up(JOINED)

    def follow(self, other: GradientExchange) -> None:
        assert isinstance(other, AutomaticExchange)
        super().follow(other)
        self.give_up(SEVERAL)
        self.auto.follow(other.auto)

    def _graph(
        self, gradients: list[Gradient], iterations: tf.Tensor, rate: Any, weights: list[Any], everything: list[Any]
    ) -> tuple[list[Gradient], Any, Any]:
        which, probes = self.auto(iterations)
        # an error that every rank has comes before anything is sent
        iterations = behind(which, iterations)
        gradients = [behind(which, tf.convert_to_tensor(gradient)) for gradient in gradients]
        compress = super()._graph

        def compressed() -> list[tf.Tensor]:
            own = [clipped(gradient, self._optimizer, self.settings, local=False) for gradient in gradients]
            results, finite, dense = compress(own, iterations, rate, weights, everything)
            return [*results, finite, tf.constant(False) if dense is None else dense]

        def handed_back() -> list[tf.Tensor]:
            return self._stock(gradients, probes, *self._handed_back(which, rate, weights))

        branches = {
            DENSE: lambda: self._stock(gradients, probes),
            COMPRESSED: compressed,
            HANDED_BACK: handed_back,
        }
        *results, finite, dense = tf.switch_case(which, [branches[name] for name in BRANCHES])
        return results, finite, dense if self.update.arithmetic.is_split else None

    def _stock(
        self,
        gradients: Sequence[tf.Tensor],
        probes: tf.Tensor,
        owed: Mapping[int, tf.Tensor] | None = None,
        after: Sequence[tf.Tensor] = (),
    ) -> list[tf.Tensor]:
        """The averages of `gradients`, whether they may be applied, and that the step is the optimizer's own.

        Args:
            gradients: gradients of this rank.
            probes: whether it is to be found out now what a compressed step would take.
            owed: what is added to some of the averages, by number.
            after: what else must have come before the step has ended.
        """
        auto, owed = self.auto, owed or {}
        gradients = [tf.identity(gradient) for gradient in gradients]  # else all of the branch would wait for all
        with tf.control_dependencies(gradients):
            (given,) = self._call(auto.given, [probes], [tf.bool])
        found = self._stock_path(dict(enumerate(gradients)))
        results = [found[i] for i in range(len(gradients))]
        with tf.control_dependencies([given, *after, *results]):
            ends = tf.cond(probes, auto.expected, lambda: tf.constant(True))
            (applied,) = self._call(auto.ended, [ends], [tf.bool])  # of stock's own arithmetic nothing is skipped
        applied.set_shape([])
        results = averages_clipped(results, self._optimizer, self.settings)
        results = [tf.cast(result, self._dtype(i, result.dtype)) for i, result in enumerate(results)]
        # of many steps, so that a limit for one would cut it
        results = [result + tf.cast(owed[i], result.dtype) if i in owed else result for i, result in enumerate(results)]
        return [*results, applied, tf.constant(True)]

    def _handed_back(
        self, which: tf.Tensor, rate: tf.Tensor, weights: Sequence[Any]
    ) -> tuple[dict[int, tf.Tensor], list[tf.Tensor]]:
        """Let the optimizer have all that ranks have kept.

        Returns:
            What is to be added to its gradients, by number; a tensor that is there when all has come.
        """
        owed: dict[int, tf.Tensor] = {}
        (armed,) = self._call(self.steps.arm, [which], [tf.int64])
        after = [armed]
        for run in self.steps.runs:
            engine, collectives = run.engine, self.collectives
            parts = (RESIDUAL,) if engine.bucket.uncompressed else self.update.parts
            dtypes = [tf.float32] * len(parts)
            kept = host_call(self.steps.noting(self._kept, run, parts), [armed], dtypes)
            whole = {}
            for part, vector in zip(parts, kept, strict=True):
                vector.set_shape([engine.whole.numel])
                if part != SECOND:
                    op = hvd.Average if self.settings.averages else hvd.Sum
                    vector = collectives.allreduce(vector, f"left.{engine.bucket.index}.{part}", op)
                whole[part] = vector
            after += whole.values()
            for segment, i in zip(engine.whole.segments, run.members, strict=True):
                left = {part: tf.reshape(x[segment.place], self.sources[i].shape) for part, x in whole.items()}
                key, compressed = self.sources[i].key, i in self.compressed
                later = self.update.hand_back(key, weights[i], left, rate, compressed)
                if later is not None:
                    owed[i] = later
        with tf.control_dependencies(after):
            return owed, self._call(self.auto.handed_back, [armed], [tf.bool])

    def _kept(self, run: BucketRun, parts: Sequence[str], _: np.ndarray) -> list[Any]:
        """What this rank keeps of a bucket, part by part, see `BucketEngine.as_one_of_all`; here it ends."""
        second = [self.steps.second_of(run)] if SECOND in parts else []
        kept = [run.engine.as_one_of_all(part) for part in parts if part != SECOND]
        self.steps.counts.traffic.count_allreduce(sum(part.nbytes for part in kept), self.collectives.workers)
        run.engine.clear()
        return kept + second
