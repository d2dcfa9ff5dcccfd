"""The suite `linear`: its products, and the regret of a choice."""

import pytest
import torch

from attnops.bench import Setup, linear

CPU = Setup(torch.device("cpu"), quick=True, backend="eager")


def row(way, us, **more):
    return {"case": "a", "way": way, **({} if us is None else {"median_us": us}), **more}


@pytest.mark.parametrize(
    ("times", "chosen", "regret"),
    [
        ({"aten": 20.0, "triton": 16.0, "product": 3.0}, "aten", 25.0),
        ({"aten": 20.0, "triton": 16.0, "deterministic": 9.0}, "triton", 0.0),
        ({"aten": 20.0, "triton": None}, "triton", None),
        ({"aten": 20.0}, "", None),
    ],
)
def test_the_regret_of_a_choice(times, chosen, regret):
    rows = [row(way, us) for way, us in times.items()]
    found = linear.with_choice(rows, chosen)
    assert found[: len(rows)] == rows
    want = [] if regret is None else [row("automatic", times[chosen], kernel=chosen, regret_percent=regret)]
    assert found[len(rows) :] == want


def test_the_shapes_are_those_of_the_models():
    assert linear.MODELS["llama-3-8b"]["qkv"][:2] == (6144, 4096) and linear.MODELS["qwen3-4b"]["down"][:2] == (2560, 9728)
    assert len(linear.cases(CPU)) == 5


def test_a_wrong_result_has_no_time(monkeypatch):
    [case, *_] = linear.cases(CPU).values()
    assert all("median_us" in r for r in case() if r["case"].endswith("x8"))
    honest = linear.linear
    monkeypatch.setattr(linear, "linear", lambda *a, **k: honest(*a, **k) * 1.01)
    [case, *_] = linear.cases(CPU).values()
    assert any(str(r.get("wrong")).startswith("wrong: off by") for r in case() if r["way"] == "aten")
