"""An elastic job on emulated hosts whose discovery script adds and removes hosts, the one of rank 0 among them."""

from __future__ import annotations

import json
import re
import sys

import pytest

from benchmarks.netlab import lab, unavailable
from tests.helpers.hosts_that_change import BATCHES_EACH, put_hosts
from tests.helpers.jobs import child_environment

pytestmark = pytest.mark.slow
SETTINGS = ["--dgc", "--density", "0.02", "--dgc-min-numel", "16", "--dgc-check-every", "5"]


def test_hosts_come_and_go_and_replicas_stay_equal(tmp_path):
    if reason := unavailable():
        pytest.skip(reason)
    # one more, then without the two that were first: rank 0 has left, and whoever came later has its state
    plan = ["host1:1,host2:1", "host1:1,host2:1,host3:1", "host3:1,host4:1"]
    put_hosts(tmp_path, plan[0])
    discover, metrics = tmp_path / "discover.sh", tmp_path / "metrics.jsonl"
    discover.write_text(f"#!/bin/sh\ncat {tmp_path}/hosts\n")
    discover.chmod(0o755)
    command = [
        "dgcrun", "--gloo", "-np", "2", "--min-np", "2", "--max-np", "3", "--host-discovery-script", str(discover),
        *SETTINGS, "--dgc-metrics-file", str(metrics), sys.executable, "-m", "tests.helpers.hosts_that_change",
        str(tmp_path), *plan,
    ]  # fmt: skip
    with lab(4) as hosts:
        ended = hosts.run(1, command, timeout=280, env=child_environment({}))
    output = ended.stdout + ended.stderr
    assert ended.returncode == 0, output[-6000:]
    ranks = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("host*.json"))]
    assert sorted(rank["rank"] for rank in ranks) == [0, 1]
    assert len({rank["fingerprint"] for rank in ranks}) == 1
    for rank in ranks:
        assert [sorted(part["hosts"]) for part in rank["parts"]] == [re.findall(r"host\d", hosts) for hosts in plan]
        assert rank["batch"] >= 3 * BATCHES_EACH
    # of the rank that was the first in the end, though it was not at the start
    assert re.search(r"dgc, density 0\.02\d*( on average .*)?: \d+ steps; ", output), output[-3000:]
    assert json.loads(metrics.read_text().splitlines()[-1])["final"]
