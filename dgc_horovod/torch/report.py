"""What an optimizer tells the user of itself, on rank 0."""

from __future__ import annotations

import logging

from dgc_horovod import envvars
from dgc_horovod.bucket import dense_values
from dgc_horovod.torch.exchange import GradientExchange

_log = logging.getLogger("dgc_horovod")


def _make_visible() -> None:
    """Show INFO on stderr, unless the program has set up logging itself."""
    if not _log.handlers and not logging.getLogger().handlers:
        _log.addHandler(logging.StreamHandler())
        _log.setLevel(logging.INFO)


NOT_FINITE = "a gradient was not finite on some rank; that step is applied on no rank"
LATE_CHANGE = (
    "p.grad was changed between backward() and synchronize(), when it had been taken already; the change has no "
    "effect. To clip, pass clip_norm=c to the compression"
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
    "and what is clipped off it is lost; pass clip_norm=c to the compression instead"
)


def describe(exchange: GradientExchange) -> None:
    """What is compressed and what is not, and the one recommendation."""
    _make_visible()
    config, layout = exchange.config, exchange.layout
    sparse = [bucket for bucket in layout.buckets if not bucket.whole]
    dense, total = (sum(p.numel() for p in those) for those in (exchange.dense, exchange.names))
    _log.info(
        "dgc_horovod: %s, density %g: %d tensors compressed in %d buckets, values %s; %d small ones with %.2g%% of all "
        "elements are sent whole, values %s",
        config.rule,
        config.final_density,
        len(exchange.compressed),
        len(sparse),
        config.values,
        len(exchange.dense),
        100 * dense / max(1, total),
        dense_values(config, exchange.collectives.workers),
    )
    _log.debug("dgc_horovod: sent whole: %s", ", ".join(exchange.names[p] for p in exchange.dense))
    if envvars.horovod_autotune():
        _log.warning(
            "dgc_horovod: HOROVOD_AUTOTUNE toggles the response cache, on which small messages depend; unset it"
        )
    if not sparse:
        _log.warning(
            "dgc_horovod: NOTHING IS COMPRESSED: every tensor is 1-D or smaller than min_numel=%d", config.min_numel
        )
    elif config.momentum_correction and config.warmup is None and config.density < 0.01:
        _log.warning(
            "dgc_horovod: density warm-up is off; the DGC paper warms up over 4 epochs: "
            "warmup=WarmupSchedule(epochs=4, steps_per_epoch=...)"
        )
