"""An optimizer that is gone leaves nothing behind: no file, no thread, no memory, however many there have been."""

from __future__ import annotations

import pytest

from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.parallel
# Counts of what it has exchanged stay, for the line at the end of the job.
OBJECTS, KILOBYTES = 40, 100  # a cycle
LONG = pytest.param({"DGC_TEST_CYCLES": "300"}, id="long", marks=[pytest.mark.slow, pytest.mark.timeout(5000)])
each_length = pytest.mark.parametrize("length", [pytest.param({}, id="short"), LONG])


def ranks(case, length):
    """What the case returns on each rank."""
    seconds = 4000 if length else 280
    found = run_ranks(
        2, [case], timeout=seconds, environment={"CASE_TIMEOUT": str(seconds), **length}, fresh=bool(length)
    )
    return [rank[case] for rank in found]


def check(found, objects=OBJECTS, kilobytes=KILOBYTES):
    assert found["alive"] == 0 and found["files"] <= 1 and found["threads"] <= 1, found
    assert found["objects"] < objects and found["kilobytes"] < kilobytes, found


@each_length
def test_torch_optimizers(length):
    for found in ranks("cycles.optimizers", length):
        for each in found.values():
            check(each)


def test_a_keras_optimizer_takes_its_state_with_it():
    """Its exchange, the clock that noticed reloads and the functions of its graphs had referred to each other."""
    pytest.importorskip("horovod.tensorflow", reason="Horovod is not built for TensorFlow here")
    assert [rank["keras_cycles.at_once"] for rank in run_ranks(2, ["keras_cycles.at_once"])] == [{}, {}]


@pytest.mark.slow  # a minute, as TensorFlow traces graphs
@each_length
@pytest.mark.parametrize("case", ["eager", "fit"])
def test_keras_optimizers(length, case):
    """Graphs, which TensorFlow keeps, had kept optimizers alive with u, v and slots; and a thread all clocks."""
    pytest.importorskip("horovod.tensorflow", reason="Horovod is not built for TensorFlow here")
    for found in ranks(f"keras_cycles.{case}", length):
        alone = found.pop("alone", None)
        for each in found.values():
            if alone is None:
                check(each)
            else:  # our graphs are larger, and TensorFlow keeps what they hold, slots and zeros of their size
                check(each, 5 * alone["objects"], alone["kilobytes"] + 3 * 4096)
