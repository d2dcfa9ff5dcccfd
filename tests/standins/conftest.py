"""Fixtures of the stand-ins' tests."""

import pytest

from attnops.measured import store


@pytest.fixture
def all_have_run(monkeypatch, tmp_path):
    """No kernel has a record of where it ran, so that estimates alone decide."""
    path = tmp_path / "hardware.json"
    path.write_text("{}")
    monkeypatch.setattr(store, "HARDWARE", path)
    store.forget()
    yield
    monkeypatch.undo()
    store.forget()
