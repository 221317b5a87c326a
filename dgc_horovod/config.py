"""What a user can set: one frozen record, validated once, the same for every framework."""

from __future__ import annotations

import dataclasses
import math
import numbers
from dataclasses import dataclass
from typing import Any

import numpy as np

from dgc_horovod.errors import ConfigError, UnsupportedUse, nearest
from dgc_horovod.rules import RULES
from dgc_horovod.schedule import WarmupSchedule
from dgc_horovod.wire.codecs import VALUE_CODECS

SCOPES = ("bucket", "tensor")
VALUES = tuple(VALUE_CODECS)
DENSE_VALUES = ("auto", "fp32", "fp16", "bf16", "8bit")
AUTO, FLAT, HIERARCHICAL, SHARDED = "auto", "flat", "hierarchical", "sharded"
EXCHANGES = (AUTO, FLAT, SHARDED, HIERARCHICAL, f"{HIERARCHICAL}+{SHARDED}")
# What fades by less than half a unit in the last of bfloat16's 8 binary digits, 2**-8 of it, does not fade at all.
_MOST_MOMENTUM = {"fp32": 1.0, "bf16": 0.99}
MOMENTUM_DTYPES = tuple(_MOST_MOMENTUM)
_LOCAL = ("local_decay", "outer_rate", "outer_momentum")
ON_MISMATCH = ("stop", "broadcast")
ON_NONFINITE = ("skip", "stop")


@dataclass(frozen=True)
class DGCConfig:
    """Settings of one compressed optimizer. Unlisted names and values out of range raise ConfigError.

    Args:
        density: fraction of elements sent each step, in (0, 1]; lower sends less and waits longer.
        rule: selection rule: exact (top-k), sampled (threshold from a 1% sample), gaussian (threshold
            from mean and deviation), random, threshold (everything at or above a fixed magnitude).
        scope: elements ranked together: "bucket": all of a bucket; "tensor": those of each tensor, as in the papers.
        momentum_correction: whether momentum is accumulated locally, before selection (DGC section 3.1). With Adam and
            AdamW, whether gradients are divided by the second moment there; other optimizers have no such form.
        momentum_dtype: number format in which SGD's momentum is kept, under momentum correction: fp32; or bf16, of half
            the memory, for momenta of up to 0.99. What enters the residual is the sum before it is rounded.
        factor_masking: whether momentum is cleared where an element was sent (DGC section 3.2). Meant for densities of
            2% and less: where much is sent, it takes the momentum away.
        clip_norm: L2 norm c at which the averaged whole-model gradient would be clipped, > 0; each rank
            clips its own to sqrt(N)*c before it enters the momentum. None: no clipping.
        warmup: schedule of the density warm-up; None: no warm-up.
        values: number format of sent values: fp32, fp16, bf16, 8bit, 4bit or 2bit; fewer bits send less, and what
            rounding drops stays in the residual.
        dense_values: number format of the tensors that are not compressed (1-D, small): fp32, fp16 by allreduce;
            bf16, 8bit by allgather, with a residual of their own; auto: 8bit up to 4 workers, fp32 beyond.
        exchange: who exchanges packets with whom: "flat": every worker with every other; "sharded": every worker with
            the owners of elements, who send the largest sums on; "hierarchical": the workers of a node average their
            gradients densely, then each exchanges its slice with the other nodes; "hierarchical+sharded": the nodes
            with owners among them; "auto": hierarchical where the process sets of nodes are declared and their cards
            are spared more than it costs, else flat; with owners where 32 or more would send more than
            `max_bytes_per_step`.
        node_size: number of workers of a node, >= 1; None: those on one host.
        max_bytes_per_step: number of bytes that a network card is to receive at a step after the warm-up, >= 1: the
            density is lowered until it does, not below 0.0001; None: no limit.
        automatic: whether the job begins with stock Horovod's exchange, and takes the faster by its own clock: that, or
            this compression.
        total_steps: number of steps of the run, >= 1, where it is known: ``automatic`` takes the density from it.
        local_steps: number of the optimizer's steps on each rank alone from one exchange to the next, H >= 1: what is
            exchanged then is the weights' change. None: gradients are exchanged at every step.
        local_decay: with local steps, factor of what waits at each exchange, in (0, 1].
        outer_rate: with local steps, factor of the mean change, > 0.
        outer_momentum: with local steps, Nesterov momentum of the mean change, in [0, 1).
        offload: PyTorch, with local steps: whether what waits, the weights of the last exchange and the outer momentum
            lie in host memory, and changes are compressed there, where the model is on a GPU.
        threshold: smallest magnitude that rule "threshold" sends, > 0 and within float32's normal range; else None.
        max_density: largest fraction of a bucket that rule "threshold" sends, in (0, 1]; it fixes the packet's size.
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

    density: float = 0.001
    rule: str = "exact"
    scope: str = "bucket"
    momentum_correction: bool = True
    momentum_dtype: str = "fp32"
    factor_masking: bool = True
    clip_norm: float | None = None
    warmup: WarmupSchedule | None = None
    values: str = "bf16"
    dense_values: str = "auto"
    exchange: str = "flat"
    node_size: int | None = None
    max_bytes_per_step: int | None = None
    automatic: bool = False
    total_steps: int | None = None
    local_steps: int | None = None
    local_decay: float = 0.95
    outer_rate: float = 1.0
    outer_momentum: float = 0.0
    offload: bool = False
    threshold: float | None = None
    max_density: float = 0.01
    min_numel: int = 1024
    compress_1d: bool = False
    bucket_bytes: int = 64 * 2**20
    seed: int = 0
    check_every: int = 100
    on_mismatch: str = "stop"
    on_nonfinite: str = "skip"
    max_skipped: int = 100

    def __post_init__(self) -> None:
        _check_fraction("density", self.density)
        _check_fraction("max_density", self.max_density)
        check_choice("rule", self.rule, tuple(RULES))
        check_choice("scope", self.scope, SCOPES)
        check_choice("momentum_dtype", self.momentum_dtype, MOMENTUM_DTYPES)
        check_choice("values", self.values, tuple(VALUE_CODECS))  # a script may have added one
        check_choice("dense_values", self.dense_values, DENSE_VALUES)
        check_choice("exchange", self.exchange, EXCHANGES)
        check_choice("on_mismatch", self.on_mismatch, ON_MISMATCH)
        check_choice("on_nonfinite", self.on_nonfinite, ON_NONFINITE)
        for name in ("momentum_correction", "factor_masking", "automatic", "offload", "compress_1d"):
            _check_type(name, getattr(self, name), bool, "True or False")
        for name, least in (("min_numel", 1), ("bucket_bytes", 1), ("seed", 0), ("check_every", 0), ("max_skipped", 0)):
            check_whole(name, getattr(self, name), least)
        for name in ("node_size", "max_bytes_per_step", "total_steps", "local_steps"):
            if (value := getattr(self, name)) is not None:
                check_whole(f"{name}, of bytes," if "bytes" in name else name, value, 1)
        _check_positive("clip_norm", self.clip_norm)
        _check_positive("threshold", self.threshold)
        if self.threshold is not None and not np.finfo(np.float32).tiny <= self.threshold <= np.finfo(np.float32).max:
            raise ConfigError(f"threshold must be within the normal range of float32, got {self.threshold!r}")
        if self.warmup is not None:
            _check_type(
                "warmup", self.warmup, WarmupSchedule, "a WarmupSchedule, e.g. WarmupSchedule(steps=2000), or None"
            )
        if ("threshold" in RULES[self.rule].parameters) != (self.threshold is not None):
            raise ConfigError(
                f"rule={self.rule!r} with threshold={self.threshold}: a threshold goes with rule='threshold' and "
                "only with it; e.g. Compression.threshold(0.01, max_density=0.02), or --compression threshold "
                "--dgc-threshold 0.01"
            )
        if self.automatic and (self.local_steps is not None or not RULES[self.rule].sets_density):
            raise ConfigError(
                "automatic goes with an exchange of gradients at every step and a rule whose density is set: use "
                f"Compression.auto(...); got rule={self.rule!r}, local_steps={self.local_steps!r}"
            )
        if self.automatic and self.warmup is not None:
            raise ConfigError(
                "warmup goes with an exchange that is compressed from the beginning, and automatic begins with stock "
                "Horovod's; drop one of them"
            )
        if self.total_steps is not None and not self.automatic:
            raise ConfigError("total_steps goes with Compression.auto(...), or --compression auto")
        if self.warmup is not None and not RULES[self.rule].sets_density:
            raise ConfigError(
                f"warmup has no meaning with rule={self.rule!r}, whose density is not set; drop one of them"
            )
        if self.momentum_dtype != "fp32" and not self.momentum_correction:
            raise ConfigError(
                f"momentum_dtype={self.momentum_dtype!r} goes with momentum correction: use Compression.dgc(...) or "
                "auto(...), or --compression dgc; other methods leave the momentum to the optimizer"
            )
        self._check_local()
        self._normalise()

    def _check_local(self) -> None:
        _check_fraction("local_decay", self.local_decay)
        _check_positive("outer_rate", self.outer_rate)
        if not (_is_number(self.outer_momentum) and 0 <= self.outer_momentum < 1):
            raise ConfigError(f"outer_momentum must be in [0, 1), got {self.outer_momentum!r}")
        if self.local_steps is None:
            for field in dataclasses.fields(self):
                if field.name in (*_LOCAL, "offload") and getattr(self, field.name) != field.default:
                    raise ConfigError(f"{field.name} goes with local steps: Compression.local(...)")
            return
        if self.momentum_correction or self.clip_norm is not None or self.may_use_nodes:
            raise ConfigError(
                "local steps leave momentum and clipping to the optimizer and the script, and nodes to exchange='flat' "
                "or 'sharded': use Compression.local(...), or --compression local, without clip_norm"
            )

    def _normalise(self) -> None:
        """Plain Python numbers, so that equal settings of two ranks also look equal."""
        for name in ("density", "max_density", "clip_norm", "threshold", *_LOCAL):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else float(value))
        for name in ("min_numel", "bucket_bytes", "seed", "check_every", "max_skipped"):
            object.__setattr__(self, name, int(getattr(self, name)))

    @property
    def final_density(self) -> float:
        """Density after the warm-up, which also fixes the packet's capacity."""
        return self.density if RULES[self.rule].sets_density else self.max_density

    @property
    def sends_all(self) -> bool:
        """Whether every element is sent at every step."""
        return self.density == 1.0 and RULES[self.rule].sets_density and self.warmup is None

    @property
    def momentum_bytes(self) -> int:
        """Bytes of an element of SGD's momentum."""
        return {"fp32": 4, "bf16": 2}[self.momentum_dtype]

    def check_momentum(self, momentum: float) -> None:
        """Raise UnsupportedUse for a momentum that `momentum_dtype` has no digits for."""
        if momentum > _MOST_MOMENTUM[self.momentum_dtype]:
            raise UnsupportedUse(
                f"momentum_dtype='bf16' has too few digits for a momentum of {momentum:g}, which would hardly fade; use"
                f" at most {_MOST_MOMENTUM[self.momentum_dtype]:g}, or momentum_dtype='fp32'"
            )

    @property
    def exchanges_weights(self) -> bool:
        """Whether what the ranks exchange are changes of weights, after steps of their own, and no gradients."""
        return self.local_steps is not None

    def check_reduction(self, averages: bool) -> None:
        """Raise UnsupportedUse where the script asks for a sum over the ranks, and weights are averaged."""
        if self.exchanges_weights and not averages:
            raise UnsupportedUse("local steps average the ranks' changes: pass op=hvd.Average, or average=True")

    @property
    def begins_dense(self) -> bool:
        """Whether everything is sent at the first step, and no budget can change that."""
        first = self.warmup.first_density if self.warmup is not None else 0
        whole = self.density == 1 and self.max_bytes_per_step is None
        return RULES[self.rule].sets_density and (first == 1 or whole or self.automatic)

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
        """Whether it is to be hierarchical whatever that saves."""
        return self.exchange.startswith(HIERARCHICAL)

    def replace(self, **changes: Any) -> DGCConfig:
        """A copy with `changes`; a name that is no field raises ConfigError with the nearest one."""
        check_field_names(changes)
        return dataclasses.replace(self, **changes)


FIELD_NAMES = tuple(field.name for field in dataclasses.fields(DGCConfig))


def check_field_names(names: Any) -> None:
    """Raise ConfigError for the first of `names` that is no field of DGCConfig."""
    for name in names:
        if name not in FIELD_NAMES:
            near = nearest(name, FIELD_NAMES)
            hint = f"did you mean {near!r}? " if near else ""
            raise ConfigError(f"unknown setting {name!r}; {hint}allowed: {', '.join(FIELD_NAMES)}")


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and not math.isnan(value)


def check_predivide(factor: Any, averages: bool) -> None:
    """Raise ConfigError unless Horovod's gradient_predivide_factor can be applied, in fp32 and to an average."""
    if not _is_number(factor) or not 2.0**-126 <= factor <= 2.0**126:
        raise ConfigError(f"gradient_predivide_factor must be a positive number, got {factor!r}; leave it at 1.0")
    if factor != 1.0 and not averages:
        raise ConfigError(f"gradient_predivide_factor={factor} goes with op=hvd.Average only; leave it at 1.0")


def _check_fraction(name: str, value: Any) -> None:
    if not _is_number(value) or not 0 < value <= 1:
        hint = f"; for {value:g}x compression pass {name}={1 / value:g}" if _is_number(value) and value >= 2 else ""
        raise ConfigError(f"{name} must be in (0, 1], got {value!r}{hint}")


def check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Raise ConfigError, with the nearest of them, unless `value` is one of `allowed`."""
    if value not in allowed:
        near = nearest(value, allowed)
        hint = f"; did you mean {near!r}?" if near else ""
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}{hint}")


def _check_type(name: str, value: Any, kind: type, allowed: str) -> None:
    if not isinstance(value, kind):
        raise ConfigError(f"{name} must be {allowed}, got {value!r}")


def check_whole(name: str, value: Any, least: int) -> None:
    """Raise ConfigError unless `value` is a whole number of at least `least`."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} must be a whole number >= {least}, got {value!r}")


def _check_positive(name: str, value: Any) -> None:
    if value is not None and not (_is_number(value) and 0 < value < math.inf):
        raise ConfigError(f"{name} must be a positive finite number or None, got {value!r}")
