"""Settings of the tests on real ranks."""

from pathlib import Path

import pytest

from tests.helpers.standing_ranks import StandingRanks

KINDS = ("torch", "keras", "ddp")


def pytest_collection_modifyitems(items):
    """Tests on the same ranks come one after another, so that each set of ranks is started once."""
    items.sort(key=_ranks_of)


def _ranks_of(item):
    """By the mark ``ranks(workers, kind, last=0)``: 2, and the kind in the name of the file, where nothing is said."""
    if item.path.parent != Path(__file__).parent:
        return ()
    mark = item.get_closest_marker("ranks")
    workers, kind = (*(mark.args if mark else ()), None, None)[:2]
    kind = kind or next((kind for kind in KINDS if f"_{kind}_" in f"{item.path.stem}_"), KINDS[0])
    return KINDS.index(kind), -(workers or 2), mark.kwargs.get("last", 0) if mark else 0


def pytest_terminal_summary(terminalreporter):
    """To start one takes seconds."""
    terminalreporter.write_line(f"rank processes that were started by tests/parallel: {StandingRanks.started}")


@pytest.fixture(scope="package", autouse=True)
def ranks_end_with_these_tests():
    """Nothing that other tests measure runs beside ranks that wait."""
    yield
    StandingRanks.end_all()
