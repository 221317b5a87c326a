"""An elastic script that knows Horovod only, and changes its own hosts: for tests/integration/test_elastic_hosts.py.

``python -m tests.helpers.hosts_that_change FOLDER HOSTS HOSTS ...``: a discovery script prints FOLDER/hosts, which
holds the first HOSTS (``host1:1,host2:1``) at first; after 20 batches with all of them rank 0 writes the next ones.
Every rank that sees the end writes FOLDER/NAME-OF-ITS-HOST.json.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

from tests.helpers.regression import step
from tests.helpers.training import batches, fingerprint, smooth_model

BATCHES_EACH = 20


def put_hosts(folder: Path, hosts: str) -> None:
    """Let the discovery script print `hosts` from now on."""
    new = folder / "hosts.new"
    new.write_text("".join(f"{host}\n" for host in hosts.split(",")))
    os.replace(new, folder / "hosts")


def train(state: Any, model: torch.nn.Module, optimizer: Any, folder: Path, plan: list[str]) -> None:
    """What is run again whenever the ranks change; `plan`: the hosts of each part of the run."""
    data = iter(batches(10**6, hvd.rank(), seed=state.batch))
    while state.part < len(plan):
        x, y = next(data)
        step(model, optimizer, x, y)
        state.batch += 1
        names = hvd.allgather_object(socket.gethostname())
        asked = [host.split(":")[0] for host in plan[state.part].split(",")]
        if sorted(names) == sorted(asked):
            state.seen += 1
        else:
            time.sleep(0.1)  # hosts take their time to come
        if state.seen == BATCHES_EACH:
            state.parts = [*state.parts, {"hosts": names, "batch": state.batch}]
            state.part, state.seen = state.part + 1, 0
            if hvd.rank() == 0 and state.part < len(plan):
                put_hosts(folder, plan[state.part])
        state.commit()


def main() -> None:
    """Be one worker."""
    folder, plan = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    hvd.init()
    model = smooth_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, batch=0, part=0, seen=0, parts=[])
    hvd.elastic.run(train)(state, model, optimizer, folder, plan)
    found = {"fingerprint": fingerprint(model), "parts": state.parts, "rank": hvd.rank(), "batch": state.batch}
    (folder / f"{socket.gethostname()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
