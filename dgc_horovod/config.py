"""The settings of one optimizer and of its warm-up: frozen records, validated once, the same for every framework.

The density of a step follows from them by pure functions; the clock belongs to the caller.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, SupportsInt

from dgc_horovod import settings
from dgc_horovod.errors import ConfigError, UnsupportedUse, unknown
from dgc_horovod.settings import FRACTION, POSITIVE, RUNNING, SIZE, SWITCH, WHAT, WHEN, WIRE, choice, setting, whole
from dgc_horovod.wire.codecs import VALUE_CODECS


def _no_warmup(name: str, value: object) -> str:
    return "; for no warm-up pass warmup=None (dgcrun: --dgc-warmup-steps none)"


@dataclass(frozen=True, kw_only=True)
class WarmupSchedule:
    """Exponential density warm-up: ``first_density * factor**stage`` until the final density is reached.

    DGC, section 3.3: sparsity 75%, 93.75%, 98.4375%, 99.6%, then 99.9%. The warm-up is divided into as
    many equal stages as the geometric row has members above the final density (four for 0.001), so
    ``WarmupSchedule(epochs=4)`` lowers the density once an epoch, as in the paper.

    Args:
        steps: length in optimizer steps (with local steps: exchanges), >= 1. Give either this or `epochs`.
        epochs: length in epochs, > 0. The epoch is computed from `steps_per_epoch` where that is given,
            otherwise observed (``DistributedSampler.set_epoch``, ``optimizer.set_epoch``).
        steps_per_epoch: optimizer steps (with local steps: exchanges) in an epoch, >= 1; only with `epochs`.
            Where the epoch is observed instead, the density changes at the start of an epoch only.
        first_density: density of the first stage, in (0, 1]; a final density at or above it needs no warm-up.
        factor: ratio of the densities of one stage and the stage before, in (0, 1).
    """

    steps: int | None = setting(
        None, "length of the warm-up in steps (local steps: exchanges), >= 1", whole(1, _no_warmup), WHEN
    )
    epochs: float | None = setting(
        None, "the same in epochs, > 0 (4 in the paper)",
        settings.in_range("a number above 0", lambda value: value > 0, _no_warmup), WHEN,
    )  # fmt: skip
    steps_per_epoch: int | None = setting(
        None, "steps in an epoch, if the epoch cannot be observed", whole(1, _no_warmup), WHEN
    )
    first_density: float = setting(0.25, "density that the warm-up begins with, in (0, 1]", FRACTION, WHEN)
    factor: float = setting(
        0.25, "density of a warm-up stage over the one before, in (0, 1)",
        settings.in_range("in (0, 1)", lambda value: 0 < value < 1), WHEN,
    )  # fmt: skip

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise ConfigError(
                f"WarmupSchedule takes either steps or epochs, got steps={self.steps} and epochs={self.epochs}; "
                "e.g. WarmupSchedule(epochs=4, steps_per_epoch=390)"
            )
        settings.normalise(self, "WarmupSchedule: ")
        if self.steps_per_epoch is not None and self.epochs is None:
            raise ConfigError(
                "WarmupSchedule: steps_per_epoch goes with epochs, not with steps; drop it or give epochs"
            )

    @property
    def needs_epoch(self) -> bool:
        """Whether the epoch must be given from outside, because it cannot be computed from the step."""
        return self.epochs is not None and self.steps_per_epoch is None

    def stages(self, final_density: float) -> int:
        """Return the number of densities of the geometric row above `final_density` (0: nothing to warm up)."""
        if self.first_density <= final_density:
            return 0
        return math.ceil(math.log(final_density / self.first_density) / math.log(self.factor) - 1e-9)

    def fraction_done(self, step: int, epoch: int | None) -> float:
        """Return the fraction of the warm-up that is done before `step`: 0 at its start, >= 1 after its end."""
        if self.steps is not None:
            return step / self.steps
        assert self.epochs is not None
        if self.steps_per_epoch is not None:
            return step / self.steps_per_epoch / self.epochs
        if epoch is None:
            raise ConfigError(
                "the warm-up is given in epochs but the epoch is not known: pass steps_per_epoch to WarmupSchedule, "
                "or call DistributedSampler.set_epoch / optimizer.set_epoch before the first step of each epoch "
                "(in Keras BroadcastGlobalVariablesCallback does), or give the warm-up in steps "
                "(dgcrun: --dgc-warmup-steps, or --dgc-warmup-steps-per-epoch beside the epochs)"
            )
        return epoch / self.epochs


def densities(final_density: float, warmup: WarmupSchedule | None) -> set[float]:
    """Return all densities of a run, see `density_at`."""
    if warmup is None:
        return {final_density}
    row = (warmup.first_density * warmup.factor**stage for stage in range(warmup.stages(final_density)))
    return {final_density, *(max(final_density, density) for density in row)}


def whole_epoch(epoch: SupportsInt) -> int:
    """Convert an epoch that a script has set to an int; whole floats and NumPy integers are allowed.

    Raises:
        ConfigError: `epoch` is not a whole number.
    """
    with suppress(TypeError, ValueError, OverflowError):
        if int(epoch) == epoch:  # not true of texts
            return int(epoch)
    raise ConfigError(f"the epoch must be a whole number, got {epoch!r}")


def density_at(final_density: float, warmup: WarmupSchedule | None, step: int, epoch: int | None = None) -> float:
    """Density of optimizer step `step` (from 0).

    Args:
        final_density: density after the warm-up, in (0, 1].
        warmup: the schedule, or None for no warm-up.
        step: optimizer steps finished so far, >= 0.
        epoch: current epoch from 0, where it is known from outside.

    Returns:
        A density in [final_density, 1].

    Raises:
        ConfigError: the schedule needs an epoch and `epoch` is None.
    """
    if warmup is None:
        return final_density
    stages = warmup.stages(final_density)
    stage = int(warmup.fraction_done(step, epoch) * stages + 1e-9)  # at a boundary the product may be a little less
    if stage >= stages:
        return final_density
    return max(final_density, warmup.first_density * warmup.factor ** max(0, stage))


@dataclass(frozen=True)
class Rule:
    """A selection rule (its function is in ``core/selection.py``) and its needs of the pass over the bucket.

    Args:
        needs_sums: whether it looks at mean and deviation.
        on_device: whether the kernels of a device can make the whole selection.
        min_fraction: fraction of k that it sends at least, where so many elements are not zero, in [0, 1].
    """

    needs_sums: bool = False
    on_device: bool = False
    min_fraction: float = 1.0


RULES: dict[str, Rule] = {
    "exact": Rule(on_device=True),
    "sampled": Rule(min_fraction=0.8),
    "gaussian": Rule(needs_sums=True, min_fraction=0.8),
}
DENSE_VALUES = ("auto", "fp32", "fp16", "bf16", "8bit")
AUTO, FLAT, HIERARCHICAL, SHARDED = "auto", "flat", "hierarchical", "sharded"
EXCHANGES = (AUTO, FLAT, SHARDED, HIERARCHICAL, f"{HIERARCHICAL}+{SHARDED}")
_MOMENTUM = settings.in_range("in [0, 1)", lambda value: 0 <= value < 1)
_A_WARMUP = settings.Kind(
    "", "", str, "a WarmupSchedule, e.g. WarmupSchedule(steps=2000),",
    lambda value: isinstance(value, WarmupSchedule), lambda value: value,
)  # fmt: skip


@dataclass(frozen=True)
class DGCConfig:
    """Settings of one compressed optimizer. Unlisted names and values out of range raise ConfigError.

    Args:
        density: fraction of elements sent each step, in (0, 1]; a lower one sends less, and elements wait longer.
        rule: selection rule: exact (top-k), sampled (threshold from a 1% sample), gaussian (threshold
            from mean and deviation).
        momentum_correction: whether momentum is accumulated locally, before selection (DGC section 3.1). With Adam and
            AdamW, whether gradients are divided by the second moment there; other optimizers have no such form.
        factor_masking: whether momentum is cleared where an element was sent (DGC section 3.2). Meant for densities of
            2% and less: where much is sent, it takes the momentum away.
        clip_norm: L2 norm c at which the averaged whole-model gradient would be clipped, > 0; each rank
            clips its own to sqrt(N)*c before it enters the momentum. None: no clipping.
        warmup: schedule of the density warm-up; None: no warm-up.
        values: number format of sent values: fp32, fp16, bf16, 8bit, 4bit or 2bit; fewer bits send less, and what
            rounding drops stays in the residual.
        dense_values: number format of the tensors that are not compressed (1-D, small): fp32, fp16 by allreduce;
            bf16, 8bit by allgather, with a residual of their own; auto: 8bit up to 4 workers, fp32 beyond.
        exchange: algorithm: "flat": every worker exchanges packets with every other; "sharded": every worker with the
            shard owners, who send the largest sums on; "hierarchical": the workers of a node average their gradients
            densely, then each exchanges its slice with the other nodes; "hierarchical+sharded": the same with shard
            owners among the nodes; "auto": hierarchical where the process sets of nodes are declared and it saves the
            network cards more than it costs, else flat; with shard owners where 32 or more senders would exceed
            `max_bytes_per_step`.
        node_size: number of workers of a node, >= 1; None: those on one host.
        max_bytes_per_step: most bytes that a network card receives in a step after the warm-up, >= 1: the density is
            lowered until they suffice, not below 0.0001; None: no limit.
        automatic: whether the job begins with stock Horovod's exchange, and takes the faster by its own clock: that, or
            this compression.
        total_steps: number of steps of the run, >= 1, where it is known: ``automatic`` takes the density from it.
        local_steps: number of the optimizer's steps on each rank alone from one exchange to the next, H >= 1; the ranks
            then exchange the change of the weights. None: gradients are exchanged at every step.
        local_decay: with local steps, factor of the residual at each exchange, in (0, 1].
        outer_rate: with local steps, factor of the mean change, > 0.
        outer_momentum: with local steps, Nesterov momentum of the mean change, in [0, 1).
        offload: PyTorch, with local steps: whether the residual, the weights of the last exchange and the outer
            momentum are in host memory, and changes are compressed there, if the model is on a GPU.
        min_numel: number of elements below which a tensor is exchanged densely, >= 1.
        compress_1d: whether 1-D tensors (bias, norm) are compressed too; they are few and sensitive.
        bucket_bytes: most gradient bytes (fp32) that share one message, >= 1; fewer start earlier, in more messages.
        seed: seed of the rules that draw at random, >= 0.
        check_every: steps (with local steps: exchanges) between two comparisons of the ranks' weights, >= 0, each of
            at most 16 MiB of them (or one tensor), in turn; 0: never.
        on_mismatch: action where they differ: "stop": ReplicaMismatch on every rank; "broadcast": all go on with
            weights and optimizer state of the first rank.
        on_nonfinite: action where a gradient is NaN or infinite on some rank and there is no loss scaling: "skip"
            the step, on every rank; "stop": NotFinite on every rank.
        max_skipped: number of steps (with local steps: exchanges) in a row that are skipped without loss scaling, after
            which every rank raises NotFinite, >= 0; 0: any number.
    """

    # what is sent
    density: float = setting(0.001, "fraction of elements sent, in (0, 1]", FRACTION, WHAT, flag="--density")
    rule: str = setting("exact", "selection rule", choice(RULES), WHAT, by_method=True)
    momentum_correction: bool = setting(True, "momentum goes before selection (DGC 3.1)", SWITCH, WHAT, by_method=True)
    factor_masking: bool = setting(
        True, "momentum is cleared where an element was sent (DGC 3.2)", SWITCH, WHAT, by_method=True
    )
    clip_norm: float | None = setting(None, "L2 norm to clip the averaged gradient at, > 0", POSITIVE, WHAT)
    # over the run
    automatic: bool = setting(False, "", SWITCH, strategy=AUTO)
    total_steps: int | None = setting(
        None, "steps of the run: method auto takes the density from it", whole(1), WHEN, method=AUTO
    )
    warmup: WarmupSchedule | None = setting(None, "", _A_WARMUP)  # noqa: RUF009
    local_steps: int | None = setting(
        None, "local steps: steps of each rank between two exchanges", whole(1), WHEN, strategy="local"
    )
    local_decay: float = setting(
        0.95, "local steps: factor of the residual at each exchange, in (0, 1]", FRACTION, WHEN, method="local"
    )
    outer_rate: float = setting(1.0, "local steps: factor of the mean change, > 0", POSITIVE, WHEN, method="local")
    outer_momentum: float = setting(0.0, "local steps: Nesterov momentum, in [0, 1)", _MOMENTUM, WHEN, method="local")
    offload: bool = setting(
        False, "local steps, PyTorch: residual and last weights lie in host memory", SWITCH, WHEN, method="local"
    )
    # how it travels
    values: str = setting("bf16", "number format sent", choice(VALUE_CODECS), WIRE)
    dense_values: str = setting("auto", "number format of small tensors, sent dense", choice(DENSE_VALUES), WIRE)
    exchange: str = setting("flat", "algorithm", choice(EXCHANGES), WIRE)
    node_size: int | None = setting(
        None, "workers of a node, averaged densely; not given: those of a host", whole(1), WIRE
    )
    max_bytes_per_step: int | None = setting(
        None, "most that a network card receives a step: lowers the density", SIZE, WIRE, flag="--dgc-budget"
    )
    min_numel: int = setting(1024, "tensors of fewer elements are sent dense, >= 1", whole(1), WIRE)
    compress_1d: bool = setting(False, "compress biases and norms too", SWITCH, WIRE)
    bucket_bytes: int = setting(64 * 2**20, "bytes of gradient that are exchanged together, >= 1", whole(1), WIRE)
    seed: int = setting(0, "seed of rule sampled, >= 0", whole(0), WIRE)
    # running
    check_every: int = setting(100, "steps between comparisons of the ranks' weights, 0: never", whole(0), RUNNING)
    on_mismatch: str = setting("stop", "if the ranks' weights differ", choice(("stop", "broadcast")), RUNNING)
    on_nonfinite: str = setting("skip", "if a gradient is NaN or infinite", choice(("skip", "stop")), RUNNING)
    max_skipped: int = setting(100, "steps skipped in a row before every rank stops, 0: never", whole(0), RUNNING)

    def __post_init__(self) -> None:
        settings.normalise(self)
        local = self.local_steps is not None
        if self.automatic and self.warmup is not None:
            raise ConfigError(
                "warmup goes with an exchange that is compressed from the beginning, and automatic begins with stock "
                "Horovod's; drop one of them"
            )
        for row in (row for row in settings.rows_of(self) if getattr(self, row.field) != row.default):
            if row.strategy not in ("", self.strategy):
                raise ConfigError(f"{row.field}={getattr(self, row.field)} does not go with {self.strategy}: drop one")
            if row.method not in ("", self.strategy):
                raise ConfigError(f"{row.field} goes with Compression.{row.method}(...), or --compression {row.method}")
        if local and (self.momentum_correction or self.clip_norm is not None or self.may_use_nodes):
            raise ConfigError(
                "local steps leave momentum and clipping to the optimizer and the script, and nodes to exchange='flat' "
                "or 'sharded': use Compression.local(...), or --compression local, without clip_norm"
            )

    @property
    def strategy(self) -> str:
        """Strategy that a setting selects; "": gradients are exchanged at every step."""
        return next((row.strategy for row in settings.rows_of(self) if row.strategy and getattr(self, row.field)), "")

    @property
    def sends_all(self) -> bool:
        """Whether every element is sent at every step."""
        return self.density == 1.0 and self.warmup is None

    @property
    def exchanges_weights(self) -> bool:
        """Whether the ranks exchange changes of weights, after local steps, and not gradients."""
        return self.local_steps is not None

    def check_reduction(self, averages: bool) -> None:
        """Raise UnsupportedUse where the script asks for a sum over the ranks, and weights are averaged."""
        if self.exchanges_weights and not averages:
            raise UnsupportedUse("local steps average the ranks' changes: pass op=hvd.Average, or average=True")

    @property
    def begins_dense(self) -> bool:
        """Whether every element is sent at the first step, whatever the budget."""
        first = self.warmup.first_density if self.warmup is not None else 0
        whole = self.density == 1 and self.max_bytes_per_step is None
        return first == 1 or whole or self.automatic

    @property
    def shards(self) -> bool:
        """Whether elements may have owners."""
        return SHARDED in self.exchange

    @property
    def may_use_nodes(self) -> bool:
        """Whether the exchange may be hierarchical."""
        return self.exchange not in (FLAT, SHARDED)

    @property
    def wants_nodes(self) -> bool:
        """Whether the exchange must be hierarchical, also where that saves nothing."""
        return self.exchange.startswith(HIERARCHICAL)

    def replace(self, **changes: Any) -> DGCConfig:
        """Return a copy with `changes`; an unknown name raises ConfigError, which names the nearest field."""
        check_field_names(changes)
        return dataclasses.replace(self, **changes)


FIELD_NAMES = tuple(field.name for field in dataclasses.fields(DGCConfig))


def check_field_names(names: Iterable[str]) -> None:
    """Raise ConfigError for the first of `names` that is no field of DGCConfig."""
    for name in names:
        if name not in FIELD_NAMES:
            raise ConfigError(unknown(f"setting {name!r}", name, FIELD_NAMES))


def check_predivide(factor: object, averages: bool) -> None:
    """Raise ConfigError unless Horovod's gradient_predivide_factor can be applied, in fp32 and to an average."""
    if not settings.is_number(factor) or not 2.0**-126 <= factor <= 2.0**126:
        raise ConfigError(f"gradient_predivide_factor must be a positive number, got {factor!r}; leave it at 1.0")
    if factor != 1.0 and not averages:
        raise ConfigError(f"gradient_predivide_factor={factor} goes with op=hvd.Average only; leave it at 1.0")


def clip_limit(c: float, workers: int, averages: bool) -> float:
    """Local gradient clipping (DGC 3.1): return the norm to which one rank's gradient is clipped.

    The paper's ``c * N**-0.5`` is for a gradient already divided by N; with Horovod a rank's gradient is the mean over
    its own shard, so the same rule is ``sqrt(N)*c`` (for a sum ``c/sqrt(N)``). With nodes, whose workers average first,
    there are M gradients, and the rule is ``sqrt(M)*c``.

    Args:
        c: threshold of the averaged gradient, > 0.
        workers: number of gradients that are averaged, N or M.
        averages: whether they are averaged or summed.
    """
    root = math.sqrt(workers)
    return c * root if averages else c / root
