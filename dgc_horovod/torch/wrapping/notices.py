"""What the torch optimizer says to a script that does something else than it may think."""

from __future__ import annotations

LATE_CHANGE = (
    "p.grad was changed between backward() and synchronize(), when it had been taken already; the change has no "
    "effect. To clip, pass clip_norm=c to the compression (dgcrun: --dgc-clip-norm c)"
)
UNSCALED_TOO_EARLY = (
    "GradScaler.unscale_ or step() ran before the gradients were synchronized. Call optimizer.synchronize() before "
    "scaler.unscale_(optimizer) and scaler.step(optimizer), the latter inside `with optimizer.skip_synchronize():`"
)
SCALER_NOT_PASSED = (
    "a GradScaler drives this optimizer, which does not know its scale, so residuals of different scales would be "
    "added up; pass grad_scaler=scaler to DistributedOptimizer"
)
SCALER_LEFT_OUT = (
    "step() without the GradScaler that was passed as grad_scaler: gradients would be divided by its scale, which they "
    "do not have. Call scaler.step(optimizer); to go on without it, scale every loss by one that is not enabled"
)
CHANGED_UPDATE = (
    "the script changed p.grad between synchronize() and step(), by other means than clip_grad_norm_ and "
    "clip_grad_value_ of torch.nn.utils. After compression it is an update that arrives in bursts, and what is clipped "
    "off it is lost. To clip, pass clip_norm=c to the compression (dgcrun: --dgc-clip-norm c), or call "
    "clip_grad_norm_, and take the script's own clipping away"
)
TAKEN_AWAY = (
    "the script has set the gradient of {name!r} to None between backward() and step(): its update is left out, and "
    "what waits of it and its momentum are dropped, else they would come in a burst later on"
)
DROPPED = (
    "zero_grad() has dropped an update that was not applied. Its gradients have entered the momentum, and a "
    "part of them comes with later updates. To keep gradients that are too large out, limit them before they are "
    "exchanged (clip_norm=c); keep a backward pass that is not this model's away from it (detach(), or "
    "requires_grad_(False) meanwhile)"
)
ADDED_TO_UPDATE = (
    "backward() was called between synchronize() and step(): its gradient was added to an update, which has been "
    "through the exchange and the momentum, and would go through them once more. Sum all backward passes of a step "
    "before they are exchanged (backward_passes_per_step), or call step() after each; to give the update up, call "
    "optimizer.zero_grad() before backward()"
)
SUPERSEDED = (
    "parameters of this DistributedOptimizer have been wrapped by another one since, which has their gradients now; "
    "step that one. Two optimizers over one model: give each its own parameters, or step them both inside one torch "
    "optimizer with two parameter groups"
)
STEPPED_TWICE = (
    "step() was called again with no backward pass and no zero_grad() since the last one; p.grad still holds the "
    "update that has been applied. Call backward() first"
)
STEPPED_INSIDE = (
    "{outer} was given to register() or DistributedOptimizer(), and {inner}, which it has as .{name}, was stepped "
    "outside of {outer}.step(). Checks for gradients that are not finite and for equal replicas, and local steps, are "
    "part of step(), and were left out. Give it optimizer.{name} instead; with Horovod, put what is returned back there"
)
STEPPED_OTHERWISE = (
    "{optimizer} has applied an update without step() (its other methods: {methods}), or the script has written to all "
    "weights. Checks for gradients that are not finite and for equal replicas are part of step(), and were left out. "
    "Call step(), or use an optimizer whose step() makes the update. A script that drops the update, and writes to "
    "weights (clamp_, load_state_dict), calls optimizer.zero_grad() between the two"
)
LATE_HOOK = (
    "register_post_accumulate_grad_hook() was called after the optimizer had been wrapped: that hook runs when the "
    "exchange may have taken the gradient, and what it changes may take no part. Register it before wrapping"
)
ADDED_LATER = (
    "a parameter of shape {shape} was added to the torch optimizer after it had been wrapped: the ranks have already "
    "agreed on names and buckets. Add the group first, then wrap"
)
LOADED_TWICE = (
    "a second load_state_dict() without a step after the first has emptied what load_checkpoint() had brought of u and "
    "v. accelerator.prepare(optimizer) does so: call load_checkpoint() after it"
)
SYNCHRONIZED_TWICE = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). The second "
    "synchronization does nothing; put step() inside `with optimizer.skip_synchronize():`"
)


def clipping_learned(limit: float, elements: bool = False) -> str:
    """What is said of a script that clips by itself, once it is done locally instead."""
    return (
        f"the script clips {'the elements of ' if elements else ''}gradients to {limit:g}. From the next step on each "
        f"rank clips its own gradient, to sqrt(N)*{limit:g}, before it enters the momentum (DGC 3.1), and the script's "
        "clipping of what comes back is left out. clip_norm=c, or --dgc-clip-norm c with dgcrun, sets another norm"
    )


def clipping_left_out(limit: float, given: float) -> str:
    """What is said of a script that clips to another norm than it was given."""
    return (
        f"the script clips gradients to {limit:g}; clip_norm={given:g} holds instead, for each rank's own gradient, "
        "and the script's clipping is left out"
    )
