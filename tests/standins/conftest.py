"""Fixtures of the stand-ins' tests."""

import pytest

from tests.helpers import where_kernels_ran
from tests.standins.vendors import VENDORS


@pytest.fixture
def all_have_run():
    """No kernel has a record of where it ran, so that estimates alone decide."""
    with where_kernels_ran("{}"):
        yield


@pytest.fixture
def standin(request):
    """The record of calls of the stand-in that a file is about: the vendor it calls NAME."""
    with VENDORS[request.module.NAME].running() as calls:
        yield calls


@pytest.fixture
def calls(standin):
    return standin
