"""The ways to train that are compared: dense training, DGC part by part, its selection rules and codecs, optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn, optim

from benchmarks.quality.tasks import Settings
from dgc_horovod.compression import PRESETS
from dgc_horovod.config import DGCConfig, WarmupSchedule
from dgc_horovod.planning.trial import SETTLING, TIMED, fitting


class Lion(optim.Optimizer):
    """Chen et al. 2023 (2302.06675, algorithm 2): the sign of a mean of gradients; torch has none.

    Args:
        params: parameters.
        lr: learning rate, which is the size of every element's step.
        betas: weight of the mean in the step, and decay of the mean.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, betas: tuple[float, float]) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update."""
        for group in self.param_groups:
            in_step, decay = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                mean = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.sub_(torch.lerp(p.grad, mean, in_step).sign_(), alpha=group["lr"])
                mean.lerp_(p.grad, 1 - decay)


class MuonAndAdamW(optim.Optimizer):
    """torch's Muon for matrices, AdamW for vectors, with one learning rate: Muon's step is scaled to AdamW's size.

    Args:
        params: parameters.
        lr: learning rate of both.
        momentum: Muon's; AdamW's beta1.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float) -> None:
        of: dict[bool, list[Tensor]] = {True: [], False: []}
        for p in params:
            of[p.ndim == 2].append(p)
        settings = {"lr": lr, "momentum": momentum, "weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"}
        self._both = (optim.Muon(of[True], **settings), optim.AdamW(of[False], lr=lr, betas=(momentum, 0.99)))
        super().__init__([{"params": of[True]}, {"params": of[False]}], {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of both, at the learning rate of now."""
        for mine, theirs in zip(self.param_groups, self._both, strict=True):
            theirs.param_groups[0]["lr"] = mine["lr"]
            theirs.step()


def _rmsprop(params: Iterable[nn.Parameter], lr: float, momentum: float) -> optim.Optimizer:
    return optim.RMSprop(params, lr=lr, momentum=momentum)


def _adafactor(params: Iterable[nn.Parameter], lr: float, momentum: float) -> optim.Optimizer:
    if momentum:
        raise ValueError(f"torch's Adafactor has no momentum, got {momentum}; pass 0")
    return optim.Adafactor(params, lr=lr, weight_decay=0.0)


def _lion(params: Iterable[nn.Parameter], lr: float, momentum: float) -> optim.Optimizer:
    return Lion(params, lr, (momentum, 0.99))


OTHERS: dict[str, Callable[[Iterable[nn.Parameter], float, float], optim.Optimizer]] = {
    "lion": _lion,
    "rmsprop": _rmsprop,
    "adafactor": _adafactor,
    "muon": MuonAndAdamW,
}


MOMENTUM, BETAS = 0.9, (0.9, 0.99)
LOCALLY, AFTERWARDS, NEVER = "locally", "afterwards", "never"


@dataclass(frozen=True)
class Variant:
    """One way to train.

    Args:
        fields: of the compression, beside the preset "dgc"; None for dense training.
        clips: where a task that clips does: on each rank ("locally"), what has come back ("afterwards"), "never".
        warmup: length of the density warm-up, in the task's own; 0 for none.
        forgets: whether what was not sent is thrown away: no residual.
        density: of the selection, in the task's own, where `fields` do not give it.
        masks_below: density above which momentum is not masked, as a trial: the product has no such switch.
        falls: whether the density falls over the whole run, from 12/7 to 3/7 of the task's own, at equal traffic.
        optimizer: "sgd", "nesterov" (both with momentum 0.9), "adamw" or one of OTHERS.
        rate: highest learning rate: of SGD in the task's own, of OTHERS itself.
        momentum: of OTHERS.
        betas: AdamW's; beta1 = 0 where tensors are compressed.
        node_size: workers of a node, which average densely and are one sender.
        shard_density: what the owners of shards send on, in what a sender sends; 0: no shards.
        power_sgd: rank of torch's PowerSGD, on real ranks only; 0: none.
        dense_steps: dense steps before PowerSGD (>= 2), local steps or compression begin, of the optimizer as it is.
        received: function of N: density, in the task's own, that brings as many bytes as another exchange; or None.
    """

    fields: Mapping[str, Any] | None
    clips: str = LOCALLY
    warmup: float = 1.0
    forgets: bool = False
    density: float = 1.0
    masks_below: float = 1.0
    falls: bool = False
    optimizer: str = "sgd"
    rate: float = 1.0
    momentum: float = 0.0
    betas: tuple[float, float] = BETAS
    node_size: int = 1
    shard_density: float = 0.0
    received: Callable[[int], float] | None = None
    power_sgd: int = 0
    dense_steps: int = 0

    def make_optimizer(self, model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
        """The optimizer on all parameters of `model`, not wrapped."""
        if self.optimizer == "adamw":
            return torch.optim.AdamW(model.parameters(), lr=settings.adamw_lr, betas=self.betas)
        if self.optimizer in OTHERS:
            return OTHERS[self.optimizer](model.parameters(), self.rate, self.momentum)
        nesterov = self.optimizer == "nesterov"
        return torch.optim.SGD(model.parameters(), lr=self.rate * settings.lr, momentum=MOMENTUM, nesterov=nesterov)

    def config(self, settings: Settings, workers: int = 1) -> DGCConfig | None:
        """The compression for a task and N workers."""
        if self.fields is None:
            return None
        clip_norm = settings.clip_norm if self.clips == LOCALLY else None
        density = settings.density * (self.received(workers) if self.received else self.density)
        config = DGCConfig(density=density, clip_norm=clip_norm).replace(**self.fields)
        if self.falls:  # three densities, each half of the one before, each for a third of the run
            density = config.density * 3 / 7
            schedule = WarmupSchedule(steps=round(settings.steps * 2 / 3), first_density=4 * density, factor=0.5)
            return config.replace(density=density, warmup=schedule)
        steps = round(settings.stage * self.warmup * WarmupSchedule(steps=1).stages(config.density))
        return config.replace(warmup=WarmupSchedule(steps=steps)) if steps else config


def _dgc(**fields: Any) -> dict[str, Any]:
    return {**PRESETS["dgc"], **fields}


# The papers' form of everything else: each tensor, a bucket of its own, has its own largest elements
_PAPER = {"bucket_bytes": 1, "values": "fp32", "dense_values": "fp32"}
_NAIVE = {**PRESETS["topk"], **_PAPER}
_UNMASKED = _dgc(**_PAPER, factor_masking=False)

# In the order in which the authors of DGC have told it.
ABLATION = {
    "dense": Variant(None, clips=AFTERWARDS),
    "top-k, no residual": Variant(_NAIVE, clips=AFTERWARDS, warmup=0, forgets=True),
    "+ residual (TopK-SGD)": Variant(_NAIVE, clips=AFTERWARDS, warmup=0),
    "+ momentum correction": Variant(_UNMASKED, clips=NEVER, warmup=0),
    "+ local clipping": Variant(_UNMASKED, warmup=0),
    "+ factor masking": Variant(_dgc(**_PAPER), warmup=0),
    "+ warm-up (DGC)": Variant(_dgc(**_PAPER)),
}
WITHOUT = {
    "DGC without masking": Variant(_UNMASKED),
    "DGC without clipping": Variant(_dgc(**_PAPER), clips=NEVER),
    "DGC without momentum correction": Variant(_NAIVE, clips=AFTERWARDS),
}
# The product's defaults, and what they could be instead
CHOICES = {
    "dgc": Variant(_dgc()),
    "dgc, rule=gaussian": Variant(_dgc(rule="gaussian")),
    "dgc, rule=sampled": Variant(_dgc(rule="sampled")),
    "gaussian (GaussianK-SGD)": Variant(PRESETS["gaussian"], clips=AFTERWARDS, warmup=0),
    "topk (TopK-SGD)": Variant(PRESETS["topk"], clips=AFTERWARDS, warmup=0),
    "dgc, values=fp32": Variant(_dgc(values="fp32")),
    "dgc, values=4bit": Variant(_dgc(values="4bit")),
    "dgc, values=2bit": Variant(_dgc(values="2bit")),
    "dgc, values=4bit, density ×1.7": Variant(_dgc(values="4bit"), density=1.7),
    "dgc, values=2bit, density ×2": Variant(_dgc(values="2bit"), density=2.0),
    "dgc, no warm-up": Variant(_dgc(), warmup=0),
    "dgc, warm-up ×0.5": Variant(_dgc(), warmup=0.5),
    "dgc, warm-up ×2": Variant(_dgc(), warmup=2.0),
    "dgc, density falls, no warm-up": Variant(_dgc(), falls=True),
    "dgc, factor_masking=False": Variant(_dgc(factor_masking=False)),
    "dgc, masking from 2% down": Variant(_dgc(), masks_below=0.02),
    "dgc, density 1%": Variant(_dgc(density=0.01)),
    "dgc, density 0.1%": Variant(_dgc(density=0.001)),
}


def _adamw(**fields: Any) -> Variant:
    """Without a density warm-up."""
    return Variant(_dgc(**fields), warmup=0, optimizer="adamw")


# AdamW without compression, and with; other densities than the 1% of the tasks are in the names
ADAM_DENSE = {
    "AdamW, dense": Variant(None, clips=AFTERWARDS, optimizer="adamw"),
    "AdamW, dense, b1 0.5": Variant(None, clips=AFTERWARDS, optimizer="adamw", betas=(0.5, 0.99)),
    "AdamW, dense, b2 0.999": Variant(None, clips=AFTERWARDS, optimizer="adamw", betas=(0.9, 0.999)),
}
ADAM_IN_2_BITS = {
    f"AdamW, dgc, {density}% in 2 bits": _adamw(density=density / 100, values="2bit") for density in (1, 0.5, 0.3, 0.1)
}
ADAM = {
    "AdamW, dgc": _adamw(),
    **ADAM_IN_2_BITS,
    "AdamW, dgc, b2 0.999": replace(_adamw(), betas=(0.9, 0.999)),
}


def _other(name: str, rate: float, momentum: float = 0.0, dense: bool = False) -> Variant:
    """One of OTHERS, without a density warm-up."""
    fields = None if dense else PRESETS["topk"]
    return Variant(fields, clips=AFTERWARDS, warmup=0, optimizer=name, rate=rate, momentum=momentum)


# Other optimizers than SGD; the learning rate of Nesterov's form is that of the task, those of OTHERS are the best of
# three to five on seed 50, dense and compressed
OPTIMIZERS = {
    "Nesterov, dense": Variant(None, clips=AFTERWARDS, optimizer="nesterov"),
    "Nesterov, dgc": Variant(_dgc(), optimizer="nesterov"),
    "AdamW, dense": ADAM_DENSE["AdamW, dense"],
    "AdamW, topk": Variant(PRESETS["topk"], clips=AFTERWARDS, optimizer="adamw"),
    "RMSprop, dense": _other("rmsprop", 0.001, dense=True),
    "RMSprop, topk": _other("rmsprop", 0.001),
    "Adafactor, dense": _other("adafactor", 0.03, dense=True),
    "Adafactor, topk": _other("adafactor", 0.03),
    "Adafactor, topk, rate ×3": _other("adafactor", 0.1),
    "Lion, dense": _other("lion", 0.001, 0.9, dense=True),
    "Lion, topk, rate ×3": _other("lion", 0.003, 0.9),
    "Lion, topk, rate ×10, no momentum": _other("lion", 0.01),
    "Muon, dense": _other("muon", 0.01, 0.95, dense=True),
    "Muon, topk": _other("muon", 0.01, 0.95),
    "Muon, topk, rate ×2, no momentum": _other("muon", 0.02),
}
# torch's own, which sends about as many bytes as a density of 1%, after some dense steps
POWER_SGD = {
    "AdamW, PowerSGD 2 after 200": Variant(None, clips=AFTERWARDS, optimizer="adamw", power_sgd=2, dense_steps=200)
}


def _local(steps: int, dense_steps: int = 0, **fields: Any) -> Variant:
    fields = {**PRESETS["local"], "local_steps": steps, **fields}
    return Variant(fields, clips=AFTERWARDS, warmup=0, optimizer="adamw", dense_steps=dense_steps)


_WHOLE = {"density": 1.0, "values": "fp32", "dense_values": "fp32", "local_decay": 1.0, "outer_momentum": 0.0}
# AdamW with local steps: the weights averaged every so many, and compressed on the way
LOCAL_STEPS = (5, 15, 30)
AVERAGED = {f"AdamW, averaged every {steps}": _local(steps, **_WHOLE) for steps in LOCAL_STEPS}
# whole weights with Nesterov's momentum of the mean change: the factor of ours, and what DiLoCo (2311.08105, 3.1) uses
OUTER = {"momentum 0.5": {"outer_momentum": 0.5}, "DiLoCo": {"outer_momentum": 0.9, "outer_rate": 0.7}}
WITH_OUTER = {
    f"AdamW, averaged every {steps}, {name}": _local(steps, **{**_WHOLE, **outer})
    for name, outer in OUTER.items()
    for steps in LOCAL_STEPS
}
LOCAL = {f"AdamW, local, {steps} steps": _local(steps, outer_rate=1.5) for steps in LOCAL_STEPS}
LOCAL_DENSER = {f"AdamW, local, {steps} steps, 6%": _local(steps, density=1 / 16) for steps in LOCAL_STEPS}
# Half the outer momentum, where a round is short or the density higher (found on seed 50 of the GPT)
LESS_OUTER = 0.25
LOCAL_GENTLER = {
    "AdamW, local, 5 steps, 6%, momentum 0.25": _local(5, density=1 / 16, outer_momentum=LESS_OUTER),
    "AdamW, local, 15 steps, 12%, momentum 0.25": _local(15, density=1 / 8, outer_momentum=LESS_OUTER),
}
# Half of the momentum in the inner optimizer, and half outside (found on seed 50 of the Transformer), beside all of it
LOCAL_BETAS = {
    f"AdamW, local, {steps} steps, {density:.0%}, rate 1.5{name}": replace(
        _local(steps, density=density, outer_rate=1.5), betas=betas
    )
    for steps, density in ((5, 1 / 16), (15, 1 / 8))
    for name, betas in (("", BETAS), (", b1 0.5", (0.5, 0.99)))
}
# The same after some dense steps
LOCAL_AFTER = 200
LATER_AVERAGED = {f"AdamW, averaged every 15 after {LOCAL_AFTER}": _local(15, LOCAL_AFTER, **_WHOLE)}
LATER_LOCAL = {f"AdamW, local, 15 steps, 6% after {LOCAL_AFTER}": _local(15, LOCAL_AFTER, density=1 / 16)}
# What `auto` does in a run of so many steps: dense ones until it has chosen, then the density that fits
# In one of 300 it stays dense; what compression would cost there, with momentum masked and without
RUN_LENGTHS, HOURS = (300, 1_000, 2_000, 4_000, 30_000), 30_000  # the last ones take hours


def _automatic(steps: int, **fields: Any) -> Variant:
    if steps >= HOURS:  # done before; their first steps are at density 1 without momentum, a thousandth of the run
        fields["warmup"] = WarmupSchedule(steps=SETTLING + TIMED, first_density=1.0, factor=1e-4)
    dense_steps = 0 if steps >= HOURS else SETTLING + TIMED
    return Variant(_dgc(density=fitting(steps), **fields), warmup=0, dense_steps=dense_steps)


AUTOMATIC = {f"auto, {steps:,} steps": _automatic(steps) for steps in RUN_LENGTHS}
UNMASKED = {f"auto, {steps:,} steps, factor_masking=False": _automatic(steps, factor_masking=False)
            for steps in RUN_LENGTHS[:2]}  # fmt: skip
# What brings the LSTM at the papers' density closer to dense training; the last ones at half the learning rate
LOWEST = {
    "dgc, density 0.1%, factor_masking=False": Variant(_dgc(density=0.001, factor_masking=False)),
    "dgc, density 0.1%, warm-up ×10": Variant(_dgc(density=0.001), warmup=10.0),
    "dgc, density 0.3%, values=2bit": Variant(_dgc(density=0.003, values="2bit")),
    "half the rate, dense": Variant(None, clips=AFTERWARDS, rate=0.5),
    "half the rate, dgc": Variant(_dgc(), rate=0.5),
    "half the rate, dgc, density 0.1%": Variant(_dgc(density=0.001), rate=0.5),
    "half the rate, dgc, density 0.3%, values=2bit": Variant(_dgc(density=0.003, values="2bit"), rate=0.5),
}
# Exchanges of many workers, each beside the flat one at a density that brings a network card as many bytes:
# flat (N-1)*k, nodes of G (N/G - 1)*k, shards (N-1)/N * (k + k_out)
EXCHANGES = {
    "nodes of 4": Variant(_dgc(), node_size=4),
    "dgc, bytes of nodes of 4": Variant(_dgc(), received=lambda workers: (workers / 4 - 1) / (workers - 1)),
    "nodes of 8": Variant(_dgc(), node_size=8),
    "dgc, bytes of nodes of 8": Variant(_dgc(), received=lambda workers: (workers / 8 - 1) / (workers - 1)),
    "sharded, k": Variant(_dgc(), shard_density=1.0),
    "dgc, bytes of sharded, k": Variant(_dgc(), received=lambda workers: 2 / workers),
    "sharded, 2k": Variant(_dgc(), shard_density=2.0),
    "dgc, bytes of sharded, 2k": Variant(_dgc(), received=lambda workers: 3 / workers),
    "sharded, 4k": Variant(_dgc(), shard_density=4.0),
    "dgc, bytes of sharded, 4k": Variant(_dgc(), received=lambda workers: 5 / workers),
}
VARIANTS = {
    **ABLATION, **WITHOUT, **CHOICES, **OPTIMIZERS, **ADAM_DENSE, **ADAM, **POWER_SGD, **AVERAGED, **WITH_OUTER,
    **LOCAL, **LOCAL_DENSER, **LOCAL_GENTLER, **LOCAL_BETAS, **LATER_AVERAGED, **LATER_LOCAL, **AUTOMATIC, **UNMASKED,
    **LOWEST, **EXCHANGES,
}  # fmt: skip
