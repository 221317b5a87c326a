"""What one worker costs beside the network."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dgc_horovod.exchange.contract import Round

_GLOO_FP32, _GLOO_FP16 = 2.8e-9, 20e-9  # seconds a byte: two ranks, ResNet-50, link not shaped (docs/planning.md)


@dataclass(frozen=True)
class Machine:
    """Seconds of one worker. The defaults were measured on one thread of a CPU with AVX-512 (docs/planning.md); adding
    costs nothing, as with NCCL, so that dense is never made slower than its link.

    Args:
        computing: seconds of a step without any exchange, T, > 0.
        overlap: share of T behind which an exchange hides that begins during the backward pass, in [0, 1].
        compress: seconds to accumulate and select, for each element of the model that the worker keeps.
        encode: seconds more, for each element sent.
        decode: seconds to decode and add, for each element received.
        update: seconds to write the update, for each element of the model.
        overhead: seconds of a compressed step beside: hooks, and waiting for the slower of the workers.
        add_fp32: seconds to add what a hop of an allreduce has brought, a byte of it.
        add_fp16: the same of 16-bit values.
        factorise: seconds of PowerSGD for each element of the model and each rank of its factors.
    """

    computing: float
    overlap: float = 2 / 3
    compress: float = 0.45e-9
    encode: float = 25e-9
    decode: float = 8e-9
    update: float = 0.06e-9
    overhead: float = 5e-3
    add_fp32: float = 0.0
    add_fp16: float = 0.0
    factorise: float = 4e-9

    def over_gloo(self) -> Machine:
        """The same with allreduces as Gloo makes them on a CPU, where 16-bit values are added one by one."""
        return replace(self, add_fp32=_GLOO_FP32, add_fp16=_GLOO_FP16)

    def add(self, collective: Round) -> float:
        """Seconds to add a byte of a collective's values."""
        return {"float32": self.add_fp32, "float16": self.add_fp16}.get(collective.dtype, 0.0)
