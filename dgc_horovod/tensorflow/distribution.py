"""One optimizer or tape among its ranks: which variables take part, and their exchanges, each agreed on once."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from dgc_horovod import __version__, envvars
from dgc_horovod.agreement import check_agreement, unique_tag
from dgc_horovod.config import FIELD_NAMES
from dgc_horovod.errors import ConfigError, UnsupportedUse
from dgc_horovod.report import describe
from dgc_horovod.tensorflow.collectives import Collectives
from dgc_horovod.tensorflow.exchange import GradientExchange
from dgc_horovod.tensorflow.host_calls import host_call
from dgc_horovod.tensorflow.settings import Settings
from dgc_horovod.tensorflow.updates import PlainUpdate
from dgc_horovod.tensorflow.variables import (
    Gradient,
    dtype_of,
    key_of,
    keys_of,
    kind_of,
    name_of,
    shape_of,
    zeros_for,
)

_log = logging.getLogger("dgc_horovod")


class Clock:
    """Notices that a checkpoint was loaded: the optimizer's iterations jump.

    Args:
        stride: most iterations from one exchange to the next.
        says: whether to tell (one rank does).
    """

    def __init__(self, stride: int, says: Callable[[], bool] = lambda: True) -> None:
        self._stride, self._says = stride, says
        self._last: int | None = None
        self._generation = 0

    def generation(self, iterations: int) -> int:
        """A number that changes when `iterations` is not what must follow."""
        last, self._last = self._last, iterations
        if last is None:
            if iterations >= self._stride and self._says():
                _log.warning("dgc_horovod: training goes on at iteration %d; u and v start from zero", iterations)
        elif not 0 <= iterations - last <= self._stride:
            self._generation += 1
            if self._says():
                _log.warning(
                    "dgc_horovod: the optimizer's iterations went from %d to %d: a checkpoint was loaded. u and v "
                    "belong to the weights before and start again from zero",
                    last,
                    iterations,
                )
        return self._generation


class Member:
    """What one exchange needs to know beyond `GradientExchange`: who takes part in it.

    Args:
        sources: as the caller gives them.
        kinds: of each source's gradient, agreed among the ranks: "none", "sparse" or "dense".
        exchange: of those that have a gradient on some rank and are not local.
        active: their places among `sources`.
    """

    def __init__(
        self, sources: Sequence[Any], kinds: Sequence[str], exchange: GradientExchange | None, active: Sequence[int]
    ) -> None:
        self.sources, self.kinds, self.exchange, self.active = list(sources), list(kinds), exchange, list(active)
        self.compressed = {active[j] for j in exchange.compressed} if exchange is not None else set()

    def completed(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """`gradients` with zeros where this rank has none and another may have one."""
        result = []
        for source, kind, gradient in zip(self.sources, self.kinds, gradients, strict=True):
            if kind == "none" and gradient is not None:
                raise UnsupportedUse(
                    f"{name_of(source)!r} had a gradient on no rank at the first step, and has one now; the ranks have "
                    "agreed on what is exchanged. Give every variable a gradient at the first step, or make a new "
                    "DistributedOptimizer when one is unfrozen"
                )
            if kind != "none" and gradient is None:
                gradient = zeros_for(source, kind)
            if kind == "dense" and isinstance(gradient, tf.IndexedSlices):
                gradient = tf.convert_to_tensor(gradient)
            result.append(gradient)
        return result


class Distribution:
    """The exchanges of one optimizer or tape, made at the first gradients of each set of variables.

    Args:
        settings: Horovod's arguments and the compression.
        update: how gradients enter the residual.
        stride: see `Clock`.
        what: "optimizer" or "tape", for messages; equal on all ranks.
    """

    def __init__(self, settings: Settings, update: PlainUpdate, what: str, stride: int = 1) -> None:
        self.settings, self.update, self.what = settings, update, what
        self.clock = Clock(stride, lambda: settings.config is not None and settings.process_set.rank() == 0)
        self.epoch: int | None = None
        self._members: dict[Any, Member] = {}
        self._agreeing: Collectives | None = None

    @property
    def takes_part(self) -> bool:
        """Whether this rank is in the process set."""
        return self.settings.process_set.included()

    def all_agree(self, finite: tf.Tensor) -> tf.Tensor:
        """Whether `finite` is true on every rank. One small collective."""
        if not self.takes_part:
            return finite
        if self._agreeing is None:
            process_set = self.settings.process_set
            self._agreeing = Collectives(process_set, unique_tag(f"scaling {process_set.process_set_id}"))
        collectives, watch = self._agreeing, self._agreeing.watch
        name = collectives.full_name("finite")

        def arm() -> list[Any]:
            watch.arm(name)
            return [np.bool_(True)]

        def disarm(_: Any) -> list[Any]:
            watch.disarm()
            return [np.bool_(True)]

        (begun,) = host_call(arm, [], [tf.bool])
        with tf.control_dependencies([begun]):
            overflowing = collectives.allreduce(tf.cast(tf.logical_not(finite), tf.float32), "finite")
        (ended,) = host_call(disarm, [overflowing], [tf.bool])
        with tf.control_dependencies([ended]):
            return tf.equal(overflowing, 0.0)

    def member(
        self,
        sources: Sequence[Any],
        gradients: Sequence[Gradient],
        local: Collection[Any] = (),
        number: int = 0,
    ) -> Member:
        """The exchange for `sources`; the first time the ranks compare what they are about to do.

        Args:
            sources: the variables.
            gradients: one for each, None where there is none.
            local: keys of variables that are left to each rank.
            number: tells exchanges of the same variables apart.

        Raises:
            RankMismatch: on every rank, if they differ.
        """
        keys = keys_of(sources)
        left_out = tuple(key in local for key in keys)
        key = number, keys, left_out
        if key not in self._members:
            self._members[key] = self._make(sources, gradients, left_out, number)
        return self._members[key]

    def _make(
        self, sources: Sequence[Any], gradients: Sequence[Gradient], local: Sequence[bool], number: int
    ) -> Member:
        process_set = self.settings.process_set
        kinds = [kind_of(gradient) for gradient in gradients]
        _refuse_complex(sources)
        if not envvars.horovod_elastic():  # there a newcomer makes its exchange while the others wait for its state
            start = Collectives(process_set, "start")
            check_agreement(start, self._agreed_fields(sources, local, number))
            kinds = _common_kinds(start, kinds)
        if self.settings.config is not None or self.settings.sparse_as_dense:
            kinds = ["dense" if kind == "sparse" else kind for kind in kinds]
        active = [i for i, kind in enumerate(kinds) if kind != "none" and not local[i]]
        if not active:
            return Member(sources, kinds, None, [])
        taking_part = [sources[i] for i in active]
        shapes = "\n".join(f"{shape_of(source)} {dtype_of(source)}" for source in taking_part)
        tag = unique_tag(f"{self.what} {process_set.process_set_id} {number}\n{shapes}")
        collectives = Collectives(process_set, tag)
        exchange = GradientExchange(taking_part, self.settings, collectives, self.update, self.clock.generation)
        buckets = exchange.steps.buckets
        if buckets is not None:
            buckets.epoch = self.epoch
            if collectives.rank == 0:
                describe(buckets)
        return Member(sources, kinds, exchange, active)

    def _agreed_fields(self, sources: Sequence[Any], local: Sequence[bool], number: int) -> dict[str, str]:
        settings, config = self.settings, self.settings.config
        shown = settings.compression if config is None else config
        return {
            "version": __version__,
            "compression": getattr(shown, "__name__", type(shown).__name__),
            "config": "\n".join(f"{name}={getattr(config, name)!r}" for name in FIELD_NAMES) if config else "",
            "used by": f"{self.what} {number}",
            "op": str(int(settings.op)),
            "gradient_predivide_factor": str(float(settings.gradient_predivide_factor)),
            "sparse_as_dense": str(settings.sparse_as_dense),
            "variable count": str(len(sources)),
            "shapes": "\n".join(f"{i} {shape_of(source)}" for i, source in enumerate(sources)),
            "dtypes": "\n".join(f"{i} {dtype_of(source)}" for i, source in enumerate(sources)),
            "groups": "\n".join(map(str, settings.group_numbers(sources))),
            "local": "\n".join(map(str, local)),
        }

    @property
    def compressed(self) -> set[Any]:
        """Keys of the variables whose gradients are compressed."""
        return {key_of(m.sources[i]) for m in self._members.values() for i in m.compressed}

    def set_epoch(self, epoch: int) -> None:
        """Tell the warm-up which epoch (from 0) it is."""
        self.epoch = epoch
        self._each_bucket(lambda buckets: setattr(buckets, "epoch", epoch))

    def clear(self) -> None:
        """Empty u, v and the moments of every exchange: the weights are about to be others."""
        self._each_bucket(lambda buckets: buckets.clear())

    def _each_bucket(self, act: Callable[[Any], None]) -> None:
        for exchange in self.exchanges:
            if exchange.steps.buckets is not None:
                act(exchange.steps.buckets)

    @property
    def exchanges(self) -> list[GradientExchange]:
        """All that there are."""
        return [member.exchange for member in self._members.values() if member.exchange is not None]

    def stats(self) -> dict[str, int]:
        """See ``DistributedOptimizer.compression_stats``: the sum over all sets of variables."""
        total: dict[str, int] = {}
        for exchange in self.exchanges:
            for name, count in exchange.steps.stats().items():
                total[name] = max(total.get(name, 0), count) if name == "steps" else total.get(name, 0) + count
        return total


def _refuse_complex(sources: Sequence[Any]) -> None:
    for source in sources:
        if dtype_of(source).startswith("complex"):
            raise UnsupportedUse(
                f"{name_of(source)!r} is complex, which neither Horovod nor the compression can exchange"
            )
        if getattr(source, "overwrite_with_gradient", False):
            raise UnsupportedUse(
                f"{name_of(source)!r} is overwritten by its gradient (float8 training), which cannot be combined over "
                "ranks; use another dtype policy"
            )
        if None in source.shape:
            raise ConfigError(f"{name_of(source)!r} has the shape {source.shape}; every dimension must be known")


def _common_kinds(collectives: Collectives, kinds: list[str]) -> list[str]:
    """For each source: "none" if no rank has a gradient, "sparse" if all that have one have a sparse one."""
    theirs = [json.loads(data) for data in collectives.gather_bytes(json.dumps(kinds).encode(), "kinds")]
    common = []
    for each in zip(*theirs, strict=True):
        found = {kind for kind in each if kind != "none"}
        common.append("none" if not found else "sparse" if found == {"sparse"} else "dense")
    return common
