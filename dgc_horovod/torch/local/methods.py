"""The methods of an optimizer with local steps, whoever carries what is exchanged."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from dgc_horovod import at_end
from dgc_horovod.config import DGCConfig
from dgc_horovod.errors import UnsupportedUse, shown
from dgc_horovod.notices import MID_ROUND, WEIGHTS_SET, clips_alone, of_skipped, step_not_made, stop_if_skipped
from dgc_horovod.torch.clipping import calls as clip_calls
from dgc_horovod.torch.gradients.dense_path import all_finite, not_finite_of
from dgc_horovod.torch.local.rounds import LocalRounds
from dgc_horovod.torch.local.update import LocalUpdate
from dgc_horovod.torch.methods import ExchangeMethods
from dgc_horovod.torch.wrapping import owners

_OUTER = "outer_momentum"  # in a state
_log = logging.getLogger("dgc_horovod")


class LocalMethods:
    """Methods that an adapter puts over its own; never instantiated itself. See `LocalRounds` for what a round is.

    A learning-rate schedule counts inner steps, accumulated backward passes are one of them, and a step that a
    GradScaler skips counts: so every rank's round is full after as many steps of the script. Buffers of the model
    (batch norm) are each rank's own.
    """

    _dgc_below: type[ExchangeMethods]  # the adapter's methods
    _dgc_rounds: LocalRounds | None = None  # of a rank that takes part

    def _attach(self: Any, config: DGCConfig, update: LocalUpdate, grad_scaler: Any) -> None:
        self._dgc_below._attach(self, config, update, None)  # updates have no loss scale

    def _dgc_build(self: Any) -> None:
        self._dgc_below._dgc_build(self)
        if self._dgc_rounds is None:
            self._dgc_rounds = LocalRounds(self._dgc, self._dgc_config)
        self._dgc_rounds.go_on_in(self._dgc)
        at_end.watch(self._dgc.collectives.rank)

    def _register_hooks(self: Any) -> None:
        """No gradient is exchanged."""
        self._requires_update.update(p for group in self.param_groups for p in group["params"] if p.requires_grad)

    @property
    def _step_supports_amp_scaling(self: Any) -> bool:
        return True  # GradScaler then calls step() whether it skips or not, and leaves scale and verdict here

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        """A step of the user's optimizer on this rank alone; after the H-th, the exchange."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        takes_part = self._dgc_takes_part
        if takes_part:
            owners.check(self)
            if not self._dgc_rounds.begin_step():
                self._tell_once("weights set", WEIGHTS_SET)
        if self._dgc_may_step():
            self._dgc_with_hooks(lambda optimizer: optimizer._dgc_own_step())
        else:
            self._dgc_returned = None
        self._dgc_loaded = False
        if takes_part:
            clip_calls.end_step(self)  # it was the gradient's own
            if self._dgc_rounds.end_step():
                self.exchange()
        return self._dgc_returned if closure is None else loss

    def _dgc_may_step(self: Any) -> bool:
        """Whether a GradScaler lets the step be, and gradients are finite; they are unscaled then.

        Weights that are not finite would spoil what the model computes until the round is undone, and a running
        statistic for ever. Costs a read of every gradient.
        """
        found, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found is not None and float(found):
            return False
        if scale is not None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.div_(scale.to(p.grad.device))
        if found is not None:
            self.grad_scale = self.found_inf = None  # for an optimizer that would unscale by itself
        elif self._dgc_takes_part and self._dgc_config.on_nonfinite == "skip":
            grads = (p.grad for group in self.param_groups for p in group["params"] if p.grad is not None)
            if not all_finite(grad._values() if grad.is_sparse else grad for grad in grads):
                counts, spoilt = self._dgc.buckets.counts, not_finite_of(self._dgc.names)
                counts.left_out += 1
                if text := step_not_made(self._dgc.collectives.rank, counts.left_out, spoilt):
                    _log.warning("dgc_horovod: %s", text)
                return False
        return True

    def exchange(self: Any) -> None:
        """Exchange what the weights have changed by since the last time; every rank must call it, between two steps.

        Afterwards the weights are the same on every rank. ``step`` does it every ``local_steps`` steps. Right after an
        exchange it sends some more of what waits.
        """
        if not self._dgc_takes_part:
            return
        self._check_nothing_unfrozen()
        if self._dgc_membership is not None:
            self._dgc_membership.check(self)
        if not self._dgc_rounds.send():
            self._tell_once("weights set", WEIGHTS_SET)
        self._dgc_end_exchange()

    def _dgc_end_exchange(self: Any) -> None:
        finite = self._dgc_rounds.receive()
        if not self._dgc.buckets.ranks_in_join:  # which exchange nothing else
            self._dgc_replicas.begin(self._dgc.buckets.steps)
            self._dgc_replicas.end(self)  # now, as the next step makes them differ
        if not finite:
            self._dgc_clean_state()
            stop_if_skipped(self._dgc.buckets)
            self._tell_once(*of_skipped(self._dgc.buckets))

    def _dgc_clean_state(self: Any) -> None:
        """A rank whose weights were not finite has an inner state that would spoil them again.

        Of a parameter all of it: Adam's first moment is no good without the second, nor are its steps, by which empty
        moments would count as full ones.
        """
        for state in self.state.values():
            own = [x for x in state.values() if isinstance(x, torch.Tensor) and x.is_floating_point()]
            if not all(bool(torch.isfinite(x).all()) for x in own):
                for x in own:
                    x.zero_()
                if isinstance(state.get("step"), int):
                    state["step"] = 0

    def synchronize(self: Any) -> None:
        """Nothing: each rank's gradients are its own."""

    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        """As torch's."""
        super(type(self), self).zero_grad(*args, **kwargs)  # type: ignore[misc]

    def _dgc_forget(self: Any) -> None:
        self._dgc_below._dgc_forget(self)
        self._dgc_rounds.forget()

    def _dgc_check_between_steps(self: Any) -> None:
        if self._dgc_rounds.count:
            raise UnsupportedUse(MID_ROUND)

    def _dgc_finish_round(self: Any) -> None:
        if self._dgc_rounds.count:
            self.exchange()

    def _dgc_sees_clipping(self: Any, limit: float) -> None:
        """The script has clipped gradients, which is its own affair here, but not at the limit of dense training."""
        self._tell_once("clipping", clips_alone("the script", limit, self._dgc.collectives.workers))

    @property
    def _dgc_in_round(self: Any) -> bool:
        return self._dgc_takes_part and self._dgc_rounds.count > 0

    def _dgc_end_for_another(self: Any) -> None:
        if self._dgc_membership is None:  # each rank would begin anew with weights of its own
            self._dgc_rounds.send()
            self._dgc_end_exchange()

    def clear_residuals(self: Any) -> None:
        """Empty `e` and outer momentum, and begin a round with the weights that a script has set.

        Every rank calls it, between two steps, and has set them to the same.
        """
        if self._dgc_takes_part:
            self._dgc.buckets.clear()
            self._dgc.dense_residuals.clear()
            self._dgc_rounds.go_back()
            self._dgc_rounds.momentum.clear()

    def state_dict(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As the optimizer's own: the inner optimizer's state on this rank, and the outer momentum."""
        found: dict[str, Any] = self._dgc_below.state_dict(self, *args, **kwargs)
        if self._dgc_takes_part and self._dgc_config.outer_momentum:
            names = self._dgc.names
            found[_OUTER] = {names[p]: x for p, x in self._dgc_rounds.momentum.items()}
        return found

    def _dgc_outer(self: Any) -> dict[str, torch.Tensor]:
        names = self._dgc.names if self._dgc_config.outer_momentum else {}
        return {name: self._dgc_rounds.outer(p) for p, name in names.items()}

    def load_state_dict(self: Any, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """As the optimizer's own; what ranks have kept starts empty, and the round under way goes on.

        Raises:
            UnsupportedUse: the outer momentum is of other parameters.
        """
        if not self._dgc_takes_part:
            self._dgc_below.load_state_dict(self, state_dict, *args, **kwargs)
            return
        outer = self._dgc_check_state_dict(state_dict)
        of_name = {name: p for p, name in self._dgc.names.items()}
        inner = {key: x for key, x in state_dict.items() if key != _OUTER}
        self._dgc_below.load_state_dict(self, inner, *args, **kwargs)
        if not self._dgc_rounds.count:  # a step that has raised an error may have begun one
            self._dgc_rounds.go_back()
        for name, x in outer.items():
            p = of_name[name]
            self._dgc_rounds.momentum[p] = self._dgc_rounds.held(x.to(p))

    def _dgc_check_state_dict(self: Any, state_dict: dict[str, Any]) -> dict[str, torch.Tensor]:
        outer: dict[str, torch.Tensor] = state_dict.get(_OUTER, {}) if self._dgc_config.outer_momentum else {}
        if not isinstance(outer, dict) or not all(isinstance(x, torch.Tensor) for x in outer.values()):
            raise UnsupportedUse(f"{_OUTER} in the optimizer's state must be tensors by name, got {shown(outer)}")
        of_name = {name: p for p, name in self._dgc.names.items()}
        others = [name for name, x in outer.items() if name not in of_name or x.shape != of_name[name].shape]
        if others:
            raise UnsupportedUse(
                f"the outer momentum of {others[0]!r} is of no parameter here: pass the same named_parameters as when "
                "it was saved"
            )
        return outer

    def flush(self: Any) -> None:
        """Apply everything that the ranks have kept: an exchange of the round under way, then a dense one of `e`."""
        if self._dgc_takes_part:
            self._dgc_finish_round()
            self._dgc_below.flush(self)
