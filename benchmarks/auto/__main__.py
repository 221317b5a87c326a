"""Auto beside dense and dgc by hand: two hosts, four links, real computing. Needs root on Linux.

Three models in PyTorch, two in Keras.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import ranks
from benchmarks.auto import tables
from benchmarks.auto.models import MODELS
from benchmarks.netlab import NetlabError, lab
from benchmarks.ranks import LaunchError, exit_on_signals
from benchmarks.report import environment, read_results, write_results

KERAS = ("Keras MLP, 0.4 M", "Keras ResNet-50, 23.8 M")
HOSTS, RATES = 2, ("100mbit", "1gbit", "10gbit", "none")
_SECONDS = 1800


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.auto", description=__doc__.splitlines()[0])
    made.add_argument(
        "--models", nargs="+", choices=[*MODELS, *KERAS], default=[*MODELS, *KERAS], metavar="M", help="default: all"
    )
    made.add_argument("--rates", nargs="+", default=list(RATES), metavar="R", help=f"default: {' '.join(RATES)}")
    made.add_argument("--file", type=Path, default=tables.FILE, help="of results (default: benchmarks/results/...)")
    return made


def measure(model: str, rate: str) -> list[dict[str, Any]]:
    """What each rank has found."""
    with tempfile.TemporaryDirectory() as folder, lab(HOSTS, rate) as hosts:
        worker = "benchmarks.auto.keras_worker" if model in KERAS else "benchmarks.auto.worker"
        ranks.launch(worker, [model, folder], HOSTS, hosts, _SECONDS)
        return [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(HOSTS)]


def main() -> None:
    """Do what the command line says."""
    options = parser().parse_args()
    exit_on_signals()
    cells = [(model, rate) for model in options.models for rate in options.rates]
    try:
        for model, rate in tqdm(cells, unit="cell", ncols=100):
            found = measure(model, rate)
            kept = read_results(options.file) if options.file.exists() else {}
            kept[f"{model}, {rate}"] = {
                "environment": environment(),
                "model": model,
                "rate": rate,
                "ranks": found,
            }
            write_results(options.file, json.dumps(kept) + "\n")
    except (NetlabError, LaunchError) as error:
        raise SystemExit(f"benchmarks.auto: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    print(tables.table(read_results(options.file)))


if __name__ == "__main__":
    main()
