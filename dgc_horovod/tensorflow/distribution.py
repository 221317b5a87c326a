"""The exchanges of one optimizer or tape, and the agreement of the ranks on the variables of each."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow.functions import broadcast_object

from dgc_horovod import envvars
from dgc_horovod.config import DGCConfig
from dgc_horovod.config_check import refused_alike, unique_tag
from dgc_horovod.core.bucketing import HOST_SPEED, TensorSpec
from dgc_horovod.core.nodes import Launched, agree
from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.exchange.hierarchical import Topology
from dgc_horovod.notices import describe
from dgc_horovod.recording import begin_as_environment_says
from dgc_horovod.state.parts import check_kept
from dgc_horovod.state.residual_state import ResidualState
from dgc_horovod.stats import bucket_stats, figures, total
from dgc_horovod.tensorflow.auto import AutomaticExchange, for_a_choice
from dgc_horovod.tensorflow.gradients.exchange import Exchange, GradientExchange, StockExchange
from dgc_horovod.tensorflow.gradients.host_steps import HostSteps, StockSteps
from dgc_horovod.tensorflow.gradients.replica_check import compare_weights
from dgc_horovod.tensorflow.gradients.transport import Collectives, transports
from dgc_horovod.tensorflow.settings import Settings
from dgc_horovod.tensorflow.updates import Holder, SlotOwnership, Update
from dgc_horovod.tensorflow.variables import (
    Gradient,
    Key,
    Source,
    VariableSet,
    common_kinds,
    is_frozen,
    key_of,
    kind_of,
    native,
    refuse_what_cannot_be_sent,
    sources_of,
)

_log = logging.getLogger("dgc_horovod")
_SetKey = tuple[int, tuple[Source, ...], tuple[bool, ...]]  # number, variables, and which of them are local
# Distributions of tapes, by their settings. A script makes a new tape at every step, and residuals must outlive it.
of_tapes: dict[Any, Distribution] = {}


class Distribution:
    """The exchanges of one optimizer, or of all tapes with the same settings.

    Args:
        settings: Horovod's arguments and the compression.
        update: form in which gradients enter the residual.
        stride: iterations from one exchange to the next, >= 1, see `SlotOwnership`.
        kind: name of the optimizer's class, where there is one.
    """

    def __init__(self, settings: Settings, update: Update, stride: int = 1, kind: str = "") -> None:
        self.settings, self.update, self.kind = settings, update, kind
        self._what = "tape" if update.is_tapes else "optimizer"  # equal on all ranks
        config = settings.config
        grows = not update.is_tapes and config is not None and not config.exchanges_weights
        self.ownership = SlotOwnership(stride, grows, settings.process_set)
        self.epoch: int | None = None
        self.broadcast_follows = False  # weights may still differ at the first step
        self._epochs_begun = 0
        self.run_steps: int | None = None  # of the whole run, if Keras' fit knows it
        self._sets: dict[_SetKey, VariableSet] = {}
        self._known: weakref.WeakValueDictionary[Key, Any] = weakref.WeakValueDictionary()  # variables of all sets
        self._frozen: set[Key] = set()
        self._agreeing: Collectives | None = None
        self._topology: Topology | None = None

    @property
    def takes_part(self) -> bool:
        """Whether this rank is in the process set."""
        return bool(self.settings.process_set.included())

    @property
    def compresses(self) -> bool:
        """Whether gradients are compressed now, or from the first step on."""
        config = self.settings.config
        return config is not None and (not config.automatic or any(each.compresses for each in self.choosing))

    def topology_for(self, shapes: Sequence[Sequence[int]]) -> Topology:
        """Return the nodes that the exchange uses; at the first call, made by all ranks, they agree on them.

        Args:
            shapes: shapes of the variables that are trained.
        """
        if self._topology is None:
            process_set, config = self.settings.process_set, self.settings.config
            if config is None:
                return Topology(process_set.rank(), process_set.size())
            specs = [TensorSpec(str(i), tuple(map(int, shape))) for i, shape in enumerate(shapes)]
            start, hindrance = Collectives(process_set, "start"), self._hindrance(config)
            launched, averages = Launched.of(hvd), self.settings.averages
            found = agree(start, config, launched, averages, specs, HOST_SPEED, hindrance)
            if envvars.horovod_elastic():
                return found  # for now: hosts come and go
            self._topology = found
        return self._topology

    def _hindrance(self, config: DGCConfig) -> str:
        """Return the reason why this optimizer or tape cannot use nodes; "" if it can."""
        if self.update.is_tapes:
            return "a tape cannot use nodes"
        if {"clipnorm", "clipvalue"} & set(self.kind.split()) and config.clip_norm is None:
            return f"the optimizer clips each gradient ({self.kind})"
        return ""

    def all_agree(self, finite: tf.Tensor) -> tf.Tensor:
        """Whether `finite` is true on every rank. One small collective."""
        if not self.takes_part:
            return finite
        if self._agreeing is None:
            process_set = self.settings.process_set
            self._agreeing = Collectives(process_set, unique_tag(f"scaling {process_set.process_set_id}"))
        overflows = self._agreeing.sum_in_time(tf.cast(tf.logical_not(finite), tf.float32), "finite")
        return tf.equal(overflows, 0.0)

    def variable_set(
        self, variables: Sequence[Any], gradients: Sequence[Gradient], local: Collection[Key] = (), number: int = 0
    ) -> VariableSet:
        """Return the set of `variables`; at the first call the ranks compare their settings.

        Args:
            variables: variables that ``apply`` or ``gradient`` is called with.
            gradients: gradient of each variable, None where there is none.
            local: keys of variables whose gradients are not exchanged.
            number: index that tells sets of the same variables apart, from 0.

        Raises:
            RankMismatch: on every rank, if the ranks differ.
        """
        sources = sources_of(variables)
        self.let_go_of_frozen(source.key for source in sources)
        left_out = tuple(source.key in local for source in sources)
        key = number, sources, left_out
        if key not in self._sets:
            self._sets[key] = self._make(sources, gradients, left_out, number)
            if not self.update.is_tapes and not self.broadcast_follows and not envvars.horovod_elastic():
                shared = [variable for variable, own in zip(variables, left_out, strict=True) if not own]
                compare_weights(Collectives(self.settings.process_set, "start"), shared)
            for variable in filter(key_of, variables):
                self._known[key_of(variable)] = variable
                if self.update.is_tapes:  # nothing else would free the state of a deleted model
                    weakref.finalize(native(variable), self._forget, key)
        return self._sets[key]

    def let_go_of_frozen(self, given: Iterable[Key]) -> None:
        """Empty u and v of frozen variables: the residual would move them once they are trained again.

        Args:
            given: keys of the variables that are trained now.
        """
        frozen = {key for key, variable in self._known.items() if is_frozen(variable)}
        frozen.difference_update(given)
        for key in frozen - self._frozen:
            self.ownership.empty(key)
        self._frozen = frozen

    def _forget(self, key: _SetKey) -> None:
        gone = self._sets.pop(key, None)
        if gone is not None and isinstance(gone.exchange, GradientExchange):
            self.ownership.forget(gone.exchange.steps)

    def _make(
        self, sources: Sequence[Source], gradients: Sequence[Gradient], local: Sequence[bool], number: int
    ) -> VariableSet:
        kinds = [kind_of(gradient) for gradient in gradients]
        # under Elastic a newcomer makes its exchange while the others wait for its state
        start, alone = Collectives(self.settings.process_set, "start"), envvars.horovod_elastic()
        with refused_alike(None if alone else start, self._agreed_fields(sources, local, number)):
            for source in sources:
                refuse_what_cannot_be_sent(source)
            if self.settings.config is not None and hvd.rank() == 0:
                begin_as_environment_says(self.settings.config)
        if not alone:
            kinds = common_kinds(start, kinds)
        if self.settings.config is not None and self.settings.config.automatic and not self._sets:
            sent = [kind for kind, own in zip(kinds, local, strict=True) if not own]
            self.settings = for_a_choice(self.settings, sent, self.run_steps)
            if self.settings.config is None and self.ownership.loaded is not None and start.rank == 0:
                _log.warning("dgc_horovod: the residuals of the checkpoint are dropped: nothing is compressed")
        if self.settings.config is not None or self.settings.sparse_as_dense:
            kinds = ["dense" if kind == "sparse" else kind for kind in kinds]
        found = VariableSet(sources, kinds, local)
        if found.active:
            found.exchange = self._exchange([sources[i] for i in found.active], number)
        return found

    def _exchange(self, sources: Sequence[Source], number: int) -> Exchange:
        process_set, config = self.settings.process_set, self.settings.config
        shapes = "\n".join(f"{source.shape} {source.dtype}" for source in sources)
        tag = unique_tag(f"{self._what} {process_set.process_set_id} {number}\n{shapes}")
        collectives, topology = Collectives(process_set, tag), self.topology_for([each.shape for each in sources])
        if config is None:
            return StockExchange(StockSteps(sources, self.settings, collectives))
        if topology.node_size > 1 and self.exchanges and not config.automatic:
            raise UnsupportedUse(
                "the set of trained variables has changed, and with a hierarchical exchange other ranks of the node "
                "have parts of their residuals; pass exchange='flat', or --dgc-exchange flat"
            )
        groups = transports(collectives, topology)
        steps = HostSteps(sources, self.settings, config, groups, self.update, self.ownership, number)
        exchange = AutomaticExchange(steps) if config.automatic else GradientExchange(steps)
        for each in self.compressing:  # the new one may need their state
            exchange.follow(each)
        if self.ownership.loaded is not None:
            exchange.kept.resume(self.ownership.loaded)
            self.ownership.loaded = None
        steps.buckets.epoch = self.epoch
        if collectives.rank == 0:
            describe(steps.buckets, self.update.notices)
        return exchange

    def _agreed_fields(self, sources: Sequence[Source], local: Sequence[bool], number: int) -> dict[str, str]:
        pairs = list(zip(sources, local, strict=True))
        return {
            **self.settings.agreed_fields(),
            "used by": f"{self._what} {number}",
            "optimizer": self.kind,
            "variable count": str(len(sources)),
            "shapes": "\n".join(f"{i} {'its own' if own else s.shape}" for i, (s, own) in enumerate(pairs)),
            "dtypes": "\n".join(f"{i} {source.dtype}" for i, source in enumerate(sources)),
            "groups": "\n".join(map(str, self.settings.group_numbers(sources))),
            "local": "\n".join(map(str, local)),
        }

    def for_slots(self, rate: float) -> dict[int, Any]:
        """Return values of the optimizer's slots that the engines hold, for a file: id of the variable -> value."""
        values: dict[int, Any] = {}
        if self.ownership.holds_loaded:
            _log.warning(
                "dgc_horovod: the momentum that load_checkpoint has read is missing in this file: make a step before "
                "saving, or call flush() on every rank"
            )
        keeping = self._keeping
        for key in self.compressed:
            found = self.ownership.find(key)
            if found is not None and found[0] in keeping:
                held = self.update.for_slots(found[0].buckets, found[1], rate)
                slots = self.update.slots(key, self.update.arithmetic.slots)
                for slot, value in zip(slots.values(), held, strict=False):
                    values[id(slot)] = value.reshape(slot.shape)
        return values

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the warm-up, from 0."""
        self.epoch, self._epochs_begun = epoch, epoch + 1
        for exchange in self.compressing:
            exchange.steps.buckets.epoch = epoch

    def epoch_begins(self, epoch: int) -> None:
        """Set the epoch that ``fit`` begins; epochs of earlier calls of ``fit`` count too."""
        self.set_epoch(max(epoch, self._epochs_begun))

    def residuals(self, own: bool = True) -> ResidualState | None:
        """Return a copy of this rank's state; None without compression, or before the first step.

        Args:
            own: see `StateRegister.record`.

        Raises:
            UnsupportedUse: there are several exchanges (several sets of variables), or a step is under way.
        """
        self._refuse_several("saved")
        if self.compressing:
            return self.compressing[0].kept.record(own)
        return None if self.exchanges else self.ownership.loaded

    def _refuse_several(self, what: str) -> None:
        if len(self.exchanges) > 1:
            raise UnsupportedUse(
                f"residuals of an optimizer that is given several sets of variables cannot be {what}; give each set an "
                'optimizer of its own (a new one can load with residuals="ignored")'
            )

    def check(self, state: ResidualState) -> None:
        """Raise CheckpointError or UnsupportedUse if this optimizer cannot go on from `state`.

        Sizes are compared at the first step, when it is known which variables have gradients.
        """
        self._refuse_several("loaded")
        if self.compressing:
            self.compressing[0].kept.check(state)
        else:
            check_kept(state, "" if self.settings.config is None else self.update.arithmetic.holds)

    def resume(self, state: ResidualState, iterations: int) -> None:
        """Go on from `state`, of this rank, at the optimizer's `iterations`: now, or once there is an exchange."""
        self.check(state)
        self.epoch = state.epoch
        self._epochs_begun = state.epoch or 0  # this epoch may be repeated
        self.ownership.resumed(iterations)
        if self.compressing:
            self.compressing[0].kept.resume(state)
        else:
            self.ownership.loaded = state

    def carry_on(self, state: ResidualState | None, iterations: int) -> None:
        """Go on from the `state` of a commit; a step under way is dropped."""
        if state is not None:
            place = self.compressing[0].steps.buckets if self.compressing else state
            self.resume(state.carried_on(place.rank, place.workers), iterations)
        else:
            self.ownership.clear()

    def renew(self, iterations: int) -> None:
        """Adapt to other ranks; this one keeps its state."""
        state = self.residuals(own=False)  # own slots must not be scaled as residuals are
        for exchange in self.compressing:
            exchange.steps.renew()
        if self._agreeing is not None:
            self._agreeing.renew()
        if state is not None:
            process_set = self.settings.process_set
            self.resume(state.carried_on(process_set.rank(), process_set.size()), iterations)

    def join(self, iterations: int) -> None:
        """Take over what all ranks share, see `ResidualState.shared`, from rank 0; a newcomer's residuals are empty."""
        ranks = self.settings.process_set
        state = self.residuals(own=False) or ResidualState(ranks.rank(), ranks.size(), self.settings.averages)
        shared = broadcast_object(state.shared, root_rank=0, name="dgc.elastic.step")
        self.resume(dataclasses.replace(state, **shared), iterations)

    @property
    def exchanges(self) -> list[Exchange]:
        """All exchanges."""
        return [each.exchange for each in self._sets.values() if each.exchange is not None]

    @property
    def compressing(self) -> list[GradientExchange]:
        """All exchanges, or none without compression."""
        return [exchange for exchange in self.exchanges if isinstance(exchange, GradientExchange)]

    @property
    def choosing(self) -> list[AutomaticExchange]:
        """All exchanges, or none unless compression is auto."""
        return [exchange for exchange in self.exchanges if isinstance(exchange, AutomaticExchange)]

    @property
    def used(self) -> bool:
        """Whether a step has been made, or traced."""
        return bool(self._sets) or self._agreeing is not None  # the first step may overflow

    @property
    def compressed(self) -> set[Key]:
        """Keys of the variables whose gradients are compressed."""
        return {key for exchange in self.compressing for key in exchange.compressed}

    @property
    def in_engines(self) -> set[Key]:
        """Keys of the compressed variables whose momentum the engines hold, and not the optimizer's slots."""
        keeping = self._keeping if self.update.arithmetic.is_split else set()  # others have it in the slots
        found = {key: self.ownership.find(key) for key in self.compressed if keeping}
        return {key for key, at in found.items() if at is None or at[0] in keeping}

    @property
    def _keeping(self) -> set[Holder]:
        return {exchange.steps for exchange in self.compressing if exchange.keeps_state}

    def stats(self) -> dict[str, Any]:
        """See ``DistributedOptimizer.compression_stats``: the sum over all sets of variables."""
        tallies = [exchange.steps.counts for exchange in self.exchanges]
        return {**total(tallies), **figures(tallies), "buckets": bucket_stats(tallies)}
