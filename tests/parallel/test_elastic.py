"""A worker of an elastic job is killed in the middle of a step: training goes on with two ranks, then with three.

Under local steps it is killed in the middle of an exchange.
"""

from __future__ import annotations

import importlib
import json
import socket
import sys

import pytest

from tests.helpers import keras_local_elastic_job, local_elastic_job
from tests.helpers.jobs import run

pytestmark = [pytest.mark.parallel, pytest.mark.slow]


def elastic(folder, how: str, job: str) -> tuple[list[dict], str]:
    """Run the job on three hosts of one slot each, all of them this machine; what its ranks found, and the output."""
    discover = folder / "discover.sh"
    # three names: a host on which a worker has failed is left alone for a while, whole
    hosts = ["localhost", "127.0.0.1", socket.gethostname()]
    discover.write_text("#!/bin/sh\n" + "".join(f"echo {host}:1\n" for host in hosts))
    discover.chmod(0o755)
    command = [
        "horovodrun", "-np", "3", "--min-np", "2", "--max-np", "3", "--host-discovery-script", str(discover),
        "--blacklist-cooldown-range", "3", "6", "--network-interfaces", "lo", "--elastic-timeout", "60",
        sys.executable, "-m", f"tests.helpers.{job}", str(folder), how,
    ]  # fmt: skip
    finished = run(command, timeout=300, environment={"DGC_TIMEOUT": "60", "HOROVOD_GLOO_TIMEOUT_SECONDS": "25"})
    assert finished.code == 0, finished.output[-6000:]
    return [json.loads(file.read_text()) for file in sorted(folder.glob("rank*.json"))], finished.output


def accounts_of(output: str) -> list[dict]:
    """What was owed, and what else a job looks at, whenever the ranks had met."""
    return [json.loads(line.split("account: ")[1]) for line in output.splitlines() if "account: " in line]


@pytest.fixture(
    scope="module", params=["elastic_job", "local_elastic_job", "keras_elastic_job", "keras_local_elastic_job"]
)
def job(request):
    return request.param, importlib.import_module(f"tests.helpers.{request.param}")


@pytest.fixture(scope="module", params=["", ", flushed"])
def undisturbed(request, job, tmp_path_factory):
    return request.param, elastic(tmp_path_factory.mktemp("undisturbed"), f"undisturbed{request.param}", job[0])[0]


def test_a_killed_worker_and_its_successor(tmp_path, undisturbed, job):
    flushed, others = undisturbed
    ranks, output = elastic(tmp_path, f"killed{flushed}", job[0])
    assert (tmp_path / "killed").exists()
    assert len(ranks) == 3, output[-4000:]
    assert len({rank["fingerprint"] for rank in ranks}) == 1
    for rank in ranks:
        sizes = rank["sizes"]
        assert rank["batch"] == len(sizes) == job[1].BATCHES
        assert sizes[0] == 3 and sizes[job[1].KILLED_AT + 1] == 2 and sizes[-1] == 3, "3 ranks, then 2, then 3"
        # as two runs of other batches; on a slow machine the successor comes late, and fewer share them
        assert 0.33 < rank["loss"] / others[0]["loss"] < 1.5
    accounts = accounts_of(output)
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


def test_an_undisturbed_elastic_job(undisturbed, job):
    _, ranks = undisturbed
    assert len(ranks) == 3 and len({rank["fingerprint"] for rank in ranks}) == 1
    assert ranks[0]["sizes"] == [3] * job[1].BATCHES


@pytest.mark.parametrize("kind", [local_elastic_job, keras_local_elastic_job], ids=["torch", "keras"])
def test_commits_within_a_round_of_local_steps(tmp_path, kind):
    """Ranks meet with the same weights, and a newcomer's inner optimizer is as old as that of the first rank."""
    ranks, output = elastic(tmp_path, "killed, within a round", kind.__name__.split(".")[-1])
    assert (tmp_path / "killed").exists()
    assert len(ranks) == 3 and {rank["batch"] for rank in ranks} == {kind.BATCHES}, output[-4000:]
    assert len({rank["fingerprint"] for rank in ranks}) == 1
    accounts = accounts_of(output)
    assert [account["ranks"] for account in accounts] == [3, 2, 3]
    for account in accounts:
        assert account["spread"] == 0 and account["in the round"] == 0
        assert account["difference"] <= 1e-6 * account["owed now"], "what the survivors owe has changed"
        assert len(set(account["inner steps"])) == 1, account
    assert 0 < accounts[1]["lost"] < accounts[1]["owed before"], "of the one that was killed"
    last_commit = kind.KILLED_AT // kind.WITHIN_A_ROUND * kind.WITHIN_A_ROUND
    assert accounts[1]["inner steps"][0] == accounts[1]["batch"] == last_commit
    assert all(len(set(account.get("moments", [True]))) == 1 for account in accounts), "a newcomer begins with none"
    assert 0.3 < ranks[0]["loss"] < 1
