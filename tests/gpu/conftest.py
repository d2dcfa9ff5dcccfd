"""Marks the GPU tests and takes what they found; run.py writes it as JSON."""

from pathlib import Path
from typing import Any

import pytest

from attnops.core.problem import Target
from attnops.kernels.sgl import sources


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls wait for kernels of their graphs, so that a test knows what runs."""
    from attnops.hf.steps import captures

    monkeypatch.setattr(captures, "WAIT_S", 300.0)


@pytest.fixture
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Where a test puts its figures, by section and name. They go with the test's report;
    tests/gpu/part.py writes them down."""
    figures: dict[str, Any] = {}
    request.node.user_properties.append(("found", figures))
    return figures


@pytest.fixture(params=sources.SOURCES, ids=lambda source: str(source.namespace))
def flashmla_wheel(request: pytest.FixtureRequest) -> sources.Source:
    """Each wheel with FlashMLA's ops; one that is not there is skipped."""
    source: sources.Source = request.param
    if absent := source.package.absent(Target()):
        pytest.skip(str(absent))
    return source
