"""The choices of ``Compression``, each a preset of DGCConfig: the same for every framework."""

from __future__ import annotations

from typing import Any

from dgc_horovod.config import DGCConfig, check_field_names
from dgc_horovod.errors import ConfigError, UnsupportedUse

_TOPK = {"momentum_correction": False, "factor_masking": False}

# The fields in which a preset differs from DGCConfig's defaults.
PRESETS: dict[str, dict[str, Any]] = {
    "dgc": {"rule": "exact", "momentum_correction": True, "factor_masking": True},
    "topk": {"rule": "exact", **_TOPK},
    "sampled": {"rule": "sampled", **_TOPK},
    "gaussian": {"rule": "gaussian", **_TOPK},
    "random": {"rule": "random", **_TOPK},
    "threshold": {"rule": "threshold", **_TOPK},
}


class ConfiguredCompressor:
    """A configured compression, for dgc_horovod's own ``DistributedOptimizer`` only.

    Horovod's own optimizer can hand a compressor one tensor without its name or state; that cannot carry
    a residual, so there it raises on the first step instead of training uncompressed.
    """

    framework = ""  # "torch" or "tensorflow", for the message

    def __init__(self, config: DGCConfig) -> None:
        self.config = config

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.config})"

    def compress(self, tensor: Any) -> Any:
        """Raises UnsupportedUse: see the class."""
        raise UnsupportedUse(
            f"this compression was given to horovod.{self.framework}'s own optimizer or function, which cannot run it; "
            f"use `from dgc_horovod.{self.framework} import DistributedOptimizer` in the script, or launch the "
            "unchanged script with dgcrun"
        )

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """Raises UnsupportedUse: see the class."""
        return self.compress(tensor)


class Presets:
    """What to send: each choice takes any field of DGCConfig as keyword. An adapter adds Horovod's own."""

    compressor: type[ConfiguredCompressor]

    @classmethod
    def dgc(cls, density: float = 0.001, **fields: Any) -> Any:
        """Deep Gradient Compression: exact top-k with momentum correction and factor masking."""
        return cls._preset("dgc", density=density, **fields)

    @classmethod
    def topk(cls, density: float = 0.001, **fields: Any) -> Any:
        """TopK-SGD: exact top-k and residual; the wrapped optimizer keeps its momentum."""
        return cls._preset("topk", density=density, **fields)

    @classmethod
    def sampled(cls, density: float = 0.001, **fields: Any) -> Any:
        """TopK-SGD with the threshold taken from a 1% sample."""
        return cls._preset("sampled", density=density, **fields)

    @classmethod
    def gaussian(cls, density: float = 0.001, **fields: Any) -> Any:
        """GaussianK-SGD: threshold from mean and deviation, then a bracketed search."""
        return cls._preset("gaussian", density=density, **fields)

    @classmethod
    def random(cls, density: float = 0.001, **fields: Any) -> Any:
        """Random-k with residual: the baseline."""
        return cls._preset("random", density=density, **fields)

    @classmethod
    def threshold(cls, value: float, *, max_density: float = 0.01, **fields: Any) -> Any:
        """Everything of magnitude `value` or more, at most `max_density` of a bucket."""
        return cls._preset("threshold", threshold=value, max_density=max_density, **fields)

    @classmethod
    def _preset(cls, name: str, **fields: Any) -> Any:
        check_field_names(fields)
        return cls.compressor(DGCConfig(**{**PRESETS[name], **fields}))


def method_of(config: DGCConfig) -> str:
    """The preset that a config is of, or is nearest to."""
    if config.momentum_correction:
        return "dgc"
    return "topk" if config.rule == "exact" else config.rule


def config_of(compression: Any) -> DGCConfig | None:
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
