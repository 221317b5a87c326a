"""The choices of ``Compression``, each a preset of DGCConfig: the same for every framework."""

from __future__ import annotations

from typing import Any

from dgc_horovod.config import DGCConfig, check_field_names
from dgc_horovod.errors import ConfigError, UnsupportedUse

_DGC: dict[str, Any] = {"rule": "exact", "momentum_correction": True, "factor_masking": True}
_TOPK = {"momentum_correction": False, "factor_masking": False}
_LOCAL: dict[str, Any] = {
    "rule": "exact",
    **_TOPK,
    "density": 0.015,
    "values": "2bit",
    "local_steps": 15,
    "outer_momentum": 0.5,
    "compress_1d": True,
    "check_every": 10,  # exchanges, of H steps each
    "min_numel": 64,  # packets are so small that small tensors would be a sixth of them
}

# The fields in which a preset differs from DGCConfig's defaults.
PRESETS: dict[str, dict[str, Any]] = {
    "dgc": _DGC,
    "auto": {**_DGC, "automatic": True, "density": 0.01, "exchange": "auto"},
    "topk": {"rule": "exact", **_TOPK},
    "sampled": {"rule": "sampled", **_TOPK},
    "gaussian": {"rule": "gaussian", **_TOPK},
    "local": _LOCAL,
}


class ConfiguredCompressor:
    """A choice of a compression, for dgc_horovod's own ``DistributedOptimizer`` only.

    Horovod's own optimizer can hand a compressor one tensor without its name or state; that cannot carry
    a residual, so there it raises on the first step instead of training uncompressed.

    Args:
        adapter: module of dgc_horovod that it is for, such as "torch".
        config: settings of the compression; None: the framework exchanges gradients itself.
        name: name of a choice without settings.
    """

    def __init__(self, adapter: str, config: DGCConfig | None, name: str = "") -> None:
        self.adapter, self.config, self.__name__ = adapter, config, name

    def __repr__(self) -> str:
        return f"Compression({self.config})" if self.config is not None else f"Compression.{self.__name__}"

    def compress(self, tensor: object) -> Any:
        """Raises UnsupportedUse: see the class."""
        raise UnsupportedUse(
            "this compression was given to an optimizer or function of Horovod's own, which cannot run it; use "
            f"`from dgc_horovod.{self.adapter} import DistributedOptimizer` in the script, or launch the unchanged "
            "script with dgcrun"
        )

    def decompress(self, tensor: object, ctx: object) -> Any:
        """Raises UnsupportedUse: see the class."""
        return self.compress(tensor)


class Presets:
    """The presets: each takes any field of DGCConfig as keyword. An adapter adds the choices without compression."""

    adapter = ""  # see `ConfiguredCompressor`

    @classmethod
    def dgc(cls, density: float = DGCConfig.density, **fields: object) -> Any:
        """Deep Gradient Compression: top-k of locally accumulated momentum (arXiv 1712.01887, sections 3.1 and 3.2).

        ``u = m*u + g;  v = v + u;  s = top_k(v);  v = v - s;  u = 0 where s;  w = w - lr * mean(s)``

        Args:
            density: k/n, fraction of the elements sent each step, in (0, 1].
            fields: any other field of DGCConfig, such as ``warmup`` and ``clip_norm``.

        Adam and AdamW divide the gradient by a second moment that all ranks share: docs/algorithm.md#adam.

        Memory: 8 bytes an element (u, v); Adam 4. Cost: one pass over gradient, u and v, 20 bytes an element; Adam 12,
        and one more pass for the second moment.
        """
        return cls._preset("dgc", density=density, **fields)

    @classmethod
    def auto(cls, total_steps: int | None = None, **fields: object) -> Any:
        """The faster of two here: stock Horovod's exchange, or `dgc` at a density that fits the run.

        The job begins with stock Horovod's exchange, and times it. If the cost model predicts that compression is
        faster, it tries that for some tens of steps, and goes on with compression if that gains 5%, otherwise with
        stock Horovod's.

        Args:
            total_steps: number of steps of the run, >= 1: the density is then the smallest at which a coordinate is
                sent 20 times; None: it is ``density``, 0.01 unless it is given.
            fields: any other field of DGCConfig.
        """
        return cls._preset("auto", total_steps=total_steps, **fields)

    @classmethod
    def topk(cls, density: float = DGCConfig.density, **fields: object) -> Any:
        """TopK-SGD: top-k with error feedback (arXiv 1911.08772, section 2); the optimizer keeps its own momentum.

        ``v = v + g;  s = top_k(v);  v = v - s;`` the optimizer's step then takes ``mean(s)`` for the gradient.

        Args:
            density, fields: see `dgc`.

        Memory: 4 bytes an element (v). Cost: one pass over gradient and v, 12 bytes an element.
        """
        return cls._preset("topk", density=density, **fields)

    @classmethod
    def sampled(cls, density: float = DGCConfig.density, **fields: object) -> Any:
        """`topk` with the threshold of a sample of the elements, 1% of them (arXiv 1712.01887, section 5).

        Args:
            density, fields: see `dgc`; 0.8 k to k elements are sent (k - 1 to k where k < 10).
        """
        return cls._preset("sampled", density=density, **fields)

    @classmethod
    def gaussian(cls, density: float = DGCConfig.density, **fields: object) -> Any:
        """GaussianK-SGD: `topk` with the threshold of a normal distribution (arXiv 1911.08772, section 3).

        ``threshold = mean + std * ppf(1 - density/2)``, then a bracketed search until the count is near k.

        Args:
            density, fields: see `dgc`; 0.8 k to k elements are sent (k - 1 to k where k < 10).
        """
        return cls._preset("gaussian", density=density, **fields)

    @classmethod
    def local(cls, steps: int = _LOCAL["local_steps"], density: float = _LOCAL["density"], **fields: object) -> Any:
        """Local steps: H steps of the optimizer on each rank, then an exchange of the weights' change (SparseLoCo).

        ``delta = anchor - w;  e = 0.95*e + delta;  s = top_k(e);  e = e - s;  b = m*b + mean(s);
        w = anchor - rate * (mean(s) + m*b)`` (arXiv 2508.15706). For links on which even a packet a step is too much.

        Args:
            steps: H >= 1, steps from one exchange to the next.
            density: k/n, fraction of the elements sent each time, in (0, 1]; ``warmup`` counts exchanges.
            fields: any other field of DGCConfig, such as ``outer_rate``, ``outer_momentum`` and ``local_decay``.

        Memory: 12 bytes an element (e, the anchor, b; of the host with ``offload``), 4 more during an exchange. Cost: a
        copy of the weights and one pass over weights and e every H steps.
        """
        if steps is None or "local_steps" in fields:
            raise ConfigError(f"Compression.local takes steps, a whole number of 1 or more; got {steps!r}, {fields!r}")
        return cls._preset("local", local_steps=steps, density=density, **fields)

    @classmethod
    def _preset(cls, name: str, **fields: object) -> Any:
        check_field_names(fields)
        given: dict[str, Any] = {**PRESETS[name], **fields}
        return ConfiguredCompressor(cls.adapter, DGCConfig(**given))


def method_of(config: DGCConfig) -> str:
    """Return the name of the preset of a config, or of the nearest one."""
    if config.strategy in PRESETS:
        return config.strategy
    if config.momentum_correction:
        return "dgc"
    return config.rule if config.rule in PRESETS else "topk"


def config_of(compression: object) -> DGCConfig | None:
    """The config of one of our compressions or of a DGCConfig; None for Horovod's own compressors.

    Raises:
        ConfigError: it is neither, e.g. ``Compression.dgc`` without the call.
    """
    if isinstance(compression, DGCConfig):
        return compression
    if isinstance(compression, ConfiguredCompressor):
        return compression.config
    if hasattr(compression, "compress") and hasattr(compression, "decompress"):
        return None
    name = getattr(compression, "__name__", "dgc")
    raise ConfigError(
        f"compression must be Compression.none, Compression.fp16 or a call such as Compression.{name}(density=0.001), "
        f"got {compression!r}"
    )
