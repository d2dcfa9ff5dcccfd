"""`attnops bench`: every suite once at toy size, and what becomes of its figures: verdicts, files,
comparisons, pictures, pages."""

import io
import json
import time
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("typer", reason="the extra `cli` brings typer and rich")
pytest.importorskip("transformers", reason="most suites measure transformers models")

from rich.console import Console
from typer.testing import CliRunner

import attnops.hf
from attnops.bench import (
    Point,
    Setup,
    compile,
    decode,
    exact,
    generate,
    overhead,
    run as suites,
    training,
    training_steps,
    ways as table,
    work,
)
from attnops.bench.files import bad, compare, read, text_of
from attnops.bench.rows import Way, largest_error, relative_error, time_if_right, with_ratios
from attnops.cli import bench as command
from attnops.cli.app import app
from attnops.core.errors import InvalidInput
from attnops.core.kernel import all_kernels, kernels_of
from attnops.measured.digests import digests
from attnops.ops import OPS
from attnops.tune.clock import Timed, spread, steps_us
from tests.graphs.standin import StandIn
from tests.hf.helpers import Counter
from tests.measuring import exchange, scaled

CPU = torch.device("cpu")
TOY = Setup(
    CPU, quick=True, backend="eager", ceilings={"bandwidth_tb_s": 1.0, "matmul_tflop_s": 1.0}
)
CEILINGS = {"bandwidth_tb_s", "matmul_tflop_s"}
GPU = Setup(torch.device("cuda"))
STEPS = table.WAYS["training_steps"]


@pytest.fixture(scope="session")
def reports_of(tmp_path_factory) -> Any:
    """(reports of all suites, what was printed, the folder of files). Dynamo hands graphs to
    itself: nothing is timed well."""
    folder = tmp_path_factory.mktemp("bench")
    console = Console(width=150, record=True, file=io.StringIO())
    every = tuple(suite.name for suite in suites.SUITES)
    reports = command.run(
        console, every, Setup(CPU, quick=True, backend="eager"), out=folder, commit="c0ffee"
    )
    return reports, console.export_text(), folder


@pytest.fixture
def reports(reports_of) -> Any:
    return reports_of[0]


def entry(case, way, median_us=None, spread_us=None, **more):
    times = {"median_us": median_us, "spread_us": spread_us}
    return {
        "case": case,
        "way": way,
        **{name: us for name, us in times.items() if us is not None},
        **more,
    }


def patch_with(monkeypatch, change):
    """Until the test ends patched models have in the place of sdpa what `change` makes of a call
    and of what sdpa runs."""
    right, patch = kernels_of("attention")["sdpa"].run, attnops.hf.patch
    exchange(monkeypatch, "attention", "sdpa", lambda call: change(call, right))
    monkeypatch.setattr(
        attnops.hf, "patch", lambda model, **more: patch(model, kernel="sdpa", **more)
    )


def attnops_bench(*arguments):
    return CliRunner().invoke(app, ["bench", *(str(a) for a in arguments)])


# Suites -------------------------------------------------------------------------------------------


def test_every_suite_measures(reports_of):
    reports, printed, folder = reports_of
    assert list(reports) == [suite.name for suite in suites.SUITES]
    assert bad(reports) == []
    for suite in suites.SUITES:
        report = reports[suite.name]
        assert read(folder / f"{suite.stem}.json") == json.loads(text_of(report))
        if suite.name == "graphs":
            assert not report["rows"] and set(report["left_out"].values()) == {
                "there are no CUDA graphs on a CPU"
            }
            continue
        left = [
            why for why in report["left_out"].values() if "version of PEFT" not in why
        ]  # which transformers refuses
        assert report["rows"] and not report["failed"] and not left, suite.name
        assert report["commit"] == "c0ffee" and report["size"] == "toy" and suite.name in printed
        assert report["ceilings"].keys() == CEILINGS and min(report["ceilings"].values()) > 0
        assert report["code"] and report["code"].items() <= digests(all_kernels()).items(), (
            "of today's kernels"
        )
        assert {kernel.partition(".")[0] for kernel in report["code"]} <= {*(suite.ops or OPS)}
        for row in report["rows"]:
            assert "wrong" not in row, row
            assert row.get("median_us", 1.0) > 0 and row.get("error", 0.0) <= row.get("budget", 0.0)


def test_kernels_are_beside_others(reports):
    cases = ways(reports["kernels"])
    assert [name.partition(" ")[0] for name in cases] == ["decode", "prefill", "extend", "latent"]
    for name in ("decode 2x32", "prefill 1x32"):
        assert {"sdpa", "reference", "automatic", "torch.sdpa"} <= set(cases[name])
    for rows in cases.values():
        assert {rows["automatic"]["kernel"], rows["deterministic"]["kernel"]} <= set(rows)
        assert "of_automatic" in rows["deterministic"]
        for row in rows.values():
            assert row["of_ceiling"] == max(row["of_bandwidth"], row["of_flops"])
    moves = ways(reports["data"])
    assert moves["write_kv 64"].keys() == {"reference", "compiled", "copy"}
    assert moves["kv_indices 64"].keys() == {"reference", "compiled"}
    for rows in ways(reports["training"]).values():
        for row in (rows[way] for way in training.OURS):
            assert row["kernel"] and row["host_us"] > 0 and row["error"] > 0
    plain, packed, *_ = ways(reports["training"]).values()
    assert (
        plain["torch"]["error"] > 0
        and plain["automatic"]["of_direct"] > 0
        and "torch" not in packed
    )


def test_the_bytes_of_a_step():
    """Weights but the embedding, which is read a row at a time, and keys and values of all layers,
    of a window no more than it has."""

    def kept(model):
        """Bytes of a token in the cache."""
        c = model.config
        return c.num_hidden_layers * work.kv_width(c) * 4

    plain, tied, mixture = (
        decode.models.build(TOY, name) for name in ("llama", "gemma2", "mixtral")
    )
    weights, whole = (sum(p.nbytes for p in model.parameters()) for model in (plain, tied))
    own = weights - plain.get_input_embeddings().weight.nbytes
    assert work.bytes_of(plain, Point(3, 20)) == own + 3 * 20 * kept(plain)
    window = tied.config.sliding_window
    near, far = (work.bytes_of(tied, Point(1, n)) for n in (window, window + 8))
    assert near == whole + window * kept(tied), "a tied embedding is read for the logits"
    assert (
        far - near
        == 8
        * kept(tied)
        * tied.config.layer_types.count("full_attention")
        // tied.config.num_hidden_layers
    )
    of_experts = sum(p.nbytes for p in mixture.parameters() if p.dim() == 3)
    rest = sum(p.nbytes for p in mixture.parameters()) - of_experts
    rest += 20 * kept(mixture) - mixture.get_input_embeddings().weight.nbytes
    assert work.bytes_of(mixture, Point(1, 20)) == rest + of_experts / 2, "two of four experts"
    two = work.bytes_of(mixture, Point(2, 20)) - 20 * kept(mixture)
    assert two == rest + of_experts * 3 / 4, "a second token chooses one that is new, of its two"


def test_the_bytes_of_a_step_with_states():
    """States are read and written."""
    model = decode.models.build(TOY, "qwen3_next")
    c = model.config
    one, longer, two = (work.bytes_of(model, Point(*at)) for at in ((1, 20), (1, 28), (2, 20)))
    token = work.kv_width(c) * 4
    assert longer - one == 8 * token, "one layer of attention"
    state = c.linear_num_value_heads * c.linear_key_head_dim * c.linear_value_head_dim
    keys = 2 * c.linear_num_key_heads * c.linear_key_head_dim
    channels = keys + c.linear_num_value_heads * c.linear_value_head_dim
    states = 3 * 4 * (state + channels * c.linear_conv_kernel_dim)
    of_experts = sum(p.nbytes for n, p in model.named_parameters() if ".experts." in n)
    assert two - one == 20 * token + 2 * states + of_experts / 4


def test_the_ways_asked_for_are_measured_under_their_policies(monkeypatch):
    """One with a kernel that no CPU has, after the prompt."""
    forced = table.How({"cache": "hf"}, policy={"kernel": {"attention": "fa3"}})
    monkeypatch.setitem(table.WAYS["decode"], "attnops_eager", forced)
    chosen = replace(TOY, ways=("attnops_hf", "attnops_eager"))
    rows = decode.measure(chosen, decode.models.keeper(chosen), "llama", Point(2, 12))
    assert {row["way"]: "median_us" in row for row in rows} == {
        "hf_eager": True,
        "attnops_eager": False,
        "attnops_hf": True,
    }
    assert "fa3" in rows[1]["wrong"]
    on_gpu = [how.policy for how in table.here(GPU, "decode").values() if how.patch and how.device]
    for kernel, apart in product(({}, table.STOCK), ({}, table.APART)):
        assert kernel | apart in on_gpu, "linears and attention, each on and off"


def test_graphs_are_captured_and_counted():
    """On a stand-in for the device."""
    cases = compile.graph_cases(TOY, device=StandIn()).values()
    found = ways({"rows": [row for case in cases for row in case()]})
    assert found.keys() == {"llama, buckets", "llama, host"}
    for rows in found.values():
        assert rows.keys() == {f"attnops_{mode}" for mode in compile.MODES}
    for row in found["llama, buckets"].values():
        assert (row["buckets"], row["mode"]) == (3, "whole") and row["graph_bytes"] > 0


def ways(report):
    found: dict[str, dict[str, Any]] = {}
    for row in report["rows"]:
        found.setdefault(row["case"], {})[row["way"]] = row
    return found


def test_whole_models_are_beside_their_peers(reports):
    for suite in ("decode", "prefill"):
        [rows] = ways(reports[suite]).values()
        assert set(rows) == set(table.here(TOY, suite)), "what may be asked for is what there is"
        best = rows.pop("hf_eager")
        for way, row in rows.items():
            assert row["budget"] < 1e-4, "that of float32"
            assert row["of_hf_eager"] == pytest.approx(
                best["median_us"] / row["median_us"], rel=1e-3
            ), way
    calls, first = ways(reports["generate"]).values()
    assert set(calls) == {*table.chosen(TOY, "generate")} and set(first) == {*generate.FIRST} - {
        "attnops_piecewise"
    }
    compiled = ways(reports["compile"])
    for case in ("llama, cold", "llama, warm"):
        assert set(compiled[case]) == set(table.here(TOY, "compile"))
    steps = ways(reports["training_steps"])
    assert set(steps["llama 2x12"]) == {"hf_sdpa", "hf_eager", "attnops"}
    assert set(steps["gpt_oss 2x12"]) == {"hf_eager", "attnops"}
    calls = ways(reports["overhead"])
    assert calls["eager call of a kernel that does nothing"].keys() == {
        "plain",
        "function",
        "op",
        "overload",
    }
    assert (
        all("op_us" in calls["compiled graph"][way] for way in ("8_ops", "24_ops"))
        and "attnops" in calls["import"]
    )
    assert "bench_noop" not in kernels_of("paged_attention"), "it is registered in another process"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_sm90_tst_64x8_64x16_2x1_v_bz_splitK_TNT", "matmul"),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_tn_align1>", "matmul"),
        ("triton_tem_fused_mm_3", "matmul"),
        ("few_rows", "matmul"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<flash::Main>>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm80_flash_fprop", "attention"),
        ("decode", "attention"),
        ("triton_poi_fused__scaled_dot_product_cudnn_attention__to_copy", "glue"),
        ("store", "glue"),
    ],
)
def test_kernels_are_of_a_kind_by_their_names(name, kind):
    assert decode.shares([(0, 1, name)])[kind] == 1


def test_overlaps_are_counted_once_and_gaps_are_found():
    """Stage two of a split attention is launched while stage one runs, and waits for it."""
    found = decode.shares(
        [(12, 20, "combine"), (10, 18, "attend"), (25, 30, "nvjet"), (31, 33, "store")]
    )
    assert found == {"matmul": 5, "attention": 10, "glue": 2, "gaps": 6}
    assert sum(decode.shares([]).values()) == 0


@pytest.fixture
def packed():
    """A small model, and a batch of three packed documents."""
    model = training_steps.models.build(TOY, "llama").requires_grad_(True)
    return model, *training_steps.packed(TOY, model, Point(3, 12))


def test_training_steps_agree_with_transformers(packed):
    model, batch, count = packed
    first = batch["position_ids"] == 0
    assert count == first.sum() == 3 and (batch["labels"][first] == -100).all()

    def loss_of(way, **more):
        return training_steps.step(TOY, model, STEPS[way], {**batch, **more}).computed()

    right = loss_of("hf_eager")
    torch.testing.assert_close(loss_of("attnops"), right, atol=1e-4, rtol=0)
    one_document = loss_of("attnops", position_ids=torch.arange(36)[None])
    assert (one_document - right).abs().max() > 1e-3


def test_a_whole_training_step_is_compiled(packed, monkeypatch):
    counter, torch_compile = Counter(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: torch_compile(model, backend=counter))
    model, batch, _ = packed
    right, mine = (
        training_steps.step(TOY, model, STEPS[way], batch).computed()
        for way in ("attnops", "attnops_compiled")
    )
    torch.testing.assert_close(mine, right, atol=1e-4, rtol=0)
    assert len(counter) == 1


def test_an_overhead_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(overhead, "LIMIT_S", 0.01)
    with pytest.raises(TimeoutError, match=r"not done after 0\.01 s"):
        overhead.in_a_process(time.sleep, 60.0)


# Verdicts -----------------------------------------------------------------------------------------


def test_a_wrong_model_has_no_speed(monkeypatch):
    """A patched model whose attention is a percent off."""
    patch_with(monkeypatch, scaled(1.01))
    found = decode.prefill(TOY, decode.models.keeper(TOY), "llama", Point(2, 12))
    wrong = {row["way"] for row in found if "wrong" in row and "median_us" not in row}
    assert wrong == {row["way"] for row in found if row["way"].startswith("attnops")} != set()


def test_the_budget_of_a_model_tells_rounding_from_error():
    """In bfloat16, where the budget is widest: another order of operations is within it, attention
    that is 5% off is not."""
    import transformers

    dims = {
        "hidden_size": 1024,
        "intermediate_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }
    config = transformers.LlamaConfig(num_hidden_layers=3, vocab_size=128, **dims)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()
    prompt = torch.randint(3, 128, (2, 24))
    want = decode.models.exactly(model, prompt)

    @torch.no_grad()
    def logits():
        return model(prompt).logits[:, -1:]

    distance = decode.models.distance(model, logits())
    allowed = decode.models.budget(model, distance(logits(), want))
    model.set_attn_implementation("eager")
    assert 0 < distance(logits(), want) < allowed
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(lambda module, given: (given[0] * 1.05,))
    assert distance(logits(), want) > allowed


def test_errors_are_measured_as_said():
    want = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    assert largest_error(want + torch.tensor([0.0, 0.5]), want) == 0.5
    assert largest_error(want[:1], want) == largest_error(want * float("nan"), want) == float("inf")
    off = want + torch.tensor([[0.0], [0.1]])
    assert relative_error(off, want) == pytest.approx(0.02**0.5)
    assert relative_error(off, want, 0.5) == 0.0


def test_the_time_of_a_wrong_way_is_not_taken():
    both = {
        name: Way(Timed(lambda value=value: torch.tensor(value)))
        for name, value in (("a", 1.0), ("b", 1.25))
    }
    rows = time_if_right(
        "case", both, torch.tensor(1.0), 0.01, lambda steps: {n: {"median_us": 2.0} for n in steps}
    )
    assert [row.get("median_us") for row in rows] == [2.0, None] and rows[1]["error"] == 0.25
    rows = with_ratios([entry("c", "a", 2.0), entry("c", "b", 4.0), entry("d", "b", 4.0)], "a")
    assert [row.get("of_a") for row in rows] == [None, 0.5, None]


def test_nothing_is_right_beside_what_is_no_number():
    want = torch.ones(2, 3)
    with pytest.raises(RuntimeError, match="nothing can be compared"):
        decode.models.budget(
            decode.models.build(TOY, "llama"), relative_error(want * float("nan"), want)
        )
    rows = time_if_right(
        "case", {"a": Way(Timed(lambda: want * float("nan")))}, want, float("inf"), lambda steps: {}
    )
    assert rows[0]["wrong"] and "median_us" not in rows[0]


def test_rows_that_are_not_compared_with_exact_ones_are_compared():
    model, eager = decode.models.build(TOY, "llama"), torch.rand(4, 1, 8) + 1
    distance = decode.models.distance(model, eager)
    assert distance(eager * 1.01, eager[:2]) == pytest.approx(0.01)
    others = eager.clone()
    others[3] *= 1.5
    assert distance(others, eager[:2]) == pytest.approx(0.25), (
        "half of how far it is from what may be off as far"
    )
    others[3] = float("nan")
    assert distance(others, eager[:2]) == distance(eager[:3], eager[:2]) == float("inf")


def test_all_of_a_kernels_result_is_finite():
    out = torch.ones(4, 2, 1)
    way = exact.way(lambda: out, lambda whole: whole[:1], 0.0)
    assert torch.equal(way.computed(), out[:1])
    out[3, 1] = float("inf")
    assert way.computed().isnan().all()


def test_times_are_medians_in_turn(monkeypatch):
    """Of a call and of half a call that takes four microseconds."""
    made, now = list[str](), [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def call(name):
        made.append(name)
        now[0] += 4e-6

    def step(name, per):
        return Timed(partial(call, name), before=partial(made.append, name.upper()), per=per)

    found = steps_us({"a": step("a", 1), "b": step("b", 2)}, rounds=4)
    assert "".join(made) == "AaBb" * 4
    assert [found[name]["median_us"] for name in "ab"] == [4.0, 2.0]
    assert spread([5.0]) == {"median_us": 5.0} and spread([4.0, 6.0]) == {
        "median_us": 5.0,
        "spread_us": 1.0,
    }
    assert spread([1.0, 2.0, 3.0, 4.0, 100.0])["median_us"] == 3.0


# Files and their comparison -----------------------------------------------------------------------


def x(*times, **more):
    """A row of a way, with its time and spread."""
    return entry("", "x", *times, **more)


COMPARED = [
    (x(100.0, 5.0), x(109.0, 5.0), "same"),
    (x(100.0, 5.0), x(111.0, 5.0), "slower"),
    (x(100.0, 5.0), x(89.0, 5.0), "faster"),
    (x(100.0), x(500.0, 1.0), "unknown"),
    (x(10.0, 0.1), x(wrong="wrong: off"), "wrong"),
    (x(), x(), "unknown"),
    (x(3.0, 1.0), None, "gone"),
    (x(wrong="wrong: off"), x(1.0, 0.1), "right"),
    (None, x(1.0, 0.1), "new"),
    (x(1.0, 0.1, layers=4), x(9.0, 0.1, layers=32), "unlike"),
]


def test_only_what_is_beyond_both_spreads_is_worse(tmp_path):
    before, after = (
        {
            "rows": [
                {**rows[side], "case": str(at)} for at, rows in enumerate(COMPARED) if rows[side]
            ]
        }
        for side in (0, 1)
    )
    changes = {int(c["case"]): c for c in compare(before, after)}
    assert [changes[at]["change"] for at in range(len(COMPARED))] == [
        change for _, _, change in COMPARED
    ]
    assert {c["change"] for c in changes.values() if c["worse"]} == {"slower", "wrong"}
    assert changes[1]["ratio"] == 1.11
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, report_of in zip(files, (before, after), strict=True):
        path.write_text(text_of(report_of))
    result = attnops_bench("--compare", *files, "--json")
    assert result.exit_code == 1 and json.loads(result.stdout)["regressions"] == 2
    result = attnops_bench("--compare", files[0], files[0])
    assert result.exit_code == 0 and "0 of 9 rows are worse" in result.stdout


def test_what_cannot_be_compared():
    rows = [entry("a", "x", 1.0, 0.1)]
    with pytest.raises(InvalidInput, match="suites decode and prefill, want two of one suite"):
        compare({"suite": "decode", "rows": rows}, {"suite": "prefill", "rows": rows})
    with pytest.raises(InvalidInput, match="1 and 1 rows without a case and way in common"):
        compare({"rows": rows}, {"rows": [{**rows[0], "way": "y"}]})
    lost = compare({"rows": rows}, {"rows": [], "failed": {"a": "RuntimeError: lost"}})
    assert [(c["change"], c["worse"]) for c in lost] == [("failed", True), ("gone", False)]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"cases": {}}, "no rows"),
        ({"rows": [1]}, "row 0 has no case and way"),
        (
            {"rows": [{"case": "a", "way": "x", "median_us": "1"}]},
            "row 0 has no number for median_us",
        ),
    ],
)
def test_what_is_no_results_file(data, said, tmp_path):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(data))
    result = attnops_bench("--compare", path, path)
    assert result.exit_code == 2 and said in " ".join(result.stderr.split())


CPU_ONLY = ["--device", "cpu"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["speed"], "suites: got 'speed', want kernels | decode"),
        (["decode", "--model", "nope"], "model: got 'nope'"),
        (["decode", "--points", "8"], "points: got '8'"),
        (["decode", "--points", "0x12"], "points: got '0x12'"),
        (["decode", "--device", "tpu"], "device: got 'tpu'"),
        (["decode", "--device", "cuda"], "finds no CUDA device"),
        (["decode", "--budget-s", 0], "budget_s: got 0"),
        (["decode", "--layers", -1], "layers: got -1"),
        (["decode", "--model", "t5", *CPU_ONLY], "model: got 't5', a T5Config, want a decoder"),
        (["decode", "--ways", "nope", *CPU_ONLY], "ways: got 'nope', want some of hf_eager"),
        (
            ["kernels", "--ways", "hf_eager"],
            "suites: got kernels, want one of cliffs, compile, decode, first_token, generate,",
        ),
        (["overhead", "--points", "8x1k"], "suites: got overhead, want one that measures models"),
        (["overhead", *CPU_ONLY, "--out", __file__], "want a folder"),
        (["decode", *CPU_ONLY, "--gpus", 2], "gpus: got 2, want 1 to 1"),
        (["--compare", "a.json"], "compare: got 1 files"),
        (["--compare", "a.json", "b.json"], "file: got a.json"),
    ],
    ids=str,
)
def test_wrong_arguments(arguments, said, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = attnops_bench(*arguments)
    assert result.exit_code == 2 and said in result.stderr


def test_points_and_models():
    assert Point.parse("8x1k") == Point(8, 1024) == Point.parse(" 8X1024")
    assert [str(Point(*sizes)) for sizes in ((8, 1024), (1, 100), (1, 1500))] == [
        "8x1k",
        "1x100",
        "1x1500",
    ]
    config = decode.models.config(Setup(CPU, layers=5), "gpt-oss-20b-shape")
    assert config.num_hidden_layers == len(config.layer_types) == 5
    assert list(decode.cases(replace(TOY, model="gpt_oss"))) == ["gpt_oss 2x12"]
    for cases in (decode.cases, compile.cases, compile.graph_cases):
        first = next(iter(cases(replace(GPU, model="llama-8b-shape"))))
        assert "llama-3-8b-shape" in first, "of whatever name it was asked for by"
    assert [suite.name for suite in suites.named(("regret", "kernels"))] == ["kernels", "regret"]
    assert "generate" not in [suite.name for suite in suites.named(())], (
        "those that take long are named"
    )


# Pages and files ----------------------------------------------------------------------------------


def test_pages_are_made_of_the_files(reports, tmp_path, docs):
    page, report = docs("performance"), reports["decode"]
    path = tmp_path / "benchmarks" / "results" / "toy" / "decode.json"
    path.parent.mkdir(parents=True)

    def drawn(check=False):
        return list(page.stale_plots(tmp_path, check))

    assert (
        page.performance_full(tmp_path)
        == page.performance_short(tmp_path)
        == page.picture(tmp_path)
        == page.NONE
    )
    assert not drawn(True)
    wrong = {"case": "llama 2x12", "way": "attnops_new", "wrong": "wrong: off by 3", "budget": 1.0}
    path.write_text(text_of({**report, "rows": [*report["rows"], wrong]}))
    text, short = page.performance_full(tmp_path), page.performance_short(tmp_path)
    assert "\n| llama 2x12 | `attnops_new` | wrong: off by 3 | - |" in text
    assert "| toy | decode llama 2x12, 1 layers |" in short and "attnops_new" not in short
    # A picture is drawn anew when its figures change, and leaves with them.
    first = drawn(True)
    assert "docs/plots/toy-tokens.svg" in first and first == drawn() and not drawn(True)
    path.write_text(
        text_of({**report, "rows": [report["rows"][0] | {"median_us": 1e6}, *report["rows"][1:]]})
    )
    assert "docs/plots/toy-tokens.svg" in drawn(True)
    path.unlink()
    assert drawn() == sorted(first) and not list((tmp_path / "docs" / "plots").iterdir())


def test_the_command_prints_json():
    result = attnops_bench("kernels", "--quick", "--device", "cpu", "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)["kernels"]["rows"]
