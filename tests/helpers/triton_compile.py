"""Compile every Triton kernel for real devices, which needs none: ``python -m tests.helpers.triton_compile``.

Prints one JSON object: kernel and device -> multiply-adds in one operation, loads of 16 bytes, bytes of shared memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dgc_horovod.kernels.triton import accumulate, decode, encode
from dgc_horovod.kernels.triton.memory import EXACT

# What each parameter is, by name: pointers to int32 unless it is here
_KINDS = {
    **dict.fromkeys(
        ("v", "u", "values", "decoded", "masked", "chosen_values", "threshold", "numbers", "scale", "x", "signs",
         "found", "parts"), "*fp32"
    ),
    **dict.fromkeys(("gradients", "factors", "outputs", "vectors"), "*i64"),
    "sums": "*fp64",
    "totals": "*i64",
    **dict.fromkeys(
        ("numel", "max_candidates", "k", "blocks", "capacity", "values_at", "scales_at", "words", "packet_words",
         "high_at", "bits", "chunks", "ranks", "first_row", "before", "rows", "columns"), "i32"),
}  # fmt: skip
_LOW, _CODECS, _FEEDS = (0, 9), range(1, 7), range(4)
KERNELS: list[tuple[Any, int, list[dict[str, int]]]] = [
    (
        accumulate.accumulate,
        accumulate.WARPS,
        [{"FEED": accumulation, "ALIGNED": aligned} for accumulation in _FEEDS for aligned in (0, 1)],
    ),
    (encode.refine, 4, [{}]),
    (encode.count, 4, [{}]),
    (encode.gather, 4, [{}]),
    (encode.encode, 4, [{"LOW": low, "CODEC": codec} for codec in _CODECS for low in _LOW]),
    (encode.update_residual, 4, [{"MASKS": masks} for masks in (0, 1)]),
    (decode.survey, 4, [{}]),
    (decode.decode_positions, 4, [{"LOW": low, "BLOCK_BITS": 11} for low in _LOW]),
    (decode.decode_values, 4, [{"CODEC": codec} for codec in _CODECS]),
    (accumulate.chunk_sums, 4, [{}]),
    (accumulate.measure_rows, 4, [{}]),
    (decode.aggregate_into, 4, [{"BLOCK_BITS": 11, "FRESH": fresh} for fresh in (0, 1)]),
]


def compiled(kernel: Any, warps: int, constants: dict[str, int], capability: int) -> Any:
    """`kernel` for one kind of device."""
    signature = {name: "constexpr" if name in constants else _KINDS.get(name, "*i32") for name in kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(signature)
        if signature[name][0] == "*" or name == "numel"
    }
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={**EXACT, "num_warps": warps})


def machine_code(cubin: bytes) -> str:
    """As the device will run it."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, file.name], capture_output=True, text=True, check=True).stdout


def main() -> None:
    """Compile all of them."""
    capabilities = [int(text) for text in sys.argv[1:]] or [80, 90]
    found = {}
    for kernel, warps, forms in KERNELS:
        for constants in forms:
            for capability in capabilities:
                made = compiled(kernel, warps, constants, capability)
                code = machine_code(made.asm["cubin"])
                # a division that is rounded correctly is made of multiply-adds itself
                divides = any(word in made.asm["ptx"] for word in ("div.", "sqrt."))
                name = " ".join([kernel.__name__, *(f"{key}={value}" for key, value in constants.items())])
                found[f"{name} sm_{capability}"] = {
                    "fused": made.asm["ptx"].count("fma.") + (0 if divides else code.count("FFMA")),
                    "loose": made.asm["ptx"].count(".ftz") + made.asm["ptx"].count(".approx"),
                    "wide": code.count("LDG.E.128"), "shared": made.metadata.shared,
                }  # fmt: skip
    print(json.dumps({"triton": triton.__version__, "kernels": found}))


if __name__ == "__main__":
    main()
