"""Settings of the tests on real ranks.

A test with the mark ``on_ranks(workers, kind, ...)`` is called on every rank, with its fixtures' values; a parameter
``workers``, ``controller`` or ``adapter`` of the test takes the place of the mark's. See `tests.helpers.on_ranks`.
"""

from pathlib import Path

import pytest

from tests.helpers.on_ranks import KINDS, kind_of, on_ranks
from tests.helpers.standing_ranks import StandingRanks


def pytest_collection_modifyitems(items):
    """Tests on the same ranks come one after another, so that each set of ranks is started once."""
    items.sort(key=_ranks_of)


def pytest_pyfunc_call(pyfuncitem):
    """Call a marked test on its ranks."""
    marks = list(pyfuncitem.iter_markers("on_ranks"))
    workers, kind = _asked(pyfuncitem, marks)
    if not workers:
        return None
    settings = {name: value for mark in reversed(marks) for name, value in mark.kwargs.items() if name != "late"}
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    settings |= {name: arguments[name] for name in ("controller",) if name in arguments}
    on_ranks(pyfuncitem.obj, workers, kind, arguments=arguments, **{**settings, "last": bool(settings.get("last"))})
    return True


def _asked(item, marks):
    """Workers and kind of ranks of a test; 0 workers where it runs in this process."""
    if not marks:
        return 0, None
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    workers, kind = (*marks[0].args, None, None)[:2]
    kind = parameters["adapter"].kind if "adapter" in parameters else kind
    return parameters.get("workers", 2 if workers is None else workers), kind


def _ranks_of(item):
    """By the mark ``on_ranks``, or ``ranks(workers, kind, last=0)`` of a test that calls `on_ranks` itself.

    Tests that are ``late`` come behind others on the same ranks, which would have to end otherwise.
    """
    if item.path.parent != Path(__file__).parent:
        return ()
    marks = list(item.iter_markers("on_ranks"))
    workers, kind = _asked(item, marks)
    if not workers:
        marks = list(item.iter_markers("ranks"))
        workers, kind = (*(marks[0].args if marks else ()), None, None)[:2]
    last, late = (next((mark.kwargs[name] for mark in marks if name in mark.kwargs), 0) for name in ("last", "late"))
    return KINDS.index(kind or kind_of(item.path.stem)), -(workers or 2), int(last), late


def pytest_terminal_summary(terminalreporter):
    """To start one takes seconds."""
    terminalreporter.write_line(f"rank processes that were started by tests/parallel: {StandingRanks.started}")


@pytest.fixture(scope="package", autouse=True)
def ranks_end_with_these_tests():
    """Nothing that other tests measure runs beside ranks that wait."""
    yield
    StandingRanks.end_all()


@pytest.fixture(params=[2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def workers(request):
    """The number of ranks, of tests that are the same on any."""
    return request.param
