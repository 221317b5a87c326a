"""Settings of the tests on real ranks."""

import pytest

from tests.helpers.standing_ranks import StandingRanks


@pytest.fixture(scope="package", autouse=True)
def ranks_end_with_these_tests():
    """Nothing that other tests measure runs beside ranks that wait."""
    yield
    StandingRanks.end_all()
