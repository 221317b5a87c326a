"""The methods of an exchanging optimizer for what it keeps: saved, loaded, emptied, told."""

from __future__ import annotations

from typing import Any

from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.torch import epochs, state
from dgc_horovod.torch.gradients.exchange import GradientExchange
from dgc_horovod.torch.gradients.grad_guard import GradientWatch
from dgc_horovod.torch.updates.base import PlainUpdate


class StateMethods:
    """See `ExchangeMethods`, which adds to them. Never instantiated itself."""

    _dgc: GradientExchange
    _dgc_update: PlainUpdate
    _dgc_takes_part: bool  # whether this rank is one of those that exchange
    _dgc_membership: Any = None  # with which ranks, where they change while the job runs

    def state_dict(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As the optimizer's own. It has the same entries on every rank at any time: they may be broadcast one by one.

        Between steps with momentum correction, the momentum of compressed tensors is this rank's own
        (``residual_state_dict``); here it is zero.
        """
        if self._dgc_takes_part:
            self._dgc_update.prepare(self)
        return super(type(self), self).state_dict(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(self: Any, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """As the optimizer's own; a stock checkpoint's momentum and moments are taken over, and u and v start empty."""
        if self._dgc_has_launched() and self._dgc_membership is None:
            raise UnsupportedUse(
                "load_state_dict() between backward() and step(): gradients are being exchanged; call it after step()"
            )
        self._dgc_reset()
        super(type(self), self).load_state_dict(state_dict, *args, **kwargs)  # type: ignore[misc]
        if self._dgc_takes_part:
            self._dgc_forget()
            self._dgc_loaded = self._dgc_may_be_regrouped = True

    def _dgc_check_state_dict(self: Any, state_dict: dict[str, Any]) -> Any:
        """Raise UnsupportedUse for what `load_state_dict` would refuse of what is not torch's: nothing here."""

    def _dgc_forget(self: Any) -> None:
        """u, v and the step under way: the weights and the optimizer's state are about to be others."""
        self._dgc.abandon()
        self._dgc.buckets.clear()
        self._dgc_update.prepare(self)
        self._dgc_watch = GradientWatch()

    def _dgc_share_loaded(self: Any, root: int) -> None:
        """Share what rank `root` has loaded beside torch's state: nothing here."""

    def residual_state_dict(self: Any) -> dict[str, Any]:
        """What this rank has kept of gradients that the model has not had yet: training state, of this rank alone.

        Returns:
            A dict of numbers and tensors, copies, for ``torch.save``; empty for a rank outside the process set.

        Raises:
            UnsupportedUse: between backward() and step().
        """
        return state.to_dict(state.kept_by(self)) if self._dgc_takes_part else {}

    def load_residual_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        """Go on, bit for bit, from ``residual_state_dict()`` of this rank; after ``load_state_dict``.

        Raises:
            CheckpointError: it is of another rank, another number of ranks or another model.
        """
        if self._dgc_takes_part:
            state.load_residuals(self, state.from_dict(state_dict))

    def flush(self: Any) -> None:
        """Apply everything that the ranks have kept, by one dense exchange: no residual is left on any rank.

        Momentum goes where the optimizer has it, so that ``state_dict()`` is a stock checkpoint of which nothing is
        missing. SGD: ``w -= lr*mean(v)``, ``momentum_buffer += mean(u)``, exact. Adam: the same for v, and the second
        moment that all ranks share; what 8-bit coding has left of small tensors stays. Other optimizers, and methods
        without momentum correction: a step of theirs with ``mean(v)`` as gradient. Every rank must call it, between two
        steps; gradients are cleared.

        Cost: an fp32 allreduce of v and of u.
        """
        if self._dgc_takes_part:
            state.flush(self)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """Raises UnsupportedUse: hooks, buckets and collectives belong to this object in this process."""
        raise UnsupportedUse(
            "a wrapped optimizer cannot be copied or pickled; keep optimizer.state_dict(), or copy the model and wrap "
            "a new optimizer over the copy"
        )

    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        """Raises UnsupportedUse: the ranks have agreed on the buckets."""
        raise UnsupportedUse(
            "add_param_group after wrapping: the ranks have already agreed on names and buckets; add the group to the "
            "optimizer first, then wrap it"
        )

    def set_epoch(self: Any, epoch: int) -> None:
        """Tell the warm-up which epoch (from 0) it is, where no DistributedSampler does.

        Raises:
            ConfigError: it is no whole number.
        """
        if self._dgc_takes_part:
            self._dgc.buckets.epoch = epochs.whole(epoch)

    def compression_stats(self: Any) -> dict[str, Any]:
        """What this rank has exchanged since it was wrapped; under Horovod Elastic, since the ranks changed.

        Returns:
            ``steps``; ``elements`` and ``selected`` of the sparse path; ``bytes_sent`` and ``bytes_received``:
            everything handed to and received from collectives, dense path and headers included;
            ``bytes_inside_node``: what came from workers of the same node, which is in neither of them;
            ``bytes_dense`` and ``bytes_dense_received``: the same for an fp32 ring allreduce of every gradient;
            ``compress_seconds``, ``decode_seconds``; ``exchange_seconds`` waiting for other ranks; ``skipped`` steps;
            figures of health, see `Diagnostics.close`; ``buckets``, see `BucketMeter.stats`. Costs a read of residuals.
        """
        if not self._dgc_takes_part:
            return {}
        return self._dgc.buckets.stats()

    def _dgc_has_launched(self: Any) -> bool:
        """Whether a gradient has been handed to the exchange: not in the passes of an accumulation before the last."""
        return any(handle is not None for handle, _ in self._handles.values())

    def _dgc_check_between_steps(self: Any) -> None:
        if self._handles or (self._synchronized and self._dgc_may_apply):
            raise UnsupportedUse(
                "residuals can be saved, loaded and flushed between two steps only: after step(), before backward()"
            )

    def _dgc_mode(self: Any) -> str:
        """Which exchange is at work, where there are several; for a checkpoint."""
        return ""

    def _dgc_resume(self: Any, mode: str) -> None:
        """Go on with the exchange that was at work when a state was saved."""

    def _dgc_ranks_changed(self: Any) -> None:
        """A checkpoint of another number of ranks is loaded, on every rank."""

    @property
    def _dgc_in_round(self) -> bool:
        """Whether the ranks' weights may differ, since what spans several steps is under way: nothing does here."""
        return False

    def _dgc_finish_round(self: Any) -> None:
        """End what spans several steps: nothing does here."""

    def _dgc_sees_clipping(self: Any, limit: float) -> None:
        """The script clips gradients that are each rank's own affair: there are none here."""

    def _dgc_end_for_another(self: Any) -> None:
        """Another optimizer has the parameters from now on: leave them the same on every rank, as they are here."""

    def _dgc_reset(self: Any) -> None:
        """Forget what backward passes have begun: another state is loaded."""
        raise NotImplementedError
