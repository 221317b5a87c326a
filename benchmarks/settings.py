"""What a setting does to quality, on the examples, on real Horovod ranks: ``python -m benchmarks.settings STUDY``.

Prints a table and puts it between the markers ``<!-- STUDY: begin -->`` and ``<!-- STUDY: end -->`` of the
study's page. Every run is kept in ``benchmarks/results/settings.json``: studies share runs, and a study that was
stopped goes on where it was; remove the file to measure anew.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from dataclasses import dataclass
from typing import Any

from benchmarks.ranks import found_in, output_of
from benchmarks.report import RESULTS, ROOT, remembered, write_into_page

KEPT = RESULTS / "settings.json"
RUN_TIMEOUT_SECONDS = 600
LSTM_CLIP = 0.1  # the LSTM example's own --clip-norm


@dataclass(frozen=True)
class Variant:
    """One row of a table: what it is called, which example on how many ranks, with which options."""

    name: str
    example: str
    ranks: int
    options: tuple[str, ...]


@dataclass(frozen=True)
class Study:
    """Rows that are compared with each other, and the page that shows them."""

    page: str
    caption: str
    variants: tuple[Variant, ...]


def _clip(factor: float) -> tuple[str, ...]:
    return ("--compression", "dgc", "--clip-norm", str(LSTM_CLIP * factor))


def _examples(*choices: tuple[str, tuple[str, ...]]) -> tuple[Variant, ...]:
    return tuple(
        Variant(f"{example}, {name}", f"torch_{example}.py", 2, options)
        for example in ("digits", "lstm")
        for name, options in choices
    )


def _plain(name: str) -> tuple[str, tuple[str, ...]]:
    return name, ("--compression", name)


_VALUES = [
    (f"{values}, small tensors {dense}", ("--compression", "dgc", "--values", values, "--dense-values", dense))
    for values, dense in (("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "8bit"), ("4bit", "8bit"), ("2bit", "8bit"))
]

STUDIES = {
    "examples": Study(
        "examples/README.md",
        "2 ranks, the examples' default settings",
        _examples(*map(_plain, ("none", "fp16", "dgc", "topk", "gaussian", "random"))),
    ),
    "keras": Study(
        "examples/README.md",
        "2 ranks, the examples' default settings",
        (
            *(
                Variant(f"model.fit, {name}", "keras_digits.py", 2, ("--compression", name))
                for name in ("none", "fp16", "dgc", "gaussian")
            ),
            Variant("own loop, none", "keras_loop.py", 2, ("--compression", "none")),
            Variant("own loop, dgc", "keras_loop.py", 2, ("--compression", "dgc")),
            Variant("own loop, topk by the tape", "keras_loop.py", 2, ("--compression", "topk", "--tape")),
        ),
    ),
    "scope": Study(
        "docs/decisions/core.md",
        "The examples on 2 ranks, their default settings",
        _examples(
            ("dense", ("--compression", "none")),
            ("largest of the bucket", ("--compression", "dgc")),
            ("largest of each tensor", ("--compression", "dgc", "--scope", "tensor")),
        ),
    ),
    "values": Study(
        "docs/decisions/wire.md",
        "The examples on 2 ranks, compression dgc, their default settings",
        _examples(*_VALUES),
    ),
    "clip-rule": Study(
        "docs/algorithm.md",
        "The LSTM example on 4 ranks, c = 0.1, everything else at its default",
        (
            Variant("dense, clipped at c", "torch_lstm.py", 4, ("--compression", "none")),
            Variant("each rank clipped at sqrt(N)*c (ours)", "torch_lstm.py", 4, _clip(1)),
            Variant("at c", "torch_lstm.py", 4, _clip(1 / math.sqrt(4))),
            Variant("at c/sqrt(N) (the paper's letter)", "torch_lstm.py", 4, _clip(1 / 4)),
        ),
    ),
}


def run(variant: Variant, seed: int) -> dict[str, Any]:
    """The example's RESULT line: from the file of results, or by training now."""
    key = " ".join([variant.example, f"-np {variant.ranks}", *variant.options, f"--seed {seed}"])
    return remembered(KEPT, key, lambda: train(variant, seed))


def train(variant: Variant, seed: int) -> dict[str, Any]:
    """Launch the example and read its last line."""
    command = ["horovodrun", "--gloo", "-np", str(variant.ranks), sys.executable, f"examples/{variant.example}"]
    said = output_of(
        [*command, *variant.options, "--seed", str(seed)], RUN_TIMEOUT_SECONDS, {"TF_CPP_MIN_LOG_LEVEL": "3"}
    )
    return json.loads(found_in(said, r"RESULT (\{.*\})"))


def table(study: Study, rows: dict[str, list[dict[str, Any]]]) -> str:
    """Mean and deviation over the seeds, and the sent ratio, as Markdown."""
    lines = ["| | quality | less sent |", "|---|---|---|"]
    for name, results in rows.items():
        values = [result["quality"] for result in results]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        accuracy = results[0]["quality_name"] == "accuracy"
        quality = (
            f"{100 * statistics.mean(values):.2f} ± {100 * spread:.2f} %"
            if accuracy
            else f"{statistics.mean(values):.3f} ± {spread:.3f} {results[0]['quality_name']}"
        )
        lines.append(f"| {name} | {quality} | {statistics.mean(r['ratio'] for r in results):.0f}× |")
    seeds = len(next(iter(rows.values())))
    text = f"{study.caption}; mean ± sd over {seeds} seeds."
    places = {(r["environment"].get("processor"), r["environment"]["torch"]) for each in rows.values() for r in each}
    if len(places) > 1:
        text += f" Rows are of {len(places)} machines or versions."
    return "\n".join([*lines, "", text])


def main() -> None:
    """Run a study."""
    from tqdm import tqdm

    parser = argparse.ArgumentParser(prog="python -m benchmarks.settings", description=__doc__.splitlines()[0])
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each variant (default: %(default)s)")
    args = parser.parse_args()
    study = STUDIES[args.study]
    rows: dict[str, list[dict[str, Any]]] = {variant.name: [] for variant in study.variants}
    for seed, variant in tqdm([(s, v) for s in range(args.seeds) for v in study.variants], unit="run"):
        rows[variant.name].append(run(variant, seed))
    text = table(study, rows)
    print(text)
    made_by = f"Made by `python -m benchmarks.settings {args.study}`."
    write_into_page(ROOT / study.page, args.study, f"{text} {made_by}")


if __name__ == "__main__":
    main()
