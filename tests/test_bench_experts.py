"""The suite `experts`: its shapes, what is compared, and transformers' own beside it."""

from dataclasses import replace

import pytest
import torch

from attnops.bench import Setup, mixtures, op_suite, ops
from attnops.ops.experts.bench_points import Mixture

transformers = pytest.importorskip("transformers")

CPU = Setup(torch.device("cpu"), quick=True, backend="eager")
POINTS = {mixture.name: mixture for _, mixture in op_suite.listed("experts")}
SMALL = Mixture(1, "small", "qwen3_moe", "Qwen3Moe", 2048, (8, 2, 768), "num_experts", "moe_intermediate_size")


@pytest.fixture
def small(monkeypatch):
    some = (SMALL, POINTS["gpt-oss-20b"]._replace(name="oss", sizes=(8, 2, 2880)))
    monkeypatch.setattr(ops, "EXPERTS", replace(ops.EXPERTS, points=lambda suite: [("experts", mixture) for mixture in some]))


def test_the_run_of_a_cpu_is_small(small):
    rows = [row for case in ops.EXPERTS(CPU).values() for row in case()]
    assert {row["case"] for row in rows} == {f"{model} x{n}" for model in ("small", "oss") for n in (1, 8)}
    assert all({"aten", "grouped_mm", "batched_mm"} == {r["way"] for r in rows if r["case"] == case} for case in ("small x8", "oss x1"))
    assert all("median_us" in row and row["error"] <= 1.0 for row in rows), rows


def test_a_wrong_result_has_no_time(small, monkeypatch):
    honest = op_suite.changed
    monkeypatch.setattr(op_suite, "changed", lambda call, **more: honest(call, x=call.x * 1.01, **more))
    [case, _] = ops.EXPERTS(CPU).values()
    assert {str(r.get("wrong")).startswith("wrong: off by") for r in case() if r["way"] == "aten"} == {True}


@pytest.mark.parametrize(
    ("model", "bytes_of_an_expert"), [("gpt-oss-20b", 49766400), ("qwen3-30b-a3b", 9437184), ("deepseek-v3", 88080384)]
)
def test_the_shapes_are_those_of_the_models(model, bytes_of_an_expert):
    setup = Setup(torch.device("meta"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(mixtures, "LESS", {setup.size: 1})
        patched.setattr(torch, "Generator", lambda device: torch._C.Generator("cpu"))
        patched.setattr(torch.Tensor, "normal_", lambda t, *args, **more: t)
        found = mixtures.module_of(setup, POINTS[model])
    assert sum(2 * t[0].numel() for t in mixtures.weights_of(found)) == bytes_of_an_expert
