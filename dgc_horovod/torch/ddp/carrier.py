"""torch.distributed as the carrier of a session: for plain models, for DistributedDataParallel, and with nodes."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dgc_horovod import envvars
from dgc_horovod.core.nodes import Launched
from dgc_horovod.errors import RankMismatch, UnsupportedUse
from dgc_horovod.exchange.contract import BETWEEN, INSIDE
from dgc_horovod.exchange.hierarchical import Topology
from dgc_horovod.state import checkpoint
from dgc_horovod.torch.ddp.models import after_ddp, as_it_is, install, own_exchange
from dgc_horovod.torch.ddp.transport import Group, ProcessGroupCollectives, new_group
from dgc_horovod.torch.gradients.collectives import Collectives, Parameter, ReduceSettings
from dgc_horovod.torch.gradients.exchange import GradientExchange
from dgc_horovod.torch.session.auto import AutoTuned
from dgc_horovod.torch.session.carrier import Carrier
from dgc_horovod.torch.session.session import Session
from dgc_horovod.torch.wrapping import steps
from dgc_horovod.torch.wrapping.checks import Named

ACCUMULATED = (
    "backward() was called again before step(): the second gradient was added to an update that had been exchanged. "
    "Put all backward passes of a step but the last inside `with model.no_sync():`. To drop an update, call "
    "optimizer.zero_grad() before the next backward(). After this error make a new DistributedDataParallel and "
    "register it with a new optimizer"
)
NOT_EXCHANGED = (
    "step() without gradients that have been exchanged: since the last step there was no forward and backward pass "
    "outside of model.no_sync(), or it went to model.module, or left out a parameter (find_unused_parameters=True of "
    "DistributedDataParallel allows that), or optimizer.zero_grad() came after it, or the model has been put into "
    "another DistributedDataParallel since: register that with a new optimizer"
)
UNUSED = (
    "step() without gradients that have been exchanged: the last backward pass has brought no gradient for {names}, "
    "but DistributedDataParallel waits for one of every parameter. If a parameter, or an output of the model, takes no "
    "part in the loss, or is frozen after DistributedDataParallel was made, pass find_unused_parameters=True to it. If "
    "the loss consists of gradients only (torch.autograd.grad), without the last bias, add 0 * output.sum() to it"
)
BROADCAST = (
    "DistributedDataParallel sends the model's buffers to all ranks before every forward pass, of local steps too; "
    "pass broadcast_buffers=False to it, so that each rank keeps its own buffers"
)
_NAMED = 5  # parameters in a message


class GroupCarrier(Carrier):
    """The ranks of a process group of our own.

    Args:
        group: connections of the group.
        named: parameters of the optimizer with their names.
        settings, passes_per_step: see `Carrier`.
    """

    def __init__(self, group: Group, named: Named, settings: ReduceSettings, passes_per_step: int = 1) -> None:
        # in Horovod's order, of which checkpoints have a digest
        names = {p: name for name, p in sorted(named, key=lambda entry: entry[0])}
        ranks = group.ranks  # numbered as Horovod's process sets, if they are not all
        number = 0 if len(ranks) == dist.get_world_size() else 1 + ranks[0]
        super().__init__(names, settings, f"process group {ranks}", number, passes_per_step)
        self.group = group
        self._patient: Group | None = None  # connections with a longer timeout
        # of the comparison of densities: the last step, and whether all ranks were at the final density then
        self._compared_at, self._all_are_through = -1, False
        self._lock = threading.Lock()  # backward of several devices calls hooks from several threads

    def collectives(self, tag: str) -> Collectives:
        return ProcessGroupCollectives(self.group, tag)

    def patient(self) -> Collectives:
        seconds = envvars.checkpoint_seconds()
        if self._patient is None:
            self._patient = new_group(self.group.ranks, seconds)
        return ProcessGroupCollectives(self._patient, checkpoint.CALLS, seconds)

    def launched(self) -> Launched:
        place = dist.get_rank(), dist.get_world_size(), *envvars.torchrun_place()
        return Launched(*place, has_group=lambda ranks: True)

    def of_nodes(self, topology: Topology, tag: str) -> Mapping[str, Collectives]:
        found = {}
        for ranks in topology.groups:  # in one order on every rank, against a deadlock
            if topology.rank in ranks:
                name = INSIDE if ranks == topology.inside else BETWEEN
                found[name] = ProcessGroupCollectives(new_group(ranks, envvars.timeout_seconds()), tag)
        return found

    def check_ranks(self, session: Session) -> None:
        """Check once a step that densities are equal in a warm-up by epochs, which scripts may set differently.

        Packets of different densities have different sizes. With Gloo the process that gets the longer one is ended
        without an error in Python. The check ends when all ranks are at the final density.

        Raises:
            RankMismatch: on every rank, if the densities differ.

        Cost: 16 bytes to and from each worker, with a wait, in each step of the warm-up.
        """
        warmup, exchange = session.config.warmup, session.exchange
        if warmup is None or not warmup.needs_epoch or exchange.workers == 1:
            return
        with self._lock:
            if exchange.steps != self._compared_at:
                is_final = exchange.density() == exchange.config.density
                if not (self._all_are_through and is_final):
                    _compare_densities(exchange)
                self._compared_at, self._all_are_through = exchange.steps, is_final


def _compare_densities(exchange: GradientExchange) -> None:
    """Compare densities between the ranks; see `GroupCarrier.check_ranks`.

    An alltoall is one trip; Gloo's allgather is a ring of all ranks. It cannot match the allgather of a rank that
    does not check any more, since Gloo distinguishes kinds of collectives: both ranks then wait.
    """
    collectives, epoch = exchange.collectives, exchange.epoch
    own = torch.tensor([exchange.density(), -1 if epoch is None else epoch], dtype=torch.float64)
    collectives.traffic.add(sent=own.nbytes, received=(collectives.workers - 1) * own.nbytes)
    told = collectives.wait(collectives.alltoall(own.repeat(collectives.workers), "density"))
    firsts: dict[float, str] = {}  # one entry a density, for a short message
    for rank, (theirs, epoch) in enumerate(told.view(-1, 2).tolist()):
        firsts.setdefault(theirs, f"rank {rank} has {theirs:g} in epoch {epoch:.0f}")
    if len(firsts) > 1:
        raise RankMismatch(
            f"step {exchange.steps}: the ranks are at different densities: {', '.join(firsts.values())}. "
            "Call set_epoch with the same epoch on every rank, before its first step, and give every rank the same "
            "number of batches"
        )


class DataParallelCarrier(GroupCarrier):
    """The ranks of a DistributedDataParallel model, whose communication hook delivers gradients.

    After ``backward`` outside of ``no_sync``, ``p.grad`` has the update, as it has the average with DDP alone: scripts
    that unscale or clip it process the same numbers on every rank.

    Args:
        model: DistributedDataParallel model.
        group, named: see `GroupCarrier`.
    """

    exchanges_in_backward, stock = True, "DDP"

    def __init__(self, model: DistributedDataParallel, group: Group, named: Named) -> None:
        super().__init__(group, named, ReduceSettings(averages=True))
        self._model = weakref.ref(model)
        self._group_of_model = model.process_group
        self._passes = 0  # of DDP's own exchange, backward passes outside of no_sync() in the present step

    def deliver(self, session: Session) -> None:
        model = self._model()
        assert model is not None
        state = install(model)
        state.session, state.own = weakref.ref(session), None

    def started(self, session: Session) -> None:
        model = self._model()
        if not session.strategy.takes_gradients and model is not None:
            if model.broadcast_buffers and any(True for _ in model.buffers()):
                session.tell_once("buffers", BROADCAST)

    def carry(self, session: Session, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Pass the gradients of one bucket of DDP to the strategy.

        DDP gets the bucket back unchanged and copies it to ``p.grad``. After that, in the same backward pass, all
        exchanges are waited for, and ``p.grad`` gets the update, which is the same on every rank.
        """
        strategy = session.strategy
        if not strategy.takes_gradients:  # gradients are not exchanged
            return as_it_is(bucket)
        if isinstance(strategy, AutoTuned) and strategy.stock:
            return self._carry_as_ddp(session, strategy, bucket)
        if session.passes.synchronized and not session.offered:
            steps.check_not_stepped_otherwise(session)
            if any(session.watch.writes_to(p) is not None for p in bucket.parameters()):
                raise UnsupportedUse(ACCUMULATED)
        model = self._model()
        views = bucket.gradients() if model is not None and model.gradient_as_bucket_view else None
        for i, p in enumerate(bucket.parameters()):
            if p not in session.exchange.names:  # frozen since DDP was made
                continue
            if p.grad is None and views is not None:  # not used on this rank
                p.grad = views[i]
            session.passes.results[p] = strategy.hand_over(p)
        if bucket.is_last():
            after_ddp(lambda: end_backward(session))
        return as_it_is(bucket)

    def _carry_as_ddp(
        self, session: Session, strategy: AutoTuned, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        session.see_scaler()
        for p, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            strategy.add_owed(p, gradient)
        if bucket.is_last():
            self._passes = 1 if session.offered else self._passes + 1  # a GradScaler may have skipped a step
            session.offered = False
            begin = time.perf_counter()
            after_ddp(lambda: strategy.arrived(time.perf_counter() - begin))
        return own_exchange(self._group_of_model, False, bucket)

    def withhold(self, parameters: Collection[Parameter]) -> dict[Parameter, torch.Tensor]:
        """Take updates of frozen parameters out of ``p.grad``, and return them: as with DDP alone, they do not move."""
        withheld = {p: p.grad for p in parameters if not p.requires_grad and p.grad is not None}
        for p in withheld:
            p.grad = None
        return withheld

    def before_step(self, session: Session) -> None:
        """Raise UnsupportedUse if nothing was exchanged since the last step: DDP's hooks need complete buckets."""
        if session.passes.synchronized:
            return
        model, parameters, results = self._model(), session.parameters, session.passes.results
        left = {name: p for name, p in parameters.items() if p not in results}
        missing = [repr(name) for name, p in left.items() if not p.requires_grad or p.grad is None or not p.grad.any()]
        # whether the last forward pass was outside of no_sync(); the model may be gone
        in_sync = getattr(model, "require_forward_param_sync", False)
        if model is None or not in_sync or model.find_unused_parameters or not 0 < len(missing) < len(parameters):
            raise UnsupportedUse(NOT_EXCHANGED)
        others = f" and {len(missing) - _NAMED} others" if len(missing) > _NAMED else ""
        raise UnsupportedUse(UNUSED.format(names=", ".join(missing[:_NAMED]) + others))

    @property
    def stock_on_gloo(self) -> bool:
        model: Any = self._model()
        device = next(model.parameters()).device  # a group may have a backend for each kind of device
        return bool(model.process_group._get_backend(device).name() == "gloo")

    def stock_accumulates(self) -> bool:
        passes, self._passes = self._passes, 0
        return passes != 1  # only DDP's own exchange supports that

    def cleared(self) -> None:
        self._passes = 0


def end_backward(session: Session) -> None:
    """Wait for all exchanges at the end of the backward pass, after DDP has filled every ``p.grad``."""
    session.watch.look_again()
    session.strategy.synchronize()
    session.offered = False
