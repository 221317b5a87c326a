"""A GPT of 5.1 M parameters on two hosts behind a slow link with delay: AdamW, dense and with local steps."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import ranks
from benchmarks.internet import tables
from benchmarks.internet.worker import NO_OP
from benchmarks.netlab import Lab, NetlabError, lab
from benchmarks.quality.training import Run
from benchmarks.quality.variants import AVERAGED, LOCAL, PER_STEP
from benchmarks.ranks import LaunchError, exit_on_signals
from benchmarks.report import environment, read_results, write_results

HOSTS, DENSE, FROZEN = 2, tables.DENSE, tables.FROZEN
FIRST_STEPS, NO_OP_STEPS = 12, 60  # of dense behind the link, whose run takes more than an hour; of no exchange
ROUND_STEPS = 30  # of uncompressed local steps: whole rounds
_SECONDS = 7200
EPILOG = """\
What a run with dense steps learns is measured with both ranks on this machine; its seconds behind the link are its
steps times the time of one there. It needs root, and takes an hour and a half a seed on 2 cores.
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.internet", description=__doc__, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    made.add_argument("--rate", default="50mbit", metavar="R", help="of each link (default: %(default)s)")
    made.add_argument("--delay", default="40ms", metavar="D", help="from host to host (default: %(default)s)")
    made.add_argument("--loss", default="0%", metavar="L", help="of packets (default: %(default)s)")
    made.add_argument("--task", default="gpt", metavar="T", help="of benchmarks.quality (default: %(default)s)")
    made.add_argument("--seeds", type=int, nargs="+", default=[0], metavar="S", help="default: 0")
    made.add_argument("--steps", type=int, metavar="S", help="of each run (default: whole runs)")
    made.add_argument("--file", type=Path, default=tables.FILE, help="of results (default: benchmarks/results/...)")
    return made


def learn(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """The runs of a seed that learn the same behind any link, by name; both ranks are on this machine."""
    names = (DENSE, FROZEN)
    return dict(zip(names, _launch([_order(options, name, seed) for name in names], None), strict=True))


def measure(options: argparse.Namespace, seed: int) -> tuple[float, dict[str, Any]]:
    """What the link carries, and the runs of a seed behind it, by name."""
    with lab(HOSTS, options.rate, 1, options.delay, options.loss) as hosts:
        link = round(hosts.one_way(), 1)
        orders = [
            {**_order(options, DENSE, seed, NO_OP_STEPS), "exchanges": False},
            _order(options, DENSE, seed, FIRST_STEPS),
            _order(options, PER_STEP, seed, NO_OP_STEPS),
            *(_order(options, name, seed) for name in LOCAL),
            *(_order(options, name, seed, ROUND_STEPS) for name in AVERAGED),
        ]
        timed = _launch(orders, hosts)
    return link, dict(zip([NO_OP, tables.BEHIND, PER_STEP, *LOCAL, *AVERAGED], timed, strict=True))


def _is_half_done(found: dict[str, Any], options: argparse.Namespace) -> bool:
    """Whether a study was broken off after what is learnt, which was as this command would do it here."""
    same = found.get("environment") == environment() and found.get("steps") == options.steps
    return same and "link" not in found


def _order(options: argparse.Namespace, variant: str, seed: int, most: int | None = None) -> dict[str, Any]:
    run = Run(options.task, variant, HOSTS, seed, real=True)
    whole = options.steps or run.steps
    return {"run": asdict(run), "steps": min(whole, most or whole), "exchanges": True}


def _launch(orders: Sequence[dict[str, Any]], hosts: Lab | None) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        words = [str(file), *map(json.dumps, orders)]
        ranks.launch("benchmarks.internet.worker", words, HOSTS, hosts, _SECONDS)
        found: list[dict[str, Any]] = json.loads(file.read_text())
    return found


def main() -> None:
    """Do what the command line says."""
    options = parser().parse_args()
    exit_on_signals()
    where = f"{options.task}, {options.rate}, {options.delay}, {options.loss}"
    try:
        for seed in options.seeds:
            kept = read_results(options.file) if options.file.exists() else {}
            key = f"{where}, seed {seed}"
            if not _is_half_done(kept.get(key, {}), options):
                kept[key] = {"environment": environment(), "steps": options.steps, "runs": learn(options, seed)}
                write_results(options.file, json.dumps(dict(sorted(kept.items()))) + "\n")
            found = kept[key]
            found["link"], behind = measure(options, seed)
            found["runs"] |= behind
            write_results(options.file, json.dumps(dict(sorted(kept.items()))) + "\n")
    except (NetlabError, LaunchError) as error:
        raise SystemExit(f"benchmarks.internet: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    print(tables.sooner(read_results(options.file)))


if __name__ == "__main__":
    main()
