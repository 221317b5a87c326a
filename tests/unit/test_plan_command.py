"""``dgcrun --plan``: what it prints, and what it refuses in words."""

from __future__ import annotations

import pytest

from dgc_horovod.errors import ConfigError
from dgc_horovod.launch import cli
from dgc_horovod.planning.cost_model import Cost
from dgc_horovod.tools import plan

PLAN = ["--plan", "--model-size", "300K", "--step-ms", "5", "--link-gbps", "0.1"]


def test_a_plan_says_what_to_take_and_from_how_many_workers_on(capsys):
    assert cli.run([*PLAN, "--workers-per-node", "8"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("0.3 M elements, 5 ms of computing a step, density 0.001, 8 workers a card of 0.1 Gbit/s")
    verdicts = [line for line in said.splitlines() if line.startswith("N = ")]
    assert verdicts[0].startswith(("N = 16:", "N = 16 to ")) and verdicts[-1].split(":")[0].endswith("1,024")
    # one star in each row of four tables, the method to take
    rows = [line for line in said.splitlines() if line.split() and line.split()[0] in ("16", "64", "1,024")]
    assert len(rows) == 3 * 4 and all(row.count("*") == 1 for row in rows)
    assert max(map(len, said.splitlines())) <= 120


def test_nodes_of_any_size_are_planned(capsys):
    """Not powers of two only: two nodes of them, four, and so on."""
    assert cli.run([*PLAN, "--workers-per-node", "6"]) == 0
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert [row for row in rows if row != "N"] == 4 * ["12", "24", "48", "96", "192", "384", "768"]


@pytest.mark.parametrize(
    ("words", "told", "untold"),
    [
        ([], ["PowerSGD", "\n       2 "], ["hierarchical", "budget"]),  # hosts of one worker: no columns of nodes
        (["--latency-ms", "0"], ["0.1 Gbit/s, 0 ms"], []),
        # a run of known length is priced at its density, not at that of a run of any length
        (["--compression", "auto", "--dgc-total-steps", "5000"], ["density 0.004,"], []),
        (["--dgc-exchange", "hierarchical", "--dgc-node-size", "4"], ["4 workers a card"], []),  # it had been ignored
    ],
)
def test_what_a_plan_is_made_for(words, told, untold, capsys):
    assert cli.run([*PLAN, *words]) == 0
    said = capsys.readouterr().out
    assert all(text in said for text in told) and not any(text in said for text in untold)


def priced(name: str, seconds: float) -> Cost:
    return Cost(name, 0, 0.0, 0.0, seconds, 0, computing=0.1)


@pytest.mark.parametrize(
    ("gains", "said"), [([2.0, 8.0, 3.0], "2.0 to 8.0"), ([5.0, 2.0, 4.0], "2.0 to 5.0"), ([3.01, 3.0, 3.02], "3.0")]
)
def test_the_gain_of_a_range_is_the_least_and_the_most_of_it(gains, said):
    """Not that of its ends."""
    times = [{"dense": gain, "fp16": 9.0, "flat": 1.0} for gain in gains]
    found = {2 << i: {name: priced(name, each[name]) for name in each} for i, each in enumerate(times)}
    line = f"N = 2 to 8: --dgc-exchange flat, {said} times as fast as the better of dense and fp16"
    assert plan.verdicts(found) == [line]


@pytest.mark.parametrize("flag", [flag for told, _ in cli.TOLD for flag in told])
def test_an_empty_value_is_refused(flag):
    """It had switched off what was asked for."""
    for words in (["-np", "2"], PLAN, ["--doctor", "-np", "2"]):
        with pytest.raises(ConfigError, match=f"^{flag} is empty; leave it out, or give it a value$"):
            cli.run([*words, f"{flag}=", "true"])


def test_with_a_budget_the_densities_are_shown_that_were_priced(capsys):
    """The density that was asked for had been shown."""
    assert cli.run([*PLAN, "--dgc-budget", "4kB"]) == 0
    said = capsys.readouterr().out
    first, second, *_ = said.splitlines()
    assert "density up to 0.001," in first and second.startswith("budget: 4 kB a step into a network card")
    columns, *rows = [
        line.replace("*", " ").split()
        for line in said.split("density, within the budget\n")[1].split("\n\n")[0].splitlines()
    ]
    assert columns == ["N", "dense", "fp16", "PowerSGD", "flat", "sharded"] and rows[0][0] == "2"
    densities = [float(row[4]) for row in rows]
    assert densities == sorted(densities, reverse=True) and densities[0] > densities[-1] == 0.0001
    assert max(map(len, said.splitlines())) <= 120


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--plan"], "--plan needs --step-ms"),
        ([*PLAN, "--latency-ms", "soon"], "--latency-ms must be a number, got 'soon'"),
        ([*PLAN, "--latency-ms", "-1"], "--latency-ms must be a number from 0 "),
        ([*PLAN, "--step-ms", "inf"], "--step-ms must be a number, got 'inf'"),
        ([*PLAN, "--step-ms", "nan"], "--step-ms must be a number, got 'nan'"),
        ([*PLAN, "--step-ms", "0"], "--step-ms must be a number from 1e-9 to 1e9, got 0.0"),
        ([*PLAN, "--link-gbps", "1e300"], "--link-gbps must be a number from 1e-9 "),
        ([*PLAN, "--model-size", "1001B"], "from 1 to 1000B, .* got 1001000000000"),
        ([*PLAN, "--workers-per-node", "0"], "--workers-per-node must be a whole number >= 1"),
        ([*PLAN, "--workers-per-node", "513"], "two nodes of 513 are beyond; --workers-per-node may be at most 512"),
        ([*PLAN, "-H", "a:8,b:8"], "--plan needs no hosts; give the workers of one by --workers-per-node"),
        (
            [*PLAN, "--workers-per-node", "8", "--dgc-exchange", "hierarchical", "--dgc-node-size", "4"],
            "node_size is 4, and a host has 8 workers",
        ),
        ([*PLAN, "--step-ms", "1_0"], "--step-ms must be a number, got '1_0'"),
        ([*PLAN, "--workers-per-node", "many"], "--workers-per-node must be a whole number"),
        (
            [*PLAN, "--workers-per-node", "9" * 5000],
            r"--workers-per-node must be a whole number below 2\^63, got '9{12}\.\.\.9{13}'",
        ),
        (
            [*PLAN, "--dgc-local-steps", "15"],
            "--plan prices .* local steps exchange every 15 steps; leave local steps out",
        ),
        (
            [*PLAN, "--compression", "auto", "--dgc-total-steps", "1000"],
            "uncompressed exchange in a run of 1,000 steps",
        ),
        (["-np", "2", "--step-ms", "1", "true"], "--step-ms goes with --plan; leave it out of a job"),
        (
            ["--show-config", "--model-size", "junk"],
            "--model-size goes with --plan; leave .* --show-config",
        ),
        ([*PLAN, "--report", "x.html"], "--report goes with a job and --show-config; leave it out of --plan"),
        (["--print-env", "--dgc", "--report", "x.html"], "--report goes with a job and --show-config"),
    ],
)
def test_what_is_missing_or_wrong(words, said):
    with pytest.raises(ConfigError, match=said):
        cli.run(words)
