"""What each rank of `tests.helpers.on_ranks` runs: ``python -m tests.helpers.rank_main FOLDER KIND``.

It carries out each new file ``N.order`` in the folder, until one tells it to leave or its launcher has gone.
"""

from __future__ import annotations

import datetime
import faulthandler
import importlib
import itertools
import os
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

from tests.helpers.outcomes import LEAVE, Order, carry_out, read, write

_PAUSE = 0.01  # seconds between two looks for an order


def serve(folder: Path, rank: str, kind: str) -> None:
    """Carry out orders until one tells to leave, or the process that launched the ranks has gone."""
    for number in itertools.count():
        path = folder / f"{number}.order"
        while not path.exists():
            if not Path(f"/proc/{os.environ['DGC_TEST_LAUNCHER']}").exists():
                return
            time.sleep(_PAUSE)
        order: Order = read(path)
        if order == LEAVE:
            return
        faulthandler.dump_traceback_later(order.timeout, exit=True)
        with mock.patch.dict(os.environ, order.environment):
            if order.starts:
                _horovod(kind).init()
            outcome = carry_out(order)
        faulthandler.cancel_dump_traceback_later()
        write(folder / f"{number}.{rank}.outcome", outcome)


def _horovod(kind: str) -> Any:
    return importlib.import_module("horovod.torch" if kind == "torch" else "horovod.tensorflow")


def start_with_nodes(kind: str) -> None:
    """Let ``hvd.init`` declare the process sets of nodes, beside those of a test."""
    horovod, nodes = _horovod(kind), importlib.import_module("dgc_horovod.core.nodes")
    nodes.loss_by_nodes = lambda *_: ""  # small models would not gain
    agree = nodes.agree

    def with_any(collectives: Any, config: Any, *others: Any) -> Any:
        """Every test is one of nodes, but for those that say that they are not."""
        is_default = config.exchange == "flat" and config.local_steps is None
        return agree(collectives, config.replace(exchange="auto") if is_default else config, *others)

    nodes.agree = with_any
    init = horovod.init

    def with_nodes(process_sets: Any = ()) -> None:
        theirs = list(process_sets)
        init(process_sets=[*theirs, *nodes.declare(horovod.ProcessSet, None, theirs)])

    horovod.init = with_nodes


def start_with_pairs() -> None:
    """Declare the process sets of three ranks that tests ask for: the first ``hvd.init`` alone can."""
    import horovod.torch as hvd

    hvd.init(process_sets=[hvd.ProcessSet([0, 1]), hvd.ProcessSet([1, 2])])


def prepare(kind: str) -> str:
    """What comes before the first order; returns the rank."""
    if kind == "keras":  # Keras imports them where they are installed: a fifth of all that it imports
        sys.modules.update(dict.fromkeys(("matplotlib", "sklearn")))  # type: ignore[arg-type]
    else:
        if kind == "ddp":
            sys.modules["horovod"] = None  # type: ignore[assignment]  # as where it is not installed
        import torch

        torch.set_num_threads(1)
    if kind == "ddp":
        torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
        return os.environ["RANK"]
    if kind == "torch":
        importlib.import_module("tests.helpers.bound_before")
        if os.environ.get("HOROVOD_SIZE") == "3":
            start_with_pairs()
    if os.environ.get("DGC_TEST_NODES"):
        start_with_nodes(kind)
    return os.environ.get("HOROVOD_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]


def main() -> None:
    """Serve; ranks of torch.distributed end together."""
    kind = sys.argv[2]
    serve(Path(sys.argv[1]), prepare(kind), kind)
    if kind == "ddp":
        import torch.distributed as dist

        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
