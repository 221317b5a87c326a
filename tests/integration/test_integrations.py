"""Training loops of other libraries, compressed by variables and by lines in the script: the rows of the benchmark."""

from __future__ import annotations

import pytest

from benchmarks.integrations import running
from benchmarks.integrations.rows import DENSITY, ROWS
from benchmarks.integrations.running import BY_VARIABLE

pytestmark = pytest.mark.parallel


def test_accelerate_by_variables(tmp_path):
    """The one of the rows that is quick: an unedited job, and its last line."""
    pytest.importorskip("accelerate")
    pytest.importorskip("sklearn")
    said, ranks = running.launched(BY_VARIABLE, tmp_path, ["accelerate"], running.variables({"density": DENSITY}))
    first, second = (rank["accelerate"][BY_VARIABLE] for rank in ranks)
    assert first["digest"] == second["digest"] and first["loss"] < 1
    assert running.SAVED.search(said) and 20 < first["stats"]["bytes_dense"] / first["stats"]["bytes_sent"] < 60, said


@pytest.mark.slow
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("names", running.together(ROWS), ids=" ".join)
def test_rows(names):
    """Exact at density 1, equal replicas, bytes, learning, resuming bit for bit."""
    pytest.importorskip("sklearn")
    found = running.run(names)
    if missing := found[names[0]].get("missing"):
        pytest.skip(f"not installed: {', '.join(missing)}")
    assert not [fault for name in names for fault in running.faults(ROWS[name], found[name])]
