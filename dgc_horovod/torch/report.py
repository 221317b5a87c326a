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
CLIPPED_UPDATE = (
    "p.grad was changed between synchronize() and step(). After compression it is an update that arrives in bursts, "
    "and what is clipped off it is lost; pass clip_norm=c to the compression instead (dgcrun: --dgc-clip-norm c)"
)
