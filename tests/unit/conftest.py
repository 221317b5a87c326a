"""What tests of one process share: a test that takes `kernels` runs on every backend."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.data import EACH


@pytest.fixture(params=EACH)
def kernels(request: pytest.FixtureRequest) -> Any:
    """Each backend."""
    return request.param
