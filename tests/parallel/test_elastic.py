"""A worker of an elastic job is killed: training goes on with two ranks, then with three.

It is killed in the middle of a step, or with local steps of an exchange; under Keras between two steps.
"""

from __future__ import annotations

import json
import socket
import sys

import pytest

from tests.helpers.adapters import on_adapters
from tests.helpers.elastic_job import BATCHES, KILLED_AT, WITHIN_A_ROUND
from tests.helpers.jobs import run
from tests.helpers.launchers import torchrun

pytestmark = [pytest.mark.parallel, pytest.mark.slow]
each_adapter = on_adapters("Horovod", "Keras")


def elastic(folder, *words: str) -> tuple[list[dict], list[dict]]:
    """Run the job on three hosts of one slot each, all of them this machine.

    Returns:
        What its ranks found; what was owed, and what else the job looks at, whenever the ranks had met.
    """
    discover = folder / "discover.sh"
    # three names: a host on which a worker has failed is left alone for a while, whole
    hosts = ["localhost", "127.0.0.1", socket.gethostname()]
    discover.write_text("#!/bin/sh\n" + "".join(f"echo {host}:1\n" for host in hosts))
    discover.chmod(0o755)
    command = [
        "horovodrun", "-np", "3", "--min-np", "2", "--max-np", "3", "--host-discovery-script", str(discover),
        "--blacklist-cooldown-range", "3", "6", "--network-interfaces", "lo", "--elastic-timeout", "60",
        sys.executable, "-m", "tests.helpers.elastic_job", str(folder), *words,
    ]  # fmt: skip
    finished = run(command, timeout=300, environment={"DGC_TIMEOUT": "60", "HOROVOD_GLOO_TIMEOUT_SECONDS": "25"})
    assert finished.code == 0, finished.output[-6000:]
    ranks = [json.loads(file.read_text()) for file in sorted(folder.glob("rank*.json"))]
    assert len(ranks) == 3 and len({rank["fingerprint"] for rank in ranks}) == 1, finished.output[-4000:]
    assert {rank["batch"] for rank in ranks} == {BATCHES}
    assert (folder / "killed").exists() == ("killed" in words[-1])
    return ranks, [
        json.loads(line.split("account: ")[1]) for line in finished.output.splitlines() if "account: " in line
    ]


@each_adapter
@pytest.mark.parametrize("method", ["dgc", "local"])
@pytest.mark.parametrize("flushed", ["", ", flushed"])
def test_a_killed_worker_and_its_successor(tmp_path_factory, adapter, method, flushed):
    others, _ = elastic(tmp_path_factory.mktemp("undisturbed"), adapter.name, method, f"undisturbed{flushed}")
    assert others[0]["sizes"] == [3] * BATCHES
    ranks, accounts = elastic(tmp_path_factory.mktemp("killed"), adapter.name, method, f"killed{flushed}")
    for rank in ranks:
        sizes = rank["sizes"]
        assert len(sizes) == BATCHES
        assert sizes[0] == 3 and sizes[KILLED_AT + 1] == 2 and sizes[-1] == 3, "3 ranks, then 2, then 3"
        # as two runs of other batches; on a slow machine the successor comes late, and fewer share them
        assert 0.33 < rank["loss"] / others[0]["loss"] < 1.5
    smaller, larger = accounts[1:3]
    assert smaller["ranks"] == 2 and larger["ranks"] == 3
    for account in (smaller, larger):
        assert not account.get("spread") and len(set(account.get("inner steps", []))) <= 1, account
        assert account["difference"] <= 1e-6 * account["owed now"], "what the survivors owe has changed"
    if flushed:
        assert smaller["owed before"] == smaller["lost"] == 0, "what was committed was flushed before"
    else:
        assert 0 < smaller["lost"] < smaller["owed before"], "the last commit of the one that was killed"
        assert larger["lost"] <= 1e-6 * larger["owed before"], "nobody was lost when the third one came back"


@each_adapter
def test_commits_within_a_round_of_local_steps(tmp_path, adapter):
    """Ranks meet with the same weights, and a newcomer's inner optimizer is as old as that of the first rank."""
    ranks, accounts = elastic(tmp_path, adapter.name, "local", "killed, within a round")
    assert [account["ranks"] for account in accounts] == [3, 2, 3]
    for account in accounts:
        assert account["spread"] == 0 and account["in the round"] == 0
        assert account["difference"] <= 1e-6 * account["owed now"], "what the survivors owe has changed"
        assert len(set(account["inner steps"])) == 1, account
    assert 0 < accounts[1]["lost"] < accounts[1]["owed before"], "of the one that was killed"
    last_commit = KILLED_AT // WITHIN_A_ROUND * WITHIN_A_ROUND
    assert accounts[1]["inner steps"][0] == accounts[1]["batch"] == last_commit
    assert all(len(set(account.get("moments", [True]))) == 1 for account in accounts), "a newcomer begins with none"
    assert 0.3 < ranks[0]["loss"] < 1


def restarted(folder, how):
    folder.mkdir()
    command = [*torchrun(2, "--max-restarts=1"), "-m", "tests.helpers.ddp_elastic_job", str(folder), how]
    code, log = run(command, 150, {"DGC_TIMEOUT": "20", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
    assert code == 0, log[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("how", ["dies", "raises"])
def test_torchrun_starts_a_job_again_from_its_checkpoint(how, tmp_path):
    """As if nothing had happened."""
    wanted, found = restarted(tmp_path / "whole", "never"), restarted(tmp_path / "cut", how)
    for before, after in zip(wanted, found, strict=True):
        assert after["attempt"] >= 1 and after["first"] == 4 and after["weights"] == before["weights"]
