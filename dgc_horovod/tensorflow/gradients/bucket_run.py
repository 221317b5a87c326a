"""A bucket in a graph: its tensors, memory for its updates, and the collectives that its exchange may take.

A graph is traced once, and must hold every collective that a step may need: those of each density of the warm-up, in an
elastic job of each exchange, as there the number of ranks decides too. What a host call hands to a round is a triple:
the number of its collective, and a vector of bytes and one of floats, of which at most one is not empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import tensorflow as tf

from dgc_horovod import envvars
from dgc_horovod.config import AUTO
from dgc_horovod.core.engine import BucketEngine
from dgc_horovod.exchange.choose import EXCHANGES
from dgc_horovod.exchange.contract import Round, start
from dgc_horovod.kernels.contract import Kernels
from dgc_horovod.schedule import densities
from dgc_horovod.tensorflow.gradients.host_calls import Blocks
from dgc_horovod.wire.bucket import PADDING

TRIPLE = [tf.int32, tf.uint8, tf.float32]
_Form = tuple[str, str, str] | None
_NO_BYTES, _NO_FLOATS = np.empty(0, np.uint8), np.empty(0, np.float32)


@dataclass(eq=False)
class BucketRun:
    """A bucket, where its tensors stand in the list of gradients, and memory for its updates."""

    engine: BucketEngine
    members: tuple[int, ...]
    blocks: Blocks

    @property
    def kernels(self) -> Kernels:
        """Those of its device."""
        return self.engine.kernels

    def new_updates(self) -> list[Any]:
        """Memory for one update of each tensor."""
        if self.kernels.array_kind == "numpy":
            return self.blocks.take()
        return [self.kernels.new(segment.numel) for segment in self.engine.whole.segments]

    def of_slice(self, gradients: Sequence[Any], whole: bool) -> list[Any]:
        """The gradients of what this worker keeps of a bucket, from its slice in one, or from whole ones."""
        segments, engine = self.engine.bucket.segments, self.engine
        if not whole:
            (flat,) = gradients
            return [flat[segment.place] for segment in segments]
        of_name = {segment.name: gradient for segment, gradient in zip(engine.whole.segments, gradients, strict=True)}
        of_name[PADDING] = self.kernels.new(engine.topology.node_size)
        return [of_name[segment.name][segment.offset :][: segment.numel] for segment in segments]

    @cached_property
    def alternatives(self) -> list[dict[_Form, Round | None]]:
        """For each round, the collectives that may carry it by their forms; None: there may be no such round."""
        config, engine = self.engine.config, self.engine
        if envvars.horovod_elastic():
            wire = engine.spec(config.final_density).wire
            owners = config.shards or (config.exchange == AUTO and config.max_bytes_per_step is not None)
            allowed = [each for each in EXCHANGES.values() if owners or not each.keeps_remainder]
            possible = [exchange.rounds_of(wire, engine.workers) for exchange in allowed]
        else:
            possible = [engine.spec(density).rounds for density in densities(config.final_density, config.warmup)]
        most = max(map(len, possible))
        found: list[dict[_Form, Round | None]] = [{} for _ in range(most)]
        for rounds in possible:
            for number in range(most):
                collective = rounds[number] if number < len(rounds) else None
                found[number].setdefault(_form(collective), collective)
        return found

    def triple(self, number: int, buffer: np.ndarray | None) -> list[Any]:
        """What round `number` sends, for `carried`; None where there is no such round."""
        rounds = self.engine.exchange.rounds
        form = _form(rounds[number] if number < len(rounds) else None)
        which = np.int32(list(self.alternatives[number]).index(form))
        if buffer is None:
            return [which, _NO_BYTES, _NO_FLOATS]
        if buffer.dtype == np.uint8:  # the engine writes the next one to the same place
            return [which, buffer.copy(), _NO_FLOATS]
        return [which, _NO_BYTES, buffer]

    def carried(self, transports: Mapping[str, Any], number: int, triple: list[tf.Tensor]) -> list[tf.Tensor]:
        """What round `number` brings: a vector of bytes and one of floats, at most one of them not empty."""
        which, data, floats = triple

        def branch(collective: Round | None) -> Callable[[], list[tf.Tensor]]:
            def carry() -> list[tf.Tensor]:
                no_bytes, no_floats = tf.zeros([0], tf.uint8), tf.zeros([0], tf.float32)
                if collective is None:
                    return [no_bytes, no_floats]
                if collective.dtype == "uint8":
                    return [start(transports, collective, data, self.engine.bucket.name), no_floats]
                return [no_bytes, start(transports, collective, floats, self.engine.bucket.name)]

            return carry

        branches = [branch(collective) for collective in self.alternatives[number].values()]
        return branches[0]() if len(branches) == 1 else tf.switch_case(which, branches)


def _form(collective: Round | None) -> _Form:
    """What tells one collective of a graph from another: sizes may differ from density to density."""
    return None if collective is None else (collective.name, collective.kind, collective.dtype)
