"""The suite `cliffs` at toy size: every stream over a stand-in for CUDA graphs, what its figures
say, and that wrong calls have none."""

import pickle
from dataclasses import replace
from random import Random

import pytest
import torch

pytest.importorskip("transformers", reason="the suite measures transformers models")

from attnops.bench import Point, changes, cliffs, models, overhead, ways
from attnops.bench.rows import LeftOut
from attnops.core.errors import InvalidInput
from attnops.hf import Decode
from tests.graphs.standin import StandIn
from tests.measuring import by_way, results_file
from tests.test_bench import GPU, TOY

TWO = replace(TOY, layers=2)
"""A layer alone has no equal one, and is not captured in layers."""
POINT, WAY = Point(2, 12), "attnops_paged"


def stream(kind, way=WAY, setup=TOY):
    return by_way(cliffs.measure(setup, "llama", POINT, kind, way))


@pytest.fixture
def graphs(monkeypatch):
    """The way `attnops` as on a GPU: the stand-in."""
    device = StandIn()
    how = ways.How({"cache": "paged", "decode": Decode("auto", inner="eager", graphs=device)})
    monkeypatch.setitem(ways.WAYS, "cliffs", {"hf": ways.How(), "attnops": how})
    return device


def skip_without_peft(kind):
    """Skips a test of adapters where there is no peft that transformers takes."""
    if kind == "adapters":
        pytest.importorskip("peft", reason="a change is that of an adapter")
        from transformers.integrations.peft import MIN_PEFT_VERSION
        from transformers.utils.peft_utils import check_peft_version

        try:
            check_peft_version(MIN_PEFT_VERSION)
        except ValueError as error:
            pytest.skip(f"transformers' check_peft_version: {error}")


# Streams ------------------------------------------------------------------------------------------


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind", changes.KINDS)
def test_every_change_comes_again_beside_transformers(kind, graphs):
    skip_without_peft(kind)
    found = stream(kind, "attnops", TWO)
    assert list(found) == ["attnops", "hf"] and graphs.calls.count("begin") > 0
    for row in found.values():
        assert row["case"] == f"llama, {kind}, attnops" and row["calls"] == 4
        assert 0 < row["median_us"] <= row["p99_us"] <= row["worst_us"]
    mine = found["attnops"]
    assert mine["error"] <= mine["budget"] < 1e-4
    assert 0 <= mine["over_at"] < 4 and 0 <= mine["stalls"] <= 4 and mine["of_hf"] > 0


def asked(kind):
    """The arguments of the calls of a stream of full size."""
    sizes, some = changes.SIZES["full"], Random(0)
    make = changes.KINDS[kind].turn
    return [make(sizes, at, some).keywords for at in range(sizes.calls)]


def test_the_stream_of_dtypes_rounds_no_number():
    """Its first call is judged after all others."""
    [model] = changes.KINDS["dtypes"].models(TOY, models.build(TOY, "llama", POINT))
    before = {name: t.clone() for name, t in (*model.named_parameters(), *model.named_buffers())}
    assert model.dtype == TOY.dtype and any("inv_freq" in name for name in before)
    model.to(changes.other_dtype(TOY)).to(TOY.dtype)
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        assert torch.equal(t, before[name]), name


def test_sizes_are_random_and_reach_what_users_have():
    lengths = [given["point"].context for given in asked("new prompt lengths")]
    assert min(lengths) < 100 and 4000 < max(lengths) <= 4096 and len(set(lengths)) > 150
    assert lengths != sorted(lengths)
    batches = [given["point"].batch for given in asked("batches")]
    assert min(batches) == 1 and max(batches) == 64
    texts = [given["point"].context for given in asked("longer texts")]
    assert min(texts) >= 1 and 4608 < max(texts) <= 8192, "more than new pages have room for"
    assert {given["which"] for given in asked("two models")} == {0, 1}


def test_a_prompt_is_as_long_as_the_model_allows():
    side = changes.Side(TOY, POINT, [(models.build(TOY, "llama"), None)])
    text, logits = side.call(True, point=Point(1, 1000))
    assert text.shape == (1, changes.positions(side.model)) and logits.shape[1] == changes.NEW


def test_caches_hold_their_own_texts():
    """A loop over several caches gives what `generate()` gives for the new one's prompt."""
    side = changes.Side(TOY, POINT, [(models.build(TOY, "llama"), None)])
    for seed in range(5):
        with torch.no_grad():
            text, logits = side.over_caches(True, seed)
        want, wanted = side.call(True, seed=seed)
        assert torch.equal(text, want)
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=0)
        assert len(side._slots) == min(seed + 1, changes.CACHES)


# Cases --------------------------------------------------------------------------------------------


def test_each_change_is_a_case():
    assert list(cliffs.cases(TOY)) == [f"llama, {kind}, {WAY}" for kind in changes.KINDS]
    with pytest.raises(InvalidInput, match="ways: got 'hf_again', want some of hf, attnops_paged"):
        cliffs.cases(replace(TOY, ways=("hf_again",)))
    asked = replace(GPU, ways=("attnops_breakable", "attnops"), model="qwen3-4b-shape")
    for setup, names in ((GPU, ("attnops",)), (asked, ("attnops", "attnops_breakable"))):
        assert [*dict.fromkeys(case.args[-1] for case in cliffs.cases(setup).values())] == [*names]


def test_a_stream_has_a_process_of_its_own(monkeypatch):
    given = []
    monkeypatch.setattr(cliffs, "in_a_process", lambda *args: given.append(args))
    cliffs.measure(replace(TOY, quick=False), "llama-small", POINT, "batches", WAY)
    assert pickle.loads(pickle.dumps(given[0]))[0] is cliffs.stream
    assert cliffs.CAP_S < overhead.LIMIT_S / 2


def refuse(*given):
    raise ValueError("The version of PEFT is not compatible")


@pytest.mark.parametrize(
    ("kind", "place", "answer", "why"),
    [
        ("adapters", "transformers.utils.peft_utils.check_peft_version", refuse, "not compatible"),
        ("adapters", "attnops.bench.changes.find_spec", lambda name: None, "peft is not installed"),
        ("two models", "attnops.bench.models.free", lambda device: 2**30, "memory: got 1.0 GiB"),
    ],
)
def test_what_cannot_be_done_is_left_out(kind, place, answer, why, monkeypatch):
    model = models.build(TOY, "llama")
    monkeypatch.setattr(place, answer)
    with pytest.raises(LeftOut, match=why):
        changes.KINDS[kind].models(TOY, model)


def test_caches_need_pages(monkeypatch):
    monkeypatch.setitem(ways.WAYS["cliffs"], "attnops", ways.How({"cache": "hf"}))
    with pytest.raises(LeftOut, match='want cache="paged"'):
        stream("caches", "attnops")


# Figures ------------------------------------------------------------------------------------------


def test_figures_are_of_all_calls():
    """The 99th percentile by nearest rank: of few calls the longest one."""
    found = cliffs.figures([1e-6 * us for us in range(200, 0, -1)])
    assert found == {"calls": 200, "median_us": 100.5, "p99_us": 198.0, "worst_us": 200.0}
    for calls, rank in ((1, 1), (4, 4), (99, 99), (100, 99), (101, 100)):
        assert cliffs.figures([1e-6 * us for us in range(1, calls + 1)])["p99_us"] == rank


def test_differences_are_of_one_turn():
    """A long call is no stall where transformers waits as long."""
    found = cliffs.differences([0.1, 2.0, 0.5, 0.4], [0.1, 1.9, 0.1, 0.2])
    assert found == {"over_s": 0.4, "over_at": 2, "stalls": 1}


def test_the_first_of_a_turn_alternates_until_the_time_is_spent(monkeypatch):
    order = []

    def turn(side, logits):
        assert not logits, "generate() has another loop with them"
        order.append(side)
        return torch.zeros(1), None

    assert cliffs.timed({"a": "a", "hf": "hf"}, [turn] * 3)[0].keys() == {"a", "hf"}
    assert order == ["a", "hf", "hf", "a", "a", "hf"]
    monkeypatch.setattr(cliffs, "CAP_S", -1.0)
    taken, texts = cliffs.timed({"a": "a", "hf": "hf"}, [turn] * 3)
    assert len(taken["a"]) == len(taken["hf"]) == len(texts["a"]) == 1


def spoilt_logits(output):
    text, logits = output
    return text, None if logits is None else 1.01 * logits


def spoilt_text(output):
    text, logits = output
    return (text + 1) % 128 if logits is None else text, logits


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("spoilt", [spoilt_logits, spoilt_text])
def test_a_wrong_first_or_last_call_has_no_time(at, spoilt, monkeypatch):
    def made(sizes, number, some):
        right = changes.batches(sizes, number, some)

        def turn(side, logits):
            found = right(side, logits)
            return spoilt(found) if number == at and side.patched[0][1] is not None else found

        return turn

    monkeypatch.setitem(changes.KINDS, "batches", changes.Kind(made))
    found = stream("batches")
    assert found[WAY]["wrong"].startswith(f"wrong: call {at} is off by")
    assert "median_us" not in found[WAY] and found["hf"]["median_us"] > 0


def test_an_adapter_that_was_not_switched_is_seen(monkeypatch):
    skip_without_peft("adapters")

    def made(sizes, at, some):
        right = changes.adapters(sizes, at, some)

        def turn(side, logits):
            return right(side, logits) if side.patched[0][1] is None else side.call(logits)

        return turn

    monkeypatch.setitem(changes.KINDS, "adapters", changes.Kind(made, changes.adapted))
    assert stream("adapters")[WAY]["wrong"].startswith("wrong: call 3 is off by")


def test_experts_are_judged_by_exact_logits():
    """Grouped products have no float64."""
    [mine, _] = cliffs.measure(TOY, "mixtral", POINT, "batches", WAY)
    assert mine["error"] <= mine["budget"] < 1e-4 and mine["median_us"] > 0


# Pages --------------------------------------------------------------------------------------------


def test_the_page_shows_streams_and_the_older_form(docs, tmp_path):
    page = docs("performance")
    case = "a, batches, attnops"
    mine = {"case": case, "way": "attnops", "calls": 200, "median_us": 1500.0, "p99_us": 2500.0}
    mine |= {"worst_us": 9900.0, "over_s": 0.0042, "stalls": 0}
    hf = {"case": case, "way": "hf", "median_us": 4000.0, "p99_us": 5000.0, "worst_us": 6000.0}
    off = {"case": "a, texts, attnops", "way": "attnops", "wrong": "wrong: call 0 is off"}
    results_file(tmp_path, "toy", "cliffs", {"suite": "cliffs", "rows": [mine, hf, off]})
    shown = page.costs(tmp_path)
    line = "| a, batches | `attnops` | 200 | 1.5 | 2.5 | 9.9 | 4.0 | 5.0 | 6.0 | 0.0042 | 0 |"
    assert line in shown and "| a, texts | `attnops` | wrong: call 0 is off | - |" in shown
    old = {"case": "a 1x1k, batch", "way": "attnops", "cost_s": 0.5, "median_us": 1.0}
    results_file(tmp_path, "toy", "cliffs", {"suite": "cliffs", "rows": [old]})
    assert "older form" in page.costs(tmp_path) and "| batch | 0.50 |" in page.costs(tmp_path)
