"""`attnops bench`: every suite once at toy size, and what becomes of its figures: verdicts, files, comparisons, pictures, pages."""

import io
import json
import time
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("typer", reason="the extra `cli` brings typer and rich")
pytest.importorskip("transformers", reason="most suites measure transformers models")

from rich.console import Console
from typer.testing import CliRunner

from attnops.bench import (
    Point,
    Setup,
    compile,
    decode,
    exact,
    generate,
    op_suite,
    ops,
    overhead,
    run as suites,
    training,
    training_steps,
    ways as table,
)
from attnops.bench.files import bad, compare, environment, read, text_of
from attnops.bench.rows import Way, largest_error, relative_error, time_if_right, with_direct, with_ratios
from attnops.cli import bench as command
from attnops.cli.app import app
from attnops.core import kernel as registry
from attnops.core.errors import InvalidInput
from attnops.core.kernel import all_kernels, kernels_of
from attnops.core.record import check
from attnops.core.select import use
from attnops.measured.digests import digests
from attnops.ops import OPS
from attnops.testing.pool import Pool
from attnops.tune.clock import Timed, spread, steps_us
from tests.graphs.standin import StandIn
from tests.helpers import ROOT
from tests.hf.helpers import Counter

CPU = torch.device("cpu")
TOY = Setup(CPU, quick=True, backend="eager", ceilings={"bandwidth_tb_s": 1.0, "matmul_tflop_s": 1.0})
CEILINGS = {"bandwidth_tb_s", "matmul_tflop_s"}
CALLS = [(op, ops.shorter(case, "toy")) for op, case in op_suite.listed("kernels")]
GPU = Setup(torch.device("cuda"))
STEPS = table.WAYS["training_steps"]
PAIRS = [pair for _, pair in op_suite.listed("training")]


@pytest.fixture(scope="session")
def reports_of(tmp_path_factory) -> Any:
    """(reports of all suites, what was printed, the folder of files). Dynamo hands graphs to itself: nothing is timed well."""
    folder, console = tmp_path_factory.mktemp("bench"), Console(width=150, record=True, file=io.StringIO())
    every = tuple(suite.name for suite in suites.SUITES)
    reports = command.run(console, every, Setup(CPU, quick=True, backend="eager"), out=folder, commit="c0ffee")
    return reports, console.export_text(), folder


def entry(case, way, median_us=None, spread_us=None, **more):
    times = {"median_us": median_us, "spread_us": spread_us}
    return {"case": case, "way": way, **{name: us for name, us in times.items() if us is not None}, **more}


def attnops(*arguments):
    return CliRunner().invoke(app, ["bench", *(str(a) for a in arguments)])


# Suites ---------------------------------------------------------------------------------------------------------------


def test_every_suite_measures(reports_of):
    reports, printed, _ = reports_of
    assert list(reports) == [suite.name for suite in suites.SUITES]
    without = reports["graphs"]
    assert not without["rows"] and set(without["left_out"].values()) == {"there are no CUDA graphs on a CPU"}
    for name, report in reports.items():
        if name == "graphs":
            continue
        left = {case: why for case, why in report["left_out"].items() if "version of PEFT" not in why}  # which transformers refuses
        assert report["rows"] and not report["failed"] and not left, (name, report["failed"], left)
        assert report["commit"] == "c0ffee" and report["size"] == "toy" and set(report["ceilings"]) == CEILINGS
        assert report["code"] and report["code"].items() <= digests(all_kernels()).items(), "of today's kernels"
        [suite] = suites.named((name,))
        assert {kernel.partition(".")[0] for kernel in report["code"]} <= {*(suite.ops or OPS)}
        assert all(value > 0 for value in report["ceilings"].values())
        for row in report["rows"]:
            assert "wrong" not in row, row
            assert row.get("median_us", 1.0) > 0 and row.get("error", 0.0) <= row.get("budget", 0.0)
        assert name in printed
    assert bad(reports) == []


def test_suites_that_take_long_are_named():
    assert {suite.name for suite in suites.SUITES} - {suite.name for suite in suites.named(())} == {
        "generate",
        "cliffs",
        "latent",
        "regret",
        "training_regret",
        "training_steps",
    }
    assert [suite.name for suite in suites.named(("regret", "kernels"))] == ["kernels", "regret"]


def test_the_bytes_of_a_step():
    """Weights but the embedding, which is read a row at a time, and keys and values of all layers, of a window no more than it has."""
    plain, tied = (decode.models.build(TOY, name) for name in ("llama", "gemma2"))
    sizes = {model: model.config for model in (plain, tied)}
    kept = {model: c.num_hidden_layers * 2 * c.num_key_value_heads * c.head_dim * 4 for model, c in sizes.items()}
    own = sum(p.numel() * 4 for p in plain.parameters()) - plain.get_input_embeddings().weight.numel() * 4
    assert decode.bytes_of(plain, Point(3, 20)) == own + 3 * 20 * kept[plain]
    assert tied.get_output_embeddings().weight is tied.get_input_embeddings().weight
    window = tied.config.sliding_window
    assert decode.bytes_of(tied, Point(1, window)) == sum(p.numel() * 4 for p in tied.parameters()) + window * kept[tied]
    far, near = (decode.bytes_of(tied, Point(1, n)) for n in (window + 8, window))
    full = sum(kind == "full_attention" for kind in tied.config.layer_types)
    assert far - near == 8 * kept[tied] * full // tied.config.num_hidden_layers
    assert decode.bytes_of(decode.models.build(TOY, "mixtral"), Point(1, 20)) == 0, "a token reads some experts alone"


def test_only_the_ways_asked_for():
    chosen = replace(TOY, ways=("attnops_hf",))
    rows = decode.measure(chosen, decode.models.keeper(chosen), "llama", Point(2, 12))
    assert [row["way"] for row in rows] == ["hf_eager", "attnops_hf"] and all(row["median_us"] for row in rows)
    with pytest.raises(InvalidInput, match="ways: got 'fastest', want some of hf_eager, hf_compiled"):
        decode.cases(replace(TOY, ways=("fastest",)))


def test_a_way_is_measured_under_its_policy(monkeypatch):
    """One with a kernel that no CPU has, after the prompt."""
    monkeypatch.setitem(table.WAYS["decode"], "attnops_eager", table.How({"cache": "hf"}, policy={"kernel": {"attention": "fa3"}}))
    chosen = replace(TOY, ways=("attnops_eager",))
    row = decode.measure(chosen, decode.models.keeper(chosen), "llama", Point(2, 12))[1]
    assert "fa3" in row["wrong"] and "median_us" not in row
    for kernel, apart in product(({}, table.STOCK), ({}, table.APART)):
        assert [name for name, how in table.here(GPU, "decode").items() if how.patch and how.device and how.policy == kernel | apart], (
            "linears and attention, each on and off"
        )


def test_graphs_are_captured_and_counted():
    """On a stand-in for the device."""
    suite = suites.named(("graphs",))[0]._replace(cases=partial(compile.graph_cases, device=StandIn()))
    found = suites.joined({name: suites.outcome_of(suite, name, TOY) for name in compile.graph_cases(TOY)})
    assert not found["failed"]
    rows = {(row["case"], row["way"]): row for row in found["rows"]}
    assert set(rows) == {(f"llama, {what}", f"attnops_{mode}") for what in ("buckets", "host") for mode in compile.MODES}
    for mode in compile.MODES:
        row = rows["llama, buckets", f"attnops_{mode}"]
        assert (row["buckets"], row["mode"]) == (3, "whole") and row["graph_bytes"] > 0


def ways(report):
    found: dict[str, dict[str, Any]] = {}
    for row in report["rows"]:
        found.setdefault(row["case"], {})[row["way"]] = row
    return found


def test_whole_models_are_beside_their_peers(reports_of):
    [step] = ways(reports_of[0]["decode"]).values()
    assert set(step) == set(table.here(TOY, "decode")), "what may be asked for is what there is"
    [prompt] = ways(reports_of[0]["prefill"]).values()
    assert [set(rows) for rows in ways(reports_of[0]["generate"]).values()] == [
        {*table.chosen(TOY, "generate")},
        {*generate.FIRST} - {"attnops_piecewise"},
    ]
    assert set(prompt) == set(table.here(TOY, "prefill")) == {"hf_eager", "hf_compiled", "attnops_eager", "attnops_compiled"}
    for row in (*step.values(), *prompt.values()):
        assert row["budget"] < 1e-4, "that of float32"
        base = step if row["way"] in step and row is step[row["way"]] else prompt
        if row["way"] != "hf_eager":
            assert row["of_hf_eager"] == pytest.approx(base["hf_eager"]["median_us"] / row["median_us"], rel=1e-3)


def test_kernels_are_beside_torch(reports_of):
    cases = ways(reports_of[0]["kernels"])
    assert [name.partition(" ")[0] for name in cases] == ["decode", "prefill", "extend", "latent"]
    assert {"sdpa", "reference", "automatic", "torch.sdpa"} <= set(cases["decode 2x32"]) & set(cases["prefill 1x32"])
    for rows in cases.values():
        assert {rows["automatic"]["kernel"], rows["deterministic"]["kernel"]} <= set(rows) and "of_automatic" in rows["deterministic"]
        for row in rows.values():
            assert row["of_ceiling"] == max(row["of_bandwidth"], row["of_flops"]) > 0


def test_kernels_are_of_a_kind_by_their_names():
    names = {
        "nvjet_sm90_tst_64x8_64x16_2x1_v_bz_splitK_TNT": "matmul", "void cublasLt::splitKreduce_kernel<32, 16, int>": "matmul",
        "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_tn_align1>": "matmul", "triton_tem_fused_mm_3": "matmul",
        "void cutlass::device_kernel<flash::FlashAttnFwdSm90<flash::Main>>": "attention", "attend": "attention", "combine": "attention",
        "decode": "attention", "one_row": "matmul", "few_rows": "matmul", "few_tokens": "matmul",
        "cudnn_generated_fort_native_sdpa_sm80_flash_fprop": "attention", "store": "glue",
        "triton_poi_fused__scaled_dot_product_cudnn_attention__to_copy": "glue", "triton_red_fused_add_mean_mul_pow_rsqrt_13": "glue",
    }  # fmt: skip
    assert all(decode.shares([(0, 1, name)])[kind] == 1 for name, kind in names.items())


def test_overlaps_are_counted_once_and_gaps_are_found():
    """Stage two of a split attention is launched while stage one runs, and waits for it."""
    found = decode.shares([(12, 20, "combine"), (10, 18, "attend"), (25, 30, "nvjet"), (31, 33, "store")])
    assert found == {"matmul": 5, "attention": 10, "glue": 2, "gaps": 6}
    assert sum(found.values()) == 33 - 10
    assert sum(decode.shares([]).values()) == 0


def test_data_is_counted_and_compared_bit_for_bit(reports_of, monkeypatch):
    points = {point.name: (op, point) for op, point in op_suite.listed("data") if not point.name.endswith(("2048", "256"))}
    tasks = {name: next(ops.moves_at(TOY, Pool("cpu"), *point)) for name, point in points.items()}
    for task in tasks.values():
        check(task.calls[0].record)
    row = 8 * 128 * 2
    want = {
        "write_kv 4096": 4 * 4096 * row, "write_kv float8 4096": 3 * 4096 * row, "write_latent 4096": 2 * 4096 * 576 * 2,
        "write_latent_packed 64": 64 * (576 * 2 + 656), "copy_kv of 32 layers 8": 4 * 8 * 32 * row, "kv_indices 64": 0,
    }  # fmt: skip
    assert {name: tasks[name].moved for name in want} == want
    rows = ways(reports_of[0]["data"])
    assert set(rows["write_kv 64"]) == {"reference", "compiled", "copy"} and set(rows["kv_indices 64"]) == {"reference", "compiled"}
    right = kernels_of("write_kv")["reference"]

    def off(call):
        right.run(call)
        call.k_pages.zero_()

    monkeypatch.setitem(registry._REGISTRY.kernels["write_kv"], "triton", replace(right, name="triton", run=off, contract=2))
    found = {row["way"]: row for row in ops.DATA.measure(TOY, Pool("cpu"), *points["write_kv float8 64"])}
    assert found["triton"]["wrong"].startswith("wrong: off by") and "median_us" not in found["triton"] and found["reference"]["median_us"]
    broken = replace(right, name="triton", run=lambda call: call.no_such_argument, contract=2)
    monkeypatch.setitem(registry._REGISTRY.kernels["write_kv"], "triton", broken)
    rows = ops.DATA.measure(TOY, Pool("cpu"), *points["write_kv float8 64"])
    assert "AttributeError" in bad({"data": {"rows": rows}})[0], "a kernel of ours that does not run fails the case"


def test_training_is_beside_others(reports_of, monkeypatch):
    found = ways(reports_of[0]["training"])
    assert list(found) == [pair.name for pair in PAIRS[: training.SUITE.count["toy"]]]
    for rows in found.values():
        assert all(rows[way]["kernel"] and rows[way]["host_us"] > 0 and rows[way]["error"] > 0 for way in training.OURS)
    plain, packed, *_ = found.values()
    assert plain["torch"]["error"] > 0 and plain["automatic"]["of_direct"] > 0 and "torch" not in packed
    monkeypatch.setattr(training, "relative", lambda got, want: 1.0)
    for case in training.SUITE(TOY).values():
        assert all("wrong" in row and "median_us" not in row for row in case())


def test_training_steps_agree_with_transformers(reports_of, monkeypatch):
    found = ways(reports_of[0]["training_steps"])
    assert set(found["llama 2x12"]) == {"hf_sdpa", "hf_eager", "attnops"} and set(found["gpt_oss 2x12"]) == {"hf_eager", "attnops"}
    model = training_steps.models.build(TOY, "llama").requires_grad_(True)
    batch, count = training_steps.packed(TOY, model, Point(3, 12))
    assert count == 3 and (batch["labels"][batch["position_ids"] == 0] == -100).all() and (batch["position_ids"] == 0).sum() == 3
    right, mine = (training_steps.step(TOY, model, STEPS[way], batch) for way in ("hf_eager", "attnops"))
    torch.testing.assert_close(mine.computed(), right.computed(), atol=1e-4, rtol=0)
    other = {**batch, "position_ids": torch.arange(36)[None]}
    assert (training_steps.step(TOY, model, STEPS["attnops"], other).computed() - right.computed()).abs().max() > 1e-3, "one document"


def test_a_whole_training_step_is_compiled(monkeypatch):
    counter, torch_compile = Counter(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: torch_compile(model, backend=counter))
    model = training_steps.models.build(TOY, "llama").requires_grad_(True)
    batch, _ = training_steps.packed(TOY, model, Point(3, 12))
    right, mine = (training_steps.step(TOY, model, STEPS[way], batch).computed() for way in ("attnops", "attnops_compiled"))
    torch.testing.assert_close(mine, right, atol=1e-4, rtol=0)
    assert len(counter) == 1


@pytest.mark.sweep(3)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_exact_gradients_are_those_of_the_reference(pair, monkeypatch):
    """In parts of a few queries. flex_attention, which has no gradient on a CPU, is compared forward."""
    monkeypatch.setattr(training, "ROWS", 10)
    short = training.shorter(pair, "toy")
    call = training.build(short.shape, short.lengths, short.lengths, Pool("cpu"))
    grad = torch.randn(*call.arguments["query"].shape)
    want = training.exact(call, grad)
    given = {n: call.arguments[n] for n in training.TRAINED if n in call.arguments}
    flex = OPS[f"{call.op}_backward"].of_family("vendors", "VENDORS")["flex"]
    torch.testing.assert_close(flex(call.record, TOY.compiled)(given), OPS[call.op].reference(call.record)[0], atol=1e-5, rtol=1e-5)
    assert training.relative(training.own(call, grad, partial(use, kernel="reference")).computed(), want) < 1e-5
    assert training.relative([1.1 * x for x in want], want) > 0.02
    assert training.relative([x * float("nan") for x in want], want) == float("inf")


def test_every_kind_of_call_is_compared_with_the_exact_result():
    for op, case in CALLS:
        for row in ops.KERNELS.measure(TOY, Pool("cpu"), op, case):
            assert "wrong" not in row and 0 < row["error"] < row["budget"], row


def test_compilation_is_timed(reports_of):
    found = ways(reports_of[0]["compile"])
    assert set(found["llama, cold"]) == set(found["llama, warm"]) == set(table.here(TOY, "compile"))


def test_overhead(reports_of):
    rows = {(row["case"], row["way"]): row for row in reports_of[0]["overhead"]["rows"]}
    eager = {way: row["median_us"] for (case, way), row in rows.items() if case == "eager call of a kernel that does nothing"}
    assert set(eager) == {"plain", "function", "op", "overload"} and min(eager.values()) > 0
    assert all("op_us" in rows["compiled graph", way] for way in ("8_ops", "24_ops")) and rows["import", "attnops"]["median_us"] > 0
    assert "bench_noop" not in kernels_of("paged_attention"), "it is registered in another process"


def test_an_overhead_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(overhead, "LIMIT_S", 0.01)
    with pytest.raises(TimeoutError, match=r"not done after 0\.01 s"):
        overhead.in_a_process(time.sleep, 60.0)


def vendors_of(call):
    """The vendors' own calls that answer it, or would if their package was here."""
    found = set()
    for name, make in OPS[call.op].of_family("vendors", "VENDORS").items():
        try:
            answers = make(call.record, TOY.compiled) is not None
        except (ImportError, OSError):
            answers = True
        found |= {name.removeprefix("direct.")} if answers and name.startswith("direct.") else set()
    return found


@pytest.mark.parametrize("suite", ["kernels", "data", "experts", "training"])
def test_points_have_names_of_their_own(suite):
    """Cases are told apart by them."""
    names = [point.name for _, point in op_suite.listed(suite)]
    assert names and len(set(names)) == len(names)


def test_vendors_are_called_where_they_answer():
    pool = Pool("cpu")
    by_case = {}
    for _, case in CALLS:
        call = ops.call_at(case, pool)
        by_case[f"{case.kind} {case.remark}".strip()] = vendors_of(call)
    assert by_case == {
        "decode": {"fa3", "flashinfer_tensor_cores"}, "prefill": {"fa3"}, "extend": {"fa3", "flashinfer_fa2", "flashinfer_fa3"},
        "latent decode": {"flashmla", "flashinfer_fa2", "flashinfer_fa3"}, "decode float8 pages": set(), "decode window and sinks": set(),
        "prefill window": set(), "prefill soft cap": set(), "packed prefill": {"fa3"},
        "paged prefill": {"fa3", "flashinfer_fa2", "flashinfer_fa3"},
        "float8 latent decode": {"flashmla", "flashinfer_fa2", "flashinfer_fa3"},
    }  # fmt: skip
    float8 = ops.call_at(replace(op_suite.listed("kernels")[-1][1], batch=2, keys=64), pool)
    check(float8.record)
    assert {float8.arguments[n].dtype for n in ("q_nope", "q_pe", "latent_pages")} == {torch.float8_e4m3fn}
    assert float8.arguments["output"].dtype == torch.bfloat16 and vendors_of(float8) == {"flashmla_fp8"}


def test_kernels_are_beside_the_vendors_call_of_their_own_code():
    us = {"flashinfer": 8.0, "triton": 9.0, "fa3": 10.0, "direct.flashinfer_fa2": 6.0, "direct.flashinfer_fa3": 4.0, "direct.fa3": 11.0}
    rows = [*(entry("a", way, time) for way, time in us.items()), entry("a", "flashinfer_mla_fa2", wrong="wrong: off")]
    rows = with_direct(rows, ops.own_calls)
    assert {row["way"]: row["of_direct"] for row in rows if "of_direct" in row} == {"flashinfer": 0.5, "fa3": 1.1}


# Verdicts -------------------------------------------------------------------------------------------------------------


def test_a_wrong_kernel_has_no_speed(monkeypatch):
    """Half a percent off, which float32 allows no kernel; one that leaves something unwritten; and one that raises."""
    sdpa = kernels_of("attention")["sdpa"]
    flash = kernels_of("attention")["aten_flash"]

    def off(call):
        output, lse = sdpa.run(call)
        return output * 1.005, lse

    def raises(call):
        raise RuntimeError("no such luck")

    monkeypatch.setitem(registry._REGISTRY.kernels["attention"], "sdpa", replace(sdpa, run=off, contract=2))
    monkeypatch.setitem(registry._REGISTRY.kernels["attention"], "aten_flash", replace(flash, run=raises, contract=2))
    paged = kernels_of("paged_attention")["sdpa"]
    monkeypatch.setitem(registry._REGISTRY.kernels["paged_attention"], "sdpa", replace(paged, run=lambda *a, **k: None))
    decode_case, prefill = CALLS[:2]
    found = {row["way"]: row for row in ops.KERNELS.measure(TOY, Pool("cpu"), *prefill)}
    assert "median_us" not in found["sdpa"] and found["sdpa"]["wrong"].startswith("wrong: off by 0.00")
    assert found["sdpa"]["error"] > 10 * found["sdpa"]["budget"] and "of_flops" not in found["sdpa"]
    assert found["aten_flash"]["wrong"] == "RuntimeError: no such luck"
    assert found["reference"]["median_us"] > 0 and found["torch.sdpa"]["median_us"] > 0
    found = {row["way"]: row for row in ops.KERNELS.measure(TOY, Pool("cpu"), *decode_case)}
    assert found["sdpa"]["wrong"] == "wrong: not finite, or of another shape" and "error" not in found["sdpa"]
    console = Console(width=150, record=True, file=io.StringIO())
    report = {**environment("cpu"), "suite": "kernels", "seconds": 0.0, "rows": list(found.values())}
    command.show(report, console)
    [line] = [line for line in console.export_text().splitlines() if " sdpa " in line]
    assert "not finite" in line and not any(c.isdigit() for c in line.replace("2x32", "")), "no speed is printed"
    assert bad({"kernels": report}) == ["decode 2x32: sdpa: wrong: not finite, or of another shape"]


def test_a_wrong_model_has_no_speed(monkeypatch):
    """A patched model whose attention is a percent off."""
    sdpa = kernels_of("attention")["sdpa"]

    def off(call):
        output, lse = sdpa.run(call)
        return output * 1.01, lse

    import attnops.hf

    monkeypatch.setitem(registry._REGISTRY.kernels["attention"], "sdpa", replace(sdpa, run=off, contract=2))
    patch = attnops.hf.patch
    monkeypatch.setattr(attnops.hf, "patch", lambda model, **more: patch(model, kernel="sdpa", **more))
    found = {row["way"]: row for row in decode.prefill(TOY, decode.models.keeper(TOY), "llama", Point(2, 12))}
    assert {way for way, row in found.items() if "median_us" in row} == {"hf_eager", "hf_compiled"}
    assert all("wrong" in found[way] for way in ("attnops_eager", "attnops_compiled"))


def test_the_budget_of_a_model_tells_rounding_from_error():
    """In bfloat16, where the budget is widest: another order of operations is within it, attention that is 5% off is not."""
    import transformers

    dims = {"hidden_size": 1024, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 128}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(num_hidden_layers=3, **dims)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    prompt = torch.randint(3, 128, (2, 24))
    want = decode.models.exactly(model, prompt)
    with torch.no_grad():
        distance = decode.models.distance(model, model(prompt).logits[:, -1:])
        allowed = decode.models.budget(model, distance(model(prompt).logits[:, -1:], want))
        model.set_attn_implementation("eager")
        assert 0 < distance(model(prompt).logits[:, -1:], want) < allowed
        for layer in model.model.layers:
            layer.self_attn.o_proj.register_forward_pre_hook(lambda module, given: (given[0] * 1.05,))
        assert distance(model(prompt).logits[:, -1:], want) > allowed


def test_errors_are_measured_as_said():
    want = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    assert largest_error(want + torch.tensor([[0.0, 0.5], [0.0, 0.0]]), want) == 0.5
    assert largest_error(want[:1], want) == largest_error(want * float("nan"), want) == float("inf")
    off = want + torch.tensor([[0.0, 0.0], [0.1, 0.0]])
    assert relative_error(off, want) == pytest.approx(0.1) and relative_error(off, want, 0.5) == 0.0
    both = {"a": Way(Timed(lambda: want)), "b": Way(Timed(lambda: off))}
    rows = time_if_right("case", both, want, 0.01, lambda steps: {n: {"median_us": 2.0} for n in steps})
    assert [row["way"] for row in rows if "median_us" in row] == ["a"] and rows[1]["error"] == 0.1
    rows = with_ratios([entry("c", "a", 2.0), entry("c", "b", 4.0), entry("d", "b", 4.0)], "a")
    assert [row.get("of_a") for row in rows] == [None, 0.5, None]


def test_nothing_is_right_beside_what_is_no_number():
    want = torch.ones(2, 3)
    with pytest.raises(RuntimeError, match="nothing can be compared"):
        decode.models.budget(decode.models.build(TOY, "llama"), relative_error(want * float("nan"), want))
    rows = time_if_right("case", {"a": Way(Timed(lambda: want * float("nan")))}, want, float("inf"), lambda steps: {})
    assert rows[0]["wrong"] and "median_us" not in rows[0]


def test_rows_that_are_not_compared_with_exact_ones_are_compared():
    model, eager = decode.models.build(TOY, "llama"), torch.rand(4, 1, 8) + 1
    distance = decode.models.distance(model, eager)
    assert distance(eager * 1.01, eager[:2]) == pytest.approx(0.01)
    others = eager.clone()
    others[3] *= 1.5
    assert distance(others, eager[:2]) == pytest.approx(0.25), "half of how far it is from what may be off as far"
    others[3] = float("nan")
    assert distance(others, eager[:2]) == distance(eager[:3], eager[:2]) == float("inf")


def test_all_of_a_kernels_result_is_finite():
    out = torch.ones(4, 2, 1)
    way = exact.way(lambda: out, lambda whole: whole[:1], 0.0)
    assert torch.equal(way.computed(), out[:1])
    out[3, 1] = float("inf")
    assert way.computed().isnan().all()


def test_times_are_medians_in_turn():
    made: list[str] = []
    steps = {n: Timed(lambda n=n: made.append(n), before=lambda n=n: made.append(n.upper()), per=2) for n in "ab"}
    found = steps_us(steps, rounds=4)
    assert "".join(made).endswith("AaBb" * 4) and set(found["a"]) == {"median_us", "spread_us"}
    assert spread([5.0]) == {"median_us": 5.0} and spread([4.0, 6.0]) == {"median_us": 5.0, "spread_us": 1.0}
    assert spread([1.0, 2.0, 3.0, 4.0, 100.0])["median_us"] == 3.0


# Files and their comparison -------------------------------------------------------------------------------------------


def test_files_hold_what_was_measured(reports_of):
    reports, _, folder = reports_of
    for suite in suites.SUITES:
        assert read(folder / f"{suite.stem}.json") == json.loads(text_of(reports[suite.name]))
    with pytest.raises(InvalidInput, match="results file"):
        read(folder / "none.json")
    (folder / "other.json").write_text('{"cases": {}}')
    with pytest.raises(InvalidInput, match="no rows"):
        read(folder / "other.json")


def test_only_what_is_beyond_both_spreads_is_worse(tmp_path):
    def report(*rows):
        return {"rows": list(rows)}

    before = report(
        entry("a", "x", 100.0, 5.0), entry("b", "x", 100.0, 5.0), entry("c", "x", 100.0, 5.0), entry("d", "x", 100.0),
        entry("e", "x", 10.0, 0.1), entry("f", "x"), entry("g", "x", 3.0, 1.0), entry("h", "x", wrong="wrong: off"),
    )  # fmt: skip
    after = report(
        entry("a", "x", 109.0, 5.0), entry("b", "x", 111.0, 5.0), entry("c", "x", 89.0, 5.0), entry("d", "x", 500.0, 1.0),
        entry("e", "x", wrong="wrong: off"), entry("f", "x"), entry("h", "x", 1.0, 0.1), entry("i", "x", 1.0, 0.1),
    )  # fmt: skip
    changes = {c["case"]: c for c in compare(before, after)}
    assert {case: c["change"] for case, c in changes.items()} == {
        "a": "same", "b": "slower", "c": "faster", "d": "unknown", "e": "wrong", "f": "unknown", "g": "gone", "h": "right", "i": "new",
    }  # fmt: skip
    assert {case for case, c in changes.items() if c["worse"]} == {"b", "e"} and changes["b"]["ratio"] == 1.11
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, report_of in zip(files, (before, after), strict=True):
        path.write_text(text_of(report_of))
    result = attnops("--compare", *files, "--json")
    assert result.exit_code == 1 and json.loads(result.stdout)["regressions"] == 2
    assert json.loads(result.stdout)["changes"][1]["ratio"] == 1.11
    result = attnops("--compare", files[0], files[0])
    assert result.exit_code == 0 and "0 of 8 rows are worse" in result.stdout


def test_what_cannot_be_compared(tmp_path):
    rows = [entry("a", "x", 1.0, 0.1, layers=4)]
    with pytest.raises(InvalidInput, match="suites decode and prefill, want two of one suite"):
        compare({"suite": "decode", "rows": rows}, {"suite": "prefill", "rows": rows})
    with pytest.raises(InvalidInput, match="1 and 1 rows without a case and way in common"):
        compare({"rows": rows}, {"rows": [{**rows[0], "way": "y"}]})
    [change] = compare({"rows": rows}, {"rows": [{**rows[0], "layers": 32, "median_us": 9.0}]})
    assert change["change"] == "unlike" and not change["worse"]
    lost = compare({"rows": rows}, {"rows": [], "failed": {"a": "RuntimeError: lost"}})
    assert [(c["change"], c["worse"]) for c in lost] == [("failed", True), ("gone", False)]
    for row, said in ((1, "row 0 has no case and way"), ({"case": "a", "way": "x", "median_us": "1"}, "row 0 has no number for median_us")):
        path = tmp_path / "bad.json"
        path.write_text(json.dumps({"rows": [row]}))
        result = attnops("--compare", path, path)
        assert result.exit_code == 2 and said in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["speed"], "suites: got 'speed', want kernels | decode"),
        (["decode", "--model", "nope"], "model: got 'nope'"),
        (["decode", "--points", "8"], "points: got '8'"),
        (["decode", "--points", "0x12"], "points: got '0x12'"),
        (["decode", "--device", "tpu"], "device: got 'tpu'"),
        (["decode", "--budget-s", 0], "budget_s: got 0"),
        (["decode", "--layers", -1], "layers: got -1"),
        (["decode", "--model", "t5", "--device", "cpu"], "model: got 't5', a T5Config, want a decoder"),
        (["decode", "--ways", "nope", "--device", "cpu"], "ways: got 'nope', want some of hf_eager"),
        (["kernels", "--ways", "hf_eager"], "suites: got kernels, want generate, decode, prefill or training_steps, for --ways"),
        (["overhead", "--points", "8x1k"], "suites: got overhead, want one that measures models"),
        (["overhead", "--device", "cpu", "--out", __file__], "want a folder"),
        (["decode", "--device", "cpu", "--gpus", 2], "gpus: got 2, want 1 to 1"),
        (["--compare", "a.json"], "compare: got 1 files"),
        (["--compare", "a.json", "b.json"], "file: got a.json"),
    ],
    ids=lambda x: "_".join(map(str, x)) if isinstance(x, list) else "",
)
def test_wrong_arguments(arguments, said):
    result = attnops(*arguments)
    assert result.exit_code == 2 and said in result.stderr


def test_no_cuda_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = attnops("decode", "--device", "cuda")
    assert result.exit_code == 2 and "finds no CUDA device" in result.stderr


def test_points_and_models():
    assert Point.parse("8x1k") == Point(8, 1024) == Point.parse(" 8X1024")
    assert [str(Point(*sizes)) for sizes in ((8, 1024), (1, 100), (1, 1500))] == ["8x1k", "1x100", "1x1500"]
    config = decode.models.config(Setup(CPU, layers=5), "gpt-oss-20b-shape")
    assert config.num_hidden_layers == len(config.layer_types) == 5
    assert decode.models.config(Setup(CPU), "llama-3-8b-shape").num_hidden_layers == 1
    assert list(decode.cases(replace(TOY, model="gpt_oss"))) == ["gpt_oss 2x12"]
    full = list(decode.cases(Setup(torch.device("cuda"))))
    assert full[0] == "llama-3-8b-shape 1x1k" and len(full) == 8 and "deepseek-v3-shape 8x1k" in full
    short = Setup(torch.device("cuda"), model="llama-8b-shape")
    assert list(decode.cases(short))[-1] == "llama-3-8b-shape 32x2k"
    for cases in (compile.cases, compile.graph_cases):
        assert "llama-3-8b-shape" in next(iter(cases(short))), "of whatever name it was asked for by"


# Pages and files ----------------------------------------------------------------------------------------------------------
def test_pages_are_made_of_the_files(reports_of, tmp_path, monkeypatch):
    reports, _, _ = reports_of
    monkeypatch.syspath_prepend(ROOT / "docs")
    page = import_module("performance")
    folder = tmp_path / "benchmarks" / "results" / "toy"
    folder.mkdir(parents=True)
    assert page.performance_full(tmp_path) == page.performance_short(tmp_path) == page.picture(tmp_path) == page.NONE
    assert not list(page.stale_plots(tmp_path, True))
    wrong = {"case": "llama 2x12", "way": "attnops_new", "wrong": "wrong: off by 3", "budget": 1.0}
    (folder / "decode.json").write_text(text_of({**reports["decode"], "rows": [*reports["decode"]["rows"], wrong]}))
    (folder / "kernels.json").write_text('{"numerics": {}}')
    text = page.performance_full(tmp_path)
    assert (
        "### decode" in text and "(plots/toy-speeds.svg)" in page.pictures_full(tmp_path) and "`attnops bench decode --out results`" in text
    )
    assert "### kernels" not in text and "choice" not in text
    [line] = [line for line in text.splitlines() if "`attnops_new`" in line]
    assert line.startswith("| llama 2x12 | `attnops_new` | wrong: off by 3 | - |")
    short = page.performance_short(tmp_path)
    assert "| toy | decode llama 2x12, 1 layers |" in short and "attnops_new" not in short
    made_up = {"hf_eager": 3.0, "hf_compiled": 4.0, "hf_tuned": 2.0, "attnops_eager": 1.0, "attnops_hf": 1.6}
    rows = [entry("a", way, 1000 * ms, 100.0) for way, ms in made_up.items()]
    (folder / "prefill.json").write_text(text_of({**reports["prefill"], "rows": rows}))
    assert "| toy | prefill a | 3.00 ± 0.10 | 2.00 ± 0.10 | 1.60 ± 0.10 (`attnops_hf`) | 1.25x |" in page.performance_short(tmp_path)
    assert "The same run" not in page.performance_full(tmp_path).partition("### prefill")[0], "two files of one run"
    (folder / "prefill.json").unlink()
    drawn = list(page.stale_plots(tmp_path, True))
    assert "docs/plots/toy-tokens.svg" in drawn and drawn == list(page.stale_plots(tmp_path, False))
    assert not list(page.stale_plots(tmp_path, True))
    changed = json.loads((folder / "decode.json").read_text())
    changed["rows"][0]["median_us"] += 1e6
    (folder / "decode.json").write_text(text_of(changed))
    assert "docs/plots/toy-tokens.svg" in list(page.stale_plots(tmp_path, True))
    (folder / "decode.json").unlink()
    assert list(page.stale_plots(tmp_path, False)) == sorted(drawn) and not list((tmp_path / "docs" / "plots").iterdir())


def test_the_command_prints_json():
    result = attnops("kernels", "--quick", "--device", "cpu", "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)["kernels"]["rows"]
