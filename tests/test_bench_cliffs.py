"""The suite `cliffs` at toy size, over a stand-in for CUDA graphs: which calls capture."""

import pytest

pytest.importorskip("transformers", reason="the suite measures transformers models")
pytest.importorskip("peft", reason="a change is that of an adapter")

from attnops.bench import cliffs, ways
from attnops.bench.rows import LeftOut
from attnops.hf import Decode
from attnops.tune.clock import seconds
from tests.graphs.standin import StandIn
from tests.test_bench import TOY


@pytest.fixture
def captures(monkeypatch):
    """By change, whether the first call captured, and the second."""
    from transformers.integrations.peft import MIN_PEFT_VERSION
    from transformers.utils.peft_utils import check_peft_version

    try:
        check_peft_version(MIN_PEFT_VERSION)
    except ValueError as error:
        pytest.skip(f"transformers' check_peft_version: {error}")
    device = StandIn()
    decode = Decode("breakable", inner="eager", graphs=device)
    monkeypatch.setitem(
        ways.WAYS, "cliffs", {"attnops_breakable": ways.How({"cache": "paged", "decode": decode})}
    )
    taken = []

    def counted(run):
        before = device.calls.count("begin")
        found = seconds(run)
        taken.append(device.calls.count("begin") > before)
        return found

    monkeypatch.setattr(cliffs, "seconds", counted)
    rows = [row for case in cliffs.cases(TOY).values() for row in case()]
    for row in rows:
        assert row["first_s"] - row["then_s"] == pytest.approx(row["cost_s"], abs=2e-3)
    changes = [row["case"].removeprefix("llama 2x12, ") for row in rows]
    assert changes == [*cliffs.CHANGES, cliffs.ADAPTER]
    return dict(zip(changes, zip(taken[::2], taken[1::2], strict=True), strict=True))


def test_changes_are_met_once(captures):
    """The same call again captures nothing, and where the graphs serve a change, nor does the
    first."""
    assert not any(again for _, again in captures.values())
    assert not any(
        captures[change][0] for change in ("a second cache of the same size", "a second thread")
    )
    assert captures["eight times the batch"][0] and captures[cliffs.ADAPTER][0], (
        "the call before the change was warm, and this one is not"
    )


def refuse(min_version):
    raise ValueError("The version of PEFT is not compatible")


@pytest.mark.parametrize(
    ("place", "answer", "why"),
    [
        ("transformers.utils.peft_utils.check_peft_version", refuse, "not compatible"),
        ("attnops.bench.cliffs.find_spec", lambda name: None, "peft is not installed"),
    ],
)
def test_adapters_need_a_peft_that_transformers_takes(place, answer, why, monkeypatch):
    monkeypatch.setattr(place, answer)
    with pytest.raises(LeftOut, match=why):
        cliffs.cases(TOY)[f"llama 2x12, attnops_paged, {cliffs.ADAPTER}"]()


def test_cases_share_a_model():
    one, other = cliffs.cases(TOY).values()
    assert one.args[1] is other.args[1]
