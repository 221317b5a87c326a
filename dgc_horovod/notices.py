"""Messages of an optimizer to the user, logged on rank 0."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from dgc_horovod import envvars
from dgc_horovod.core.bucketing import card_bytes, dense_values
from dgc_horovod.core.ending import IN_A_ROW, LEFT_OUT, TRIED_AGAIN, WEIGHTS
from dgc_horovod.core.optimizer_exchange import OptimizerExchange
from dgc_horovod.errors import NotFinite
from dgc_horovod.stats import ExchangeStats, size

_log = logging.getLogger("dgc_horovod")

ADAM_DIRECTIONS = (
    "on compressed tensors Adam runs with beta1 = 0, because the residual has the effect of momentum already, and with "
    "a second moment by rows and columns that all ranks share (docs/tuning.md#adam-and-adamw)"
)
ADAM_AFTER = (
    "this method gives Adam the exchanged update, which comes in bursts and costs quality; method dgc loses less "
    "(docs/tuning.md#adam-and-adamw)"
)
NO_RATE = (
    "{name} finds its learning rate from the gradients, and compressed gradients arrive in rare bursts: it MAY NOT "
    "LEARN AT ALL, as in our trials (docs/tuning.md#by-optimizer). Use SGD, Adam or AdamW with a learning rate, or "
    "compression none or fp16"
)
LEARNS_LESS = (
    "{name} learned less from compressed gradients in our trials, also at the best learning rate and without momentum "
    "(docs/tuning.md#by-optimizer). Use AdamW, or compression none or fp16"
)
_TRIED = {  # how the names of classes begin, of torch, Keras, prodigyopt, dadaptation and others
    ("Prodigy", "DAdapt"): NO_RATE,
    ("Lion", "Muon"): LEARNS_LESS,
}
MID_ROUND = (
    "the ranks' weights differ between two exchanges of local steps: call optimizer.exchange() on every rank first"
)
WEIGHTS_SET = (
    "weights were changed within a round of local steps, and not by the optimizer. This is correct if the script clips "
    "or normalizes them. If it set others, such as its best ones, they count as a change by this rank, of which only a "
    "small part is sent at once: call optimizer.clear_residuals() on every rank after all have set the same weights"
)
LOOKS = 10  # first steps after which the weights are checked, if the arithmetic of the optimizer is not known
_TOO_LARGE = {
    LEFT_OUT: "{what}: an update was too large for its parameter's dtype, or for float32, though every gradient was "
    f"finite; every rank drops it, and after {IN_A_ROW} such steps in a row the whole residual. Lower the loss scale "
    "or the learning rate, pass clip_norm, or keep the parameters in float32",
    TRIED_AGAIN: "{what}: an update times the loss scale was too large for its parameter's dtype, or for float32, "
    "though every gradient was finite; every rank skips the step, and the update is sent again while the loss scale "
    "falls",
}
OF_A_TAPE = (
    "; a tape applies nothing: it returns NaN, on every rank, and the script must skip the step "
    "(tf.math.is_finite), otherwise the weights become NaN"
)
AUTO_IN_ELASTIC = "under Horovod Elastic the number of ranks changes, but auto measures for one number"
NOT_ALL_RANKS = "under Horovod Elastic an optimizer works with all ranks; leave process_set out"


def refusal(what: str, instead: str) -> str:
    """Return the error text for an option that momentum correction does not support."""
    return (
        f"{what} cannot be combined with momentum correction; use {instead}, or a compression without momentum "
        "correction, such as Compression.topk(...), or dgcrun --compression topk"
    )


def of_other(optimizer: type, corrects: bool) -> list[str]:
    """Return the notices for an optimizer whose arithmetic cannot be split.

    Args:
        optimizer: class of the optimizer.
        corrects: whether momentum correction was asked for.
    """
    name = optimizer.__name__
    for names, notice in _TRIED.items():
        if any(base.__name__.startswith(names) for base in optimizer.__mro__):
            return [notice.format(name=name)]
    if not corrects:
        return []
    runs = f"momentum correction supports SGD, Adam and AdamW; {name} runs with plain error feedback"
    return [f"{runs}, which may cost quality (docs/algorithm.md)"]


def not_finite(number: int, where: str, rounds: bool = False) -> str:
    """Return the message on a skipped step, or exchange of local steps.

    Args:
        number: its number, from 0.
        where: see `Ending.where`.
        rounds: whether it is an exchange of local steps.
    """
    what = f"{'exchange' if rounds else 'step'} {number}"
    if where in _TOO_LARGE:
        return _TOO_LARGE[where].format(what=what)
    if rounds:
        return f"{what}: a weight was not finite on {where}; every rank rolls the round back"
    if where.startswith(WEIGHTS):
        return (
            f"{what}: {where} are not finite, and so gradients are not; every rank skips this step and all others "
            "until the weights are finite: lower the learning rate, and continue from a checkpoint"
        )
    return f"{what}: a gradient was not finite on {where}; every rank skips the step"


def of_skipped(exchange: OptimizerExchange) -> tuple[str, str]:
    """Return the message on the last step, or exchange of local steps, which all ranks have skipped.

    Returns:
        A key under which it is logged once: one for each kind of reason, and for 10, 100, 1,000, ... skips; the text.
    """
    counts, rounds = exchange.counts, exchange.config.exchanges_weights
    text = not_finite(exchange.steps - 1, exchange.ending.where(), rounds)
    if not is_round(counts.skipped):
        return ("too large" if exchange.ending.leaves_out else "not finite"), text
    steps, what = counts.steps - counts.before_skips, "exchanges" if rounds else "steps"
    return f"{counts.skipped} skipped", f"{text}; skipped {counts.skipped:,} of the last {steps:,} {what}"


def is_round(count: int) -> bool:
    """Whether it is 10, 100, 1,000, ..., at which a repeated warning is logged again."""
    return count > 1 and str(count).rstrip("0") == "1"


def stop_if_skipped(exchange: OptimizerExchange) -> None:
    """Raise NotFinite after a skipped step if the job is to stop; on every rank, as all skip the same steps.

    Not for steps with a loss scale: scalers find the largest one by such steps.
    """
    config, in_a_row = exchange.config, exchange.counts.skipped_in_a_row
    if config.on_nonfinite == "stop":
        raise NotFinite(of_skipped(exchange)[1])
    if 0 < config.max_skipped <= in_a_row:
        raise NotFinite(
            f"{of_skipped(exchange)[1]}. {in_a_row:,} in a row were skipped, without a change of any weight, so every "
            "rank stops. Check data and loss of the rank that is named; max_skipped (--dgc-max-skipped) sets the "
            "limit, 0: none"
        )


def made_not_finite(step: int, name: str, optimizer: str) -> str:
    """Return the error text for an optimizer that made weights not finite in this step (from 0) or the one before."""
    return (
        f"step {step}: {optimizer} has made {WEIGHTS}{name!r} that are not finite, though every gradient was: "
        "compressed updates are bursts with zeros between them, which not every optimizer tolerates. Use SGD, Adam or "
        "AdamW, local steps (Compression.local), which give the optimizer plain gradients, or no compression"
    )


def clips_alone(who: str, limit: float, workers: int) -> str:
    """Return the notice on clipping by `who`, the script or its optimizer, with local steps."""
    return (
        f"{who} clips to {limit:g}. With local steps that is each rank's own gradient, noisier than the average: a "
        f"limit of {limit:g} in dense training corresponds to sqrt(N)*{limit:g} = "
        f"{math.sqrt(workers) * limit:.3g} here (docs/internet.md#steps)"
    )


def clips_locally(what: str, limit: float, averages: bool) -> str:
    """Return the notice on clipping, `what`, by the script or its optimizer, which becomes local clipping."""
    factor = "sqrt(N)" if averages else "1/sqrt(N)"
    return (
        f"{what} clips each rank's own gradient before it is compressed (DGC 3.1), at {factor} times {limit:g}; the "
        "exchanged update is not clipped. To set another norm, pass clip_norm=c to the compression (dgcrun: "
        "--dgc-clip-norm c)"
    )


def clips_already(given: float, what: str) -> str:
    """Return the notice on other clipping, `what`, beside ``clip_norm``, which is `given`."""
    return f"clip_norm={given:g} of the compression is used; {what} has no effect"


def leave_out(counts: ExchangeStats, rank: int, spoilt: str) -> None:
    """Count a local step that this rank skips because its own gradient is not finite; log some of them.

    Args:
        counts: counters of the exchange.
        rank: index of this rank.
        spoilt: name of weights that were not finite; "" if all were.
    """
    counts.left_out += 1
    count = counts.left_out
    text = f"a gradient was not finite on rank {rank}, which skips the step; it counts as one of its local steps"
    if spoilt:
        text = (
            f"{WEIGHTS}{spoilt!r} are not finite on rank {rank}, and so gradients are not; it skips such steps, which "
            "count as local steps"
        )
    if count == 1 or is_round(count):
        _log.warning("dgc_horovod: %s%s", text, f"; {count:,} steps so far" if count > 1 else "")


def timed_out(rank: int, workers: int, what: str, seconds: float) -> str:
    """Return the error text for a collective, `what`, that did not end in time."""
    return (
        f"rank {rank} of {workers} waited {seconds:g} s for {what}: another rank has stopped, has fewer steps or "
        "epochs (unequal shards?), is in a callback that only some ranks have, did not make this "
        f"step, is in another epoch of the warm-up, or runs without compression. {envvars.TIMEOUT.name} sets the limit"
    )


def lost(rank: int, workers: int, what: str, reason: str) -> str:
    """Return the error text for a collective, `what`, that failed as another rank ended; `reason`: the library's."""
    return f"rank {rank} of {workers}: {what} has failed, as another rank has ended or stopped with an error ({reason})"


def going_back(error: BaseException | None) -> None:
    """Log why an elastic job goes back to its last commit, which Horovod does not."""
    if error is None:  # the script has asked for it
        return
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    # TensorFlow puts the reason among the names of its operations and counts of errors
    told = [line for line in lines if " " in line and not line.startswith("[[") and "derived errors" not in line]
    reason = told[-1] if told else lines[-1]
    _log.warning("dgc_horovod: going back to the last commit: %s", reason.split(". ")[0])


def describe(exchange: OptimizerExchange, notices: Sequence[str] = ()) -> None:
    """Log which tensors are compressed, at most one recommendation, and `notices` of the optimizer.

    From now on INFO is shown on stderr, unless the program has set up logging itself.
    """
    if not _log.handlers and not logging.getLogger().handlers:
        _log.addHandler(logging.StreamHandler())
        _log.setLevel(logging.INFO)
    config, numel, place = exchange.config, exchange.numel, exchange.topology
    sparse = [bucket for bucket in exchange.layout.buckets if not bucket.uncompressed]
    whole = [name for name in numel if name not in exchange.compressed]
    trial = "auto: starts with the uncompressed exchange, then tries: " if config.automatic else ""
    compressed = f"{len(numel) - len(whole)} tensors compressed in {len(sparse)} bucket{'s' * (len(sparse) != 1)}"
    share = 100 * sum(numel[name] for name in whole) / max(1, sum(numel.values()))
    text = (
        f"{trial}{config.rule}, density {config.density:g}: {compressed}, values {config.values}; "
        f"{len(whole)} small ones with {share:.3g}% of all elements are sent dense, values "
        f"{dense_values(config, place.nodes)}{_who(exchange)}"
    )
    _log.info("dgc_horovod: %s", text)
    if config.max_bytes_per_step is not None and exchange.workers > 1:
        _tell_budget(exchange, config.max_bytes_per_step)
    for notice in notices if sparse else ():
        _log.warning("dgc_horovod: %s", notice)
    _log.debug("dgc_horovod: sent dense: %s", ", ".join(whole))
    if envvars.horovod_autotune():
        text = "HOROVOD_AUTOTUNE toggles the response cache, on which small messages depend; unset it"
        _log.warning("dgc_horovod: %s", text)
    if not sparse:
        text = f"NOTHING IS COMPRESSED: every tensor is 1-D or smaller than min_numel={config.min_numel}"
        _log.warning("dgc_horovod: %s", text)
    elif (
        config.momentum_correction
        and config.warmup is None
        and config.density < 0.01
        and not config.automatic
        and ADAM_DIRECTIONS not in notices  # Adam needs none
    ):
        _log.warning(
            "dgc_horovod: density warm-up is off; the DGC paper warms up over 4 epochs: "
            "warmup=WarmupSchedule(epochs=4, steps_per_epoch=...), or --dgc-warmup-steps N with dgcrun"
        )


# Why the uncompressed exchange stays
JOINED = "a rank has called hvd.join() before a choice was made"
SPARSE = "there are sparse gradients, which compression would make dense"
SEVERAL = "the set of trained variables has changed"


def tell_stock(why: str, stock: str) -> None:
    """Warn that a job of compression auto cannot be compressed, and why."""
    _log.warning("dgc_horovod: auto: %s stays, because compression is not possible: %s", stock, why)


def _who(exchange: OptimizerExchange) -> str:
    """Describe which workers exchange packets; "" if every worker does so with every other."""
    place, density = exchange.topology, exchange.config.density
    owned = any(engine.spec(density).exchange.keeps_remainder for engine in exchange.engines)
    nodes = f"; {place.nodes} nodes of {place.node_size}" if place.node_size > 1 else ""
    if owned:
        return f"{nodes}; sharded: every element has a shard owner"
    if not exchange.config.shards:
        return nodes
    return f"{nodes}; not sharded: with {place.nodes} senders, shard owners would add bytes"


def _tell_budget(exchange: OptimizerExchange, budget: int) -> None:
    density, found = exchange.config.density, card_bytes(exchange.specs, exchange.config, exchange.topology)
    if found <= budget:
        sizes = map(size, (found, budget))
        _log.info("dgc_horovod: a network card receives %s a step, budget %s, at density %g", *sizes, density)
        return
    _log.warning(
        "dgc_horovod: a network card receives %s a step, above the budget of %s: density %g, which sends an element "
        "once in %.0f steps, is the lowest allowed, and small tensors are always sent dense",
        *map(size, (found, budget)), density, 1 / density,
    )  # fmt: skip
