"""Tests of graphs have a kernel of paged attention that may not be captured."""

import pytest

from tests.graphs.models import boundary


@pytest.fixture(autouse=True)
def _boundary():
    boundary()
