"""What each rank of `tests.helpers.ranks` runs: ``python -m tests.helpers.rank_main FOLDER [CASE...]``.

Without cases it serves: it runs what each new file ``N.order`` in the folder lists, until its launcher has gone.
"""

from __future__ import annotations

import faulthandler
import importlib
import itertools
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

_PAUSE = 0.01  # seconds between two looks for an order


def run_cases(cases: list[str]) -> dict[str, Any]:
    """What each case returns; a case that raises ends this rank with its traceback."""
    results = {}
    for case in cases:
        faulthandler.dump_traceback_later(float(os.environ.get("CASE_TIMEOUT", "200")), exit=True)
        module, function = case.split(".")
        results[case] = getattr(importlib.import_module(f"tests.parallel.cases.{module}"), function)()
    faulthandler.cancel_dump_traceback_later()
    return results


def write(path: Path, results: dict[str, Any]) -> None:
    """Write JSON so that nobody reads a part of it."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(results))
    partial.rename(path)


def serve(folder: Path, rank: str) -> None:
    """Run orders until the process that launched the ranks has gone."""
    for number in itertools.count():
        order = folder / f"{number}.order"
        while not order.exists():
            if not Path(f"/proc/{os.environ['DGC_TEST_LAUNCHER']}").exists():
                return
            time.sleep(_PAUSE)
        asked = json.loads(order.read_text())
        with mock.patch.dict(os.environ, asked["environment"]):
            results = run_cases(asked["cases"])
        write(folder / f"{number}.{rank}.json", results)


def start_with_nodes() -> None:
    """Let ``hvd.init`` declare the process sets of nodes, beside those of a case."""
    adapter = "torch" if os.environ["DGC_TEST_KIND"] == "torch" else "tensorflow"
    horovod, nodes = (importlib.import_module(name) for name in (f"horovod.{adapter}", "dgc_horovod.core.nodes"))
    nodes.loss_by_nodes = lambda *_: ""  # small models would not gain
    agree = nodes.agree

    def with_any(collectives: Any, config: Any, *others: Any) -> Any:
        """Every case is one of nodes, but for those that say that they are not."""
        is_default = config.exchange == "flat" and config.local_steps is None
        return agree(collectives, config.replace(exchange="auto") if is_default else config, *others)

    nodes.agree = with_any
    init = horovod.init

    def with_nodes(process_sets: Any = ()) -> None:
        theirs = list(process_sets)
        init(process_sets=[*theirs, *nodes.declare(horovod.ProcessSet, None, theirs)])

    horovod.init = with_nodes


def start_with_pairs() -> None:
    """Declare the process sets of three ranks that cases ask for: the first ``hvd.init`` alone can."""
    import horovod.torch as hvd

    hvd.init(process_sets=[hvd.ProcessSet([0, 1]), hvd.ProcessSet([1, 2])])


def main() -> int:
    """Run the cases and write this rank's JSON."""
    folder, cases = Path(sys.argv[1]), sys.argv[2:]
    rank = os.environ.get("HOROVOD_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
    if os.environ["DGC_TEST_KIND"] == "torch":
        import torch

        torch.set_num_threads(1)
        importlib.import_module("tests.helpers.bound_before")
        if os.environ.get("HOROVOD_SIZE") == "3":
            start_with_pairs()
    else:  # Keras imports them where they are installed: a fifth of all that it imports
        sys.modules.update(dict.fromkeys(("matplotlib", "sklearn")))  # type: ignore[arg-type]
    if os.environ.get("DGC_TEST_NODES"):
        start_with_nodes()
    try:
        if cases:
            write(folder / f"0.{rank}.json", run_cases(cases))
        else:
            serve(folder, rank)
    except Exception:
        print(traceback.format_exc(), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
