"""A kernel that has never met its hardware says so wherever it is named to a user."""

import io

import pytest
import torch

import attnops
from attnops.measured import never_run, store
from attnops.problem import Target
from attnops.testing import Features, Source, builders

SM90, SM100 = Target.parse("sm90"), Target.parse("sm100")


@pytest.fixture
def file(monkeypatch, tmp_path):
    """The file, with two of the kernels in it, one of which ran."""
    path = tmp_path / "hardware.json"
    path.write_text('{"paged_attention.fa3": ["sm90"], "paged_attention.fa4": []}')
    monkeypatch.setattr(store, "HARDWARE", path)
    store.ran_on.cache_clear()
    yield
    store.ran_on.cache_clear()


def test_what_is_said_of_a_kernel(file):
    assert never_run("paged_attention", "fa3", SM90) == never_run("paged_attention", "fa3", Target("cpu")) == ""
    assert never_run("paged_attention", "fa3", SM100) == "never run on sm100"
    assert never_run("paged_attention", "fa4", SM100) == "never run on hardware"
    assert never_run("paged_attention", "of_another_package", SM100) == ""


def explained(target):
    call = builders.paged(Source(0), (1,) * 4, (300,) * 4, 64, Features(dtype=torch.bfloat16, head_dim=128, q_heads=8), padding=0)
    return attnops.explain(lambda: attnops.ops.paged_attention(*call.args, max_seqlen_q=1), target=target, quiet=True)


def test_explain_says_it(file):
    pytest.importorskip("rich", reason="the cli extra prints tables")
    from rich.console import Console

    from attnops.cli import tables

    for target in ("sm90", "sm100"):
        found = explained(target)
        console = Console(width=200, record=True, file=io.StringIO())
        tables.show_explanation(found, console)
        for text in (str(found), console.export_text()):
            assert text.count("never run on") == 1 and "; never run on hardware" in next(x for x in text.splitlines() if "fa4" in x)
        [call] = found.as_dict()["calls"]
        assert call["never_run"] == ["fa4"]
