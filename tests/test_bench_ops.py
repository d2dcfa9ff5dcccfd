"""Suites of calls of ops at toy size: what is compared, what is beside it, and that a wrong result
has no time."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import pytest
import torch

pytest.importorskip("transformers", reason="the suite of experts measures modules of transformers")

from attnops.bench import Setup, choices, cold, mixtures, op_suite, ops, training
from attnops.bench.files import bad
from attnops.bench.rows import with_direct
from attnops.core.kernel import kernels_of
from attnops.core.problem import altered
from attnops.core.record import check
from attnops.core.select import use
from attnops.ops import OPS
from attnops.ops.experts.bench_points import Mixture
from attnops.ops.linear import timed as linears
from attnops.ops.sweeps import F32
from attnops.testing.pool import Pool
from tests.measuring import by_way, exchange, scaled
from tests.test_bench import TOY, entry, ways

CALLS = [(op, ops.shorter(case, "toy")) for op, case in op_suite.listed("kernels")]
PAIRS = [pair for _, pair in op_suite.listed("training")]
MODELS = {model.name: model.products for _, model in ops.models("linear")}
MIXTURES = {mixture.name: mixture for _, mixture in op_suite.listed("experts")}
SMALL = Mixture(
    1, "small", "qwen3_moe", "Qwen3Moe", 2048, (8, 2, 768), "num_experts", "moe_intermediate_size"
)
PRODUCT = altered(linears.product(32, 16, *linears.NORM), **F32)


@pytest.fixture
def small(monkeypatch):
    """Two mixtures of few experts in the place of the models'."""
    some = (SMALL, MIXTURES["gpt-oss-20b"]._replace(name="oss", sizes=(8, 2, 2880)))
    points = [("experts", mixture) for mixture in some]
    monkeypatch.setattr(ops, "EXPERTS", replace(ops.EXPERTS, points=lambda suite: points))


def fails(call):
    raise RuntimeError("no such luck")


@pytest.mark.parametrize("suite", ["kernels", "data", "experts", "training", "hybrid"])
def test_points_have_names_of_their_own(suite):
    """Cases are told apart by them."""
    names = [point.name for _, point in op_suite.listed(suite)]
    assert names and len(set(names)) == len(names)


# Every kernel of attention ------------------------------------------------------------------------


def test_every_kind_of_call_is_compared_with_the_exact_result():
    for op, case in CALLS:
        for row in ops.KERNELS.measure(TOY, Pool("cpu"), op, case):
            assert "wrong" not in row and 0 < row["error"] < row["budget"], row


def vendors_of(call):
    """The vendors' own calls that answer it, or would if their package was here."""
    found = set()
    for name, make in OPS[call.op].of_family("vendors", "VENDORS").items():
        try:
            answers = make(call.record, TOY.compiled) is not None
        except (ImportError, OSError):
            answers = True
        if answers and name.startswith("direct."):
            found.add(name.removeprefix("direct."))
    return found


def test_vendors_are_called_where_they_answer():
    pool, both = Pool("cpu"), {"flashinfer_fa2", "flashinfer_fa3"}
    want: Mapping[str, set[str]] = {
        "decode": {"fa3", "flashinfer_tensor_cores"},
        "prefill": {"fa3"},
        "extend": {"fa3", *both},
        "packed prefill": {"fa3"},
        "paged prefill": {"fa3", *both},
        "latent decode": {"flashmla", *both},
        "float8 latent decode": {"flashmla", *both},
    }
    for _, case in CALLS:
        call = ops.call_at(case, pool)
        assert vendors_of(call) == want.get(f"{case.kind} {case.remark}".strip(), set()), case
    case = replace(op_suite.listed("kernels")[-1][1], batch=2, keys=64)
    float8 = ops.call_at(case, pool)
    check(float8.record)
    assert float8.arguments["q_nope"].dtype == torch.float8_e4m3fn
    assert vendors_of(float8) == {"flashmla_fp8"}


def test_kernels_are_beside_the_vendors_call_of_their_own_code():
    us = {"flashinfer": 8.0, "triton": 9.0, "fa3": 10.0}
    us |= {"direct.flashinfer_fa2": 6.0, "direct.flashinfer_fa3": 4.0, "direct.fa3": 11.0}
    rows = [
        *(entry("a", way, time) for way, time in us.items()),
        entry("a", "flashinfer_mla_fa2", wrong="off"),
    ]
    found = with_direct(rows, ops.own_calls)
    assert {row["way"]: row.get("of_direct") for row in found[:3]} == {
        "flashinfer": 0.5,
        "triton": None,
        "fa3": 1.1,
    }
    assert "of_direct" not in found[-1]


def test_a_wrong_kernel_has_no_speed(monkeypatch):
    """Half a percent off, which float32 allows no kernel; one that leaves something unwritten; and
    one that raises."""
    right = kernels_of("attention")["sdpa"].run
    exchange(monkeypatch, "attention", "sdpa", lambda call: scaled(1.005)(call, right))
    exchange(monkeypatch, "attention", "aten_flash", fails)
    exchange(monkeypatch, "paged_attention", "sdpa", lambda *a, **k: None)
    step, prefill = CALLS[:2]
    found = by_way(ops.KERNELS.measure(TOY, Pool("cpu"), *prefill))
    sdpa = found["sdpa"]
    assert sdpa["wrong"].startswith("wrong: off by 0.00") and sdpa["error"] > 10 * sdpa["budget"]
    assert not sdpa.keys() & {"median_us", "of_flops"}
    assert found["aten_flash"]["wrong"] == "RuntimeError: no such luck"
    assert found["reference"]["median_us"] > 0 and found["torch.sdpa"]["median_us"] > 0
    found = by_way(ops.KERNELS.measure(TOY, Pool("cpu"), *step))
    assert (
        found["sdpa"]["wrong"] == "wrong: not finite, or of another shape"
        and "error" not in found["sdpa"]
    )


# What moves data ----------------------------------------------------------------------------------


def test_data_is_counted_and_compared_bit_for_bit(monkeypatch):
    points = {point.name: (op, point) for op, point in op_suite.listed("data")}
    row = 8 * 128 * 2
    want = {
        "write_kv 4096": 4 * 4096 * row,
        "write_kv float8 4096": 3 * 4096 * row,
        "write_latent 4096": 2 * 4096 * 576 * 2,
        "write_latent_packed 64": 64 * (576 * 2 + 656),
        "copy_kv of 32 layers 8": 4 * 8 * 32 * row,
        "kv_indices 64": 0,
    }
    for name, moved in want.items():
        op, point = points[name]
        call = ops.moving(point, Pool("cpu"), op)
        check(call.record)
        assert point.moved(call.tensors(), call.mutated) == moved, name

    right = kernels_of("write_kv")["reference"]

    def off(call):
        right.run(call)
        call.k_pages.zero_()

    exchange(monkeypatch, "write_kv", "triton", off, needs=right.needs, packages=right.packages)
    rows = by_way(ops.DATA.measure(TOY, Pool("cpu"), *points["write_kv float8 64"]))
    assert rows["triton"]["wrong"].startswith("wrong: off by") and "median_us" not in rows["triton"]
    assert rows["reference"]["median_us"]
    exchange(monkeypatch, "write_kv", "triton", fails)
    rows = ops.DATA.measure(TOY, Pool("cpu"), *points["write_kv float8 64"])
    assert "no such luck" in bad({"data": {"rows": rows}})[0], (
        "a kernel of ours that does not run fails the case"
    )


# Training -----------------------------------------------------------------------------------------


@pytest.mark.sweep(3)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_exact_gradients_are_those_of_the_reference(pair, monkeypatch):
    """In parts of a few queries. flex_attention, which has no gradient on a CPU, is compared
    forward."""
    monkeypatch.setattr(training, "ROWS", 10)
    short = training.shorter(pair, "toy")
    call = training.build(short.shape, short.lengths, short.lengths, Pool("cpu"))
    grad = torch.randn(*call.arguments["query"].shape)
    want = training.exact(call, grad)
    given = {n: call.arguments[n] for n in training.TRAINED if n in call.arguments}
    flex = OPS[f"{call.op}_backward"].of_family("vendors", "VENDORS")["flex"]
    output = flex(call.record, TOY.compiled)(given)
    torch.testing.assert_close(output, OPS[call.op].reference(call.record)[0], atol=1e-5, rtol=1e-5)
    own = training.own(call, grad, partial(use, kernel="reference"))
    assert training.relative(own.computed(), want) < 1e-5
    assert training.relative([1.1 * x for x in want], want) > 0.02
    assert training.relative([x * float("nan") for x in want], want) == float("inf")


# Weights that are read cold -----------------------------------------------------------------------


def measured():
    return [
        row
        for task in ops.product_at(TOY, Pool("cpu"), "a", PRODUCT)
        for row in cold.cold_rows(TOY, task)
    ]


def test_the_runs_of_a_cpu_are_small(small):
    [case] = ops.LINEAR(TOY).values()
    rows = case()
    names = {f"llama-3-8b {n} x{c}" for n in MODELS["llama-3-8b"] for c in (1, 8)}
    assert {r["case"] for r in rows if r["way"] == "aten"} == names
    assert all("median_us" in r for r in rows if r["case"].endswith("x8"))
    rows = [row for case in ops.EXPERTS(TOY).values() for row in case()]
    found = ways({"rows": rows})
    assert found.keys() == {f"{model} x{n}" for model in ("small", "oss") for n in (1, 8)}
    for case in ("small x8", "oss x1"):
        assert found[case].keys() == {"aten", "grouped_mm", "batched_mm"}
    assert all("median_us" in row and row["error"] <= 1.0 for row in rows), rows


def test_a_wrong_result_has_no_time(small, monkeypatch):
    runner, changed = ops.runner, cold.changed
    monkeypatch.setattr(ops, "runner", lambda *a, **k: lambda: runner(*a, **k)() * 1.01)
    monkeypatch.setattr(
        cold, "changed", lambda call, **more: changed(call, x=call.x * 1.01, **more)
    )
    experts, _ = ops.EXPERTS(TOY).values()
    for rows in (measured(), experts()):
        wrong = [str(row.get("wrong")) for row in rows if row["way"] == "aten"]
        assert wrong and all(text.startswith("wrong: off by") for text in wrong)


@pytest.mark.parametrize("spoiled", [False, True])
def test_what_the_timed_graph_leaves_is_compared(spoiled, monkeypatch):
    def clock(device, steps, rounds):
        for step in steps.values():
            if step.before is not None:
                step.before()
            if not spoiled:
                step.call()
        return {name: {"median_us": 5.0} for name in steps}

    monkeypatch.setattr(cold, "kernels_us", clock)
    if spoiled:
        with pytest.raises(
            RuntimeError, match=r"a x1: the timed graph of aten left results that are off by inf"
        ):
            measured()
    else:
        assert all("median_us" in r for r in measured())


@pytest.mark.parametrize(
    ("chosen", "us", "regret"),
    [("aten", 20.0, 25.0), ("triton", 16.0, 0.0), ("reference", None, None)],
)
def test_the_regret_of_a_choice(chosen, us, regret, monkeypatch):
    monkeypatch.setattr(choices, "choices", lambda problem, table: {"automatic": chosen})
    call = ops.call_of(PRODUCT, ops.Sizes(1.0, 1.0, 1.0), Pool("cpu"))
    times = {"aten": 20.0, "triton": 16.0}
    rows = [
        entry("a x1", way, time)
        for way, time in {**times, "product": 3.0, "deterministic": 9.0}.items()
    ]
    *same, row = choices.with_choice(rows, call)
    assert same == rows and row["us"] == times
    assert (row["way"], row.get("median_us"), row.get("regret_percent")) == (
        "automatic",
        us,
        regret,
    )
    assert choices.with_choice(rows[:1], call) == rows[:1], "one kernel is no choice"


def test_a_model_has_its_summary(monkeypatch):
    """Of its calls that two kernels answer."""
    row = {
        "case": "llama-3-8b qkv x1",
        "us": {"aten": 4.0, "triton": 5.0},
        "chosen": {"automatic": "triton"},
    }
    monkeypatch.setattr(ops, "product_at", lambda setup, pool, name, shape: [name])
    monkeypatch.setattr(
        ops, "cold_rows", lambda setup, name: [row] if name.endswith("qkv") else [{"case": name}]
    )
    [case] = ops.LINEAR(TOY).values()
    *rows, automatic, by_estimates = case()
    assert len(rows) == len(MODELS["llama-3-8b"])
    assert (automatic["calls"], automatic["mean_percent"], by_estimates["unanswered"]) == (
        1,
        25.0,
        1,
    )


def test_the_products_are_those_of_the_models():
    sizes = {name: (s.out_features, s.in_features) for name, s in MODELS["llama-3-8b"].items()}
    square = {"qkv": (6144, 4096), "o": (4096, 4096)}
    assert sizes == {
        **square,
        "gate_up": (28672, 4096),
        "down": (4096, 14336),
        "head": (128256, 4096),
    }
    assert MODELS["gpt-oss-20b"].keys() == {"qkv", "o", "head"}, "the rest are experts"
    tuned = {s for model in linears.MODELS.values() for s in model.values()}
    assert not any(tuned & set(model.values()) for model in ops.HELD.values())


@pytest.mark.parametrize(
    ("model", "bytes_of_an_expert"),
    [("gpt-oss-20b", 49766400), ("qwen3-30b-a3b", 9437184), ("deepseek-v3", 88080384)],
)
def test_the_experts_are_those_of_the_models(model, bytes_of_an_expert, monkeypatch):
    setup = Setup(torch.device("meta"))
    monkeypatch.setattr(mixtures, "LESS", {setup.size: 1})
    monkeypatch.setattr(torch, "Generator", lambda device: torch._C.Generator("cpu"))
    monkeypatch.setattr(torch.Tensor, "normal_", lambda t, *args, **more: t)
    found = mixtures.module_of(setup, MIXTURES[model])
    assert sum(2 * t[0].numel() for t in mixtures.weights_of(found)) == bytes_of_an_expert


def test_shares_are_of_the_ceilings():
    """Of a call that moves 3 GB and does 40 GFLOP in a millisecond, where the ceilings are 4 TB/s
    and 100 TFLOP/s."""
    setup = replace(TOY, ceilings={"bandwidth_tb_s": 4.0, "matmul_tflop_s": 100.0})
    assert setup.shares(1000.0, of_bandwidth=3e9, of_flops=40e9, of_matmul=0) == {
        "of_bandwidth": 0.75,
        "of_flops": 0.4,
    }
    assert replace(setup, ceilings={}).shares(1000.0, of_bandwidth=3e9) == {}
