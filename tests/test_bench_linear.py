"""The suite `linear`: its products, what is compared, and the regret of a choice."""

import pytest
import torch

from attnops.bench import Setup, linear
from attnops.core.kernel import kernels_of
from attnops.core.problem import altered
from attnops.ops.linear import timed as linears
from attnops.ops.sweeps import F32
from attnops.testing.pool import Pool

CPU = Setup(torch.device("cpu"), quick=True, backend="eager")
SHAPE = altered(linears.product(32, 16, *linears.NORM), **F32)


def measured(setup=CPU):
    return list(linear.product(setup, Pool("cpu"), "a", SHAPE))


def row(way, us, **more):
    return {"case": "a x1", "way": way, **({} if us is None else {"median_us": us}), **more}


@pytest.mark.parametrize(
    ("times", "chosen", "regret"),
    [
        ({"aten": 20.0, "triton": 16.0, "product": 3.0}, "aten", 25.0),
        ({"aten": 20.0, "triton": 16.0, "deterministic": 9.0}, "triton", 0.0),
        ({"aten": 20.0, "triton": None}, "", None),
        ({"aten": 20.0, "triton": 19.0}, "reference", None),
    ],
)
def test_the_regret_of_a_choice(times, chosen, regret, monkeypatch):
    monkeypatch.setattr(linear.regret, "choices", lambda problem, table: {"automatic": chosen})
    call = linear.call_of(SHAPE, linear.Sizes(1.0, 1.0, 1.0), Pool("cpu"))
    rows = [row(way, us) for way, us in times.items()]
    found = linear.with_choice(CPU, rows, call)
    us = {n: t for n, t in times.items() if t and n in kernels_of("linear")}
    more = {} if regret is None else {"median_us": times[chosen], "regret_percent": regret}
    want = [{"case": "a x1", "way": "automatic", "us": us, "chosen": {"automatic": chosen}, **more}] if chosen else []
    assert found == rows + want


def test_the_shapes_are_those_of_the_models():
    sizes = {name: (s.out_features, s.in_features) for name, s in linear.MODELS["llama-3-8b"].items()}
    assert sizes == {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336), "head": (128256, 4096)}
    assert linear.MODELS["gpt-oss-20b"].keys() == {"qkv", "o", "head"}, "the rest are experts"
    assert list(linear.cases(CPU)) == ["llama-3-8b"]
    tuned = {s for model in linears.MODELS.values() for s in model.values()}
    assert not any(tuned & set(model.values()) for model in linear.HELD.values())


def test_a_model_has_its_summary(monkeypatch):
    """Of its calls that two kernels answer."""
    row = {"case": "llama-3-8b qkv x1", "way": "automatic", "us": {"aten": 4.0, "triton": 5.0}, "chosen": {"automatic": "triton"}}
    monkeypatch.setattr(linear, "product", lambda setup, pool, name, shape: [row] if name.endswith("qkv") else [{"case": name}])
    [case] = linear.cases(CPU).values()
    *rows, automatic, by_estimates = case()
    assert [r["case"] for r in rows][1:] == [f"llama-3-8b {n}" for n in ("o", "gate_up", "down", "head")]
    assert (automatic["calls"], automatic["mean_percent"], by_estimates["unanswered"]) == (1, 25.0, 1)


def test_the_run_of_a_cpu_is_small():
    [case] = linear.cases(CPU).values()
    rows = case()
    assert {r["case"] for r in rows if r["way"] == "aten"} == {f"llama-3-8b {n} x{c}" for n in linear.MODELS["llama-3-8b"] for c in (1, 8)}
    assert all("median_us" in r for r in rows if r["case"].endswith("x8"))


def test_a_wrong_result_has_no_time(monkeypatch):
    honest = linear.runner
    monkeypatch.setattr(linear, "runner", lambda *a, **k: lambda: honest(*a, **k)() * 1.01)
    assert any(str(r.get("wrong")).startswith("wrong: off by") for r in measured() if r["way"] == "aten")


@pytest.mark.parametrize("spoiled", [False, True])
def test_what_the_timed_graph_leaves_is_compared(spoiled, monkeypatch):
    def clock(device, steps, rounds):
        for step in steps.values():
            if step.before is not None:
                step.before()
            if not spoiled:
                step.call()
        return {name: {"median_us": 5.0} for name in steps}

    monkeypatch.setattr(linear, "kernels_us", clock)
    if spoiled:
        with pytest.raises(RuntimeError, match=r"a x1: the timed graph of aten left results that are off by inf"):
            measured()
    else:
        assert all("median_us" in r for r in measured())
