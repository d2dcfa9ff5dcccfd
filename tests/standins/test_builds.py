"""Kernels whose modules are built on the user's machine: chosen once they are, built in a call only
where they are forced, and `attnops build`, over stand-ins of FlashInfer."""

import copy
import json
import pickle
import threading
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import attnops
from attnops.cli import doctor, tables
from attnops.cli.app import app
from attnops.cli.build import _lacking
from attnops.core import builds
from attnops.core.errors import InvalidInput, NoKernel
from attnops.core.kernel import generation, kernels_of
from attnops.core.problem import Problem, Target, altered
from attnops.core.select import select
from attnops.core.traits import Unbuilt
from attnops.kernels.flashinfer import build as command, libraries, modules as fi
from attnops.lowering.explain import Explanation, Site
from attnops.measured import Grid, Table
from attnops.ops import OPS, varlen_attention
from attnops.testing import Features, Source, make_call
from tests.standins import flashinfer_modules
from tests.standins.flashinfer_folder import SM90, folder, keep, machine

BF16 = torch.bfloat16
LLAMA = Features(dtype=BF16, head_dim=64, q_heads=8, causal=True)
FA3 = "fa3:bfloat16:64"
COMMAND = f"attnops build {FA3}"
ABSENT_COMPILER = fi.absent_compiler
ALLOWED = {"allow": ("flashinfer", "reference")}
"""The kernels of packed attention that a CPU can run here."""


@pytest.fixture
def bare(tmp_path):
    """A machine with FlashInfer and nothing built."""
    with flashinfer_modules.installed() as calls, machine(tmp_path):
        yield calls


def packed(f=LLAMA, q_lens=(100, 90)):
    return make_call("varlen_attention", Source(0), q_lens, q_lens, f)


def run(call, **policy):
    """The op's result and the kernel that gave it."""
    before = len(flashinfer_modules.CALLS)
    with attnops.use(**policy):
        out = varlen_attention(**call.arguments)
    return out, "flashinfer" if len(flashinfer_modules.CALLS) > before else "another"


def build(*words):
    return list(command.build(map(command.parse, words)))


# Choice -------------------------------------------------------------------------------------------


def test_a_kernel_that_is_not_built_gives_way_and_says_how_to_build_it(bare):
    problem = packed().problem
    problem = altered(problem, target=SM90)
    with attnops.use(prefer=("flashinfer",)):
        key = attnops.core.select.active_policy()
    before = select(problem, key)
    assert before.kernel.name != "flashinfer" and before.awaited == "flashinfer"
    [reason] = before.refused["flashinfer"]
    assert reason == Unbuilt("module", f"{FA3}, not built", COMMAND, (FA3,))
    assert f"; flashinfer once it is built: {COMMAND}" in str(before).splitlines()[0]
    assert f"not flashinfer: module={FA3}, not built (wants {COMMAND})" in str(before)
    assert not flashinfer_modules.BUILT
    build(FA3)
    builds.look()
    after = select(problem, key)
    assert after.kernel.name == "flashinfer" and not after.awaited and not after.build


def test_a_call_follows_what_another_process_builds_and_looks_at_no_file(bare, monkeypatch):
    call = packed()
    assert [run(call, **ALLOWED)[1] for _ in range(2)] == ["another"] * 2
    looked = []
    known = libraries.unbuilt
    monkeypatch.setattr(libraries, "unbuilt", lambda x: looked.append(x) or known(x))
    monkeypatch.setattr(builds, "PERIOD_S", 60.0)
    assert run(call, **ALLOWED)[1] == "another" and not looked
    for name in fi.library_of(command.module(FA3), paged=False).names:
        keep(name)  # as another process would
    assert run(call, **ALLOWED)[1] == "another" and not looked
    builds.look()
    assert run(call, **ALLOWED)[1] == "flashinfer"


def test_a_thread_looks_while_something_is_wanted(bare, monkeypatch):
    monkeypatch.setattr(builds, "PERIOD_S", 0.01)
    for thread in builds._THREADS:
        thread.join(5)  # of an earlier test, with its period
    problem = altered(packed().problem, target=SM90)
    select(problem)
    [thread] = builds._THREADS
    assert thread.daemon and thread in threading.enumerate()
    before = generation()
    build(FA3)
    thread.join(5)
    assert not thread.is_alive() and generation() > before and not builds._WISHES
    assert "flashinfer" not in select(problem).refused


def test_a_forced_kernel_builds_and_says_so_first_once(bare):
    call = packed()
    said = (
        rf"FlashInfer builds its module {FA3} in this call, which may take minutes. "
        rf"`attnops build {FA3}` builds"
    )
    with pytest.warns(UserWarning, match=said):
        assert run(call, kernel="flashinfer")[1] == "flashinfer"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fi.load.cache_clear()
        assert run(call, kernel="flashinfer")[1] == "flashinfer"
    builds.look()
    assert run(call, **ALLOWED)[1] == "flashinfer"


def test_a_forced_kernel_that_is_built_says_nothing(bare):
    build(FA3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(packed(), kernel="flashinfer")[1] == "flashinfer"


def test_where_nothing_else_may_run_the_error_names_the_command(bare):
    with (
        attnops.use(allow=("flashinfer",)),
        pytest.raises(NoKernel, match="wants attnops build fa3"),
    ):
        varlen_attention(**packed().arguments)


def test_of_another_machine_modules_are_taken_as_built(bare):
    there = altered(packed().problem, target=Target("cuda", 90, assume=("flashinfer",)))
    assert "flashinfer" not in select(there).refused


def test_a_plan_is_made_for_a_kernel_that_is_built(bare):
    f = replace(LLAMA, kv_heads=2)
    call = make_call("paged_attention", Source(0), (100, 1), (100, 9), 16, f)
    problem = altered(call.problem, target=SM90, plan="host")
    assert [r.field for r in select(problem).refused["flashinfer"]] == ["module"]
    made = altered(problem, op="plan_paged_attention", plan="none")
    assert select(made).kernel.name == "reference"
    build(FA3)
    builds.look()
    assert "flashinfer" not in select(problem).refused
    assert select(made).kernel.name == "flashinfer"


def test_the_cache_keys_of_compiled_code_tell_what_is_built(bare):
    kernel = kernels_of("varlen_attention")["flashinfer"]
    before = kernel.absences_key()
    build(FA3)
    assert kernel.absences_key() != before


def test_a_need_that_fails_is_a_refusal(bare, monkeypatch):
    def fails(version):
        raise PermissionError("no")

    monkeypatch.setattr(libraries, "_own", fails)
    [reason] = select(altered(packed().problem, target=SM90)).refused["flashinfer"]
    assert "flashinfer.built" in str(reason) and "PermissionError" in str(reason)


def test_the_refusal_crosses_processes():
    reason = Unbuilt("module", "x, not built", "attnops build x", ("x",))
    for other in (pickle.loads(pickle.dumps(reason)), copy.deepcopy(reason)):
        assert other == reason and type(other) is Unbuilt


# Which module -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "arch", "queries", "change", "want"),
    [
        ("paged_attention", 90, 1, {"kv_heads": 8}, ["decode:bfloat16:64"]),
        ("paged_attention", 90, 1, {"kv_heads": 2}, ["fa2:bfloat16:64"]),
        ("paged_attention", 90, 100, {}, ["fa3:bfloat16:64"]),
        ("paged_attention", 80, 100, {}, ["fa2:bfloat16:64"]),
        # FA3 begins within the bounds of 33..64 queries of three heads.
        (
            "paged_attention",
            90,
            20,
            {"kv_heads": 2, "q_heads": 6},
            ["fa2:bfloat16:64", "fa3:bfloat16:64"],
        ),
        ("varlen_attention", 90, 1, {"kv_heads": 8}, ["fa2:bfloat16:64"]),
        ("varlen_attention", 90, 100, {"softcap": 5.0}, ["fa3:bfloat16:64:softcap"]),
        (
            "varlen_attention",
            90,
            100,
            {"window": (5, 0), "sinks": BF16},
            ["fa3:bfloat16:64:window:sinks"],
        ),
    ],
)
def test_the_modules_of_a_problem(op, arch, queries, change, want):
    f = replace(LLAMA, **change)
    lens = (queries, 1)
    pages = (16,) if op == "paged_attention" else ()
    problem = make_call(op, Source(0), lens, lens, *pages, f).problem
    found = fi.libraries_of(altered(problem, target=Target("cuda", arch)))
    assert [library.word for library in found] == want


def test_without_bounds_every_path_must_be_built():
    f = replace(LLAMA, kv_heads=8)
    call = make_call("paged_attention", Source(0), (1,), (1,), 16, f)
    problem = altered(call.problem, target=SM90)
    free = altered(problem, queries=replace(problem.sizes.queries, lo=0, hi=None))
    words = [library.word for library in fi.libraries_of(free)]
    assert words == ["decode:bfloat16:64", "fa2:bfloat16:64", "fa3:bfloat16:64"]
    steady = altered(free, deterministic=True)
    assert [library.word for library in fi.libraries_of(steady)] == ["fa3:bfloat16:64"]


def test_unlike_head_dims_over_pages_need_a_second_library(bare):
    word = "fa2:bfloat16:192x128"
    packed_, paged = (fi.library_of(command.module(word), pages) for pages in (False, True))
    assert len(packed_.names) == 1 and len(paged.names) == 2
    packed_.load()
    assert libraries.unbuilt((packed_, paged)) == (paged,)
    paged.load()
    assert libraries.unbuilt((packed_, paged)) == ()


def test_every_kernel_of_flashinfer_says_what_it_builds(tmp_path):
    names = set()
    for op in OPS:
        for kernel in kernels_of(op).values():
            if any(p.module == "flashinfer" for p in kernel.packages):
                assert kernel.built is not None, f"{op}.{kernel.name}"
                names.add(kernel.name)
    assert names == {
        "flashinfer",
        "flashinfer_mla_fa2",
        "flashinfer_mla_fa3",
        "flashinfer_rope",
        "trtllm",
        "trtllm_mla",
        "xqa",
    }


PROBLEMS = {
    "xqa": ("paged_attention", {"page_size": 64, "head_dim": 128, "q_heads": 8, "kv_heads": 2}),
    "trtllm": ("paged_attention", {"page_size": 64, "head_dim": 128, "q_heads": 8, "kv_heads": 2}),
    "flashinfer_mla_fa3": ("mla_attention", {"head_dim": 576, "v_head_dim": 512, "q_heads": 16}),
    "flashinfer_rope": ("rope_quantize_latent", {"head_dim": 576, "v_head_dim": 512}),
}
WORDS = {
    "xqa": "xqa:bfloat16:bfloat16:64:128:4",
    "trtllm": "trtllm",
    "flashinfer_mla_fa3": "mla_fa3:bfloat16",
    "flashinfer_rope": "rope",
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_other_kernels_of_flashinfer_wait_for_their_modules(bare, name):
    op, given = PROBLEMS[name]
    problem = Problem.of(op, SM90, dtype=BF16, kv_dtype=BF16, **given)
    kernel = kernels_of(op)[name]
    [reason] = kernel.unbuilt(problem)
    assert reason.modules == (WORDS[name],)
    for library in command.parse(WORDS[name]).names:
        keep(library)
    assert kernel.unbuilt(problem) == ()


def test_a_folder_of_other_gpus_or_of_another_version_does_not_count(bare, monkeypatch):
    library = command.parse(FA3)
    build(FA3)
    assert not libraries.unbuilt((library,))
    for listed, there in (("10.0a", False), ("9.0a 10.0a", False), ("9.0", True), ("9.0a", True)):
        monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", listed)
        assert (not libraries.unbuilt((library,))) is there, listed
    folder().parent.rename(folder().parent.parent / "90a_100a")
    assert libraries.unbuilt((library,))
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "10.0a 9.0a")
    assert not libraries.unbuilt((library,))


def test_modules_that_came_built_count(bare, monkeypatch, tmp_path):
    library = command.parse(FA3)
    [name] = library.names
    aot = tmp_path / "package" / "data" / "aot" / name
    aot.mkdir(parents=True)
    places = {"flashinfer": [tmp_path / "package"]}
    monkeypatch.setattr(libraries, "_folders", lambda package: places.get(package, []))
    libraries._prebuilt.cache_clear()
    kernel = kernels_of("varlen_attention")["flashinfer"]
    before = kernel.absences_key()
    assert libraries.unbuilt((library,))
    (aot / f"{name}.so").touch()
    assert not libraries.unbuilt((library,))
    assert kernel.absences_key() != before, "cache keys of compiled code"


@pytest.mark.parametrize(
    ("built_for", "arch", "want"),
    [
        (("sm90a",), 90, True),
        (("sm90a",), 100, False),
        (("sm100a",), 103, False),
        (("sm100f",), 103, True),
        (("sm80",), 89, True),
        (("sm89",), 80, False),
    ],
)
def test_code_for_an_architecture(built_for, arch, want):
    assert libraries._runs(built_for, arch) is want


# The command --------------------------------------------------------------------------------------


def attnops_build(*arguments):
    return CliRunner().invoke(app, ["build", *arguments])


def test_words_are_read_as_they_are_written():
    for word in (
        "decode:bfloat16:128",
        "fa2:float16:64:window:sinks",
        "fa3:bfloat16:192x128:softcap",
        "mla_fa2:float16",
        "mla_fa3:bfloat16:float8_e4m3fn",
        "xqa:bfloat16:float8_e4m3fn:64:128:4:window",
        "rope",
        "trtllm",
    ):
        assert command.is_word(word) and command.parse(word).word == word
    for wrong in (
        "fa4:bfloat16:64",
        "fa2:float32:64",
        "fa2:bfloat16:x",
        "fa2:bfloat16:64:sink",
        "fa2",
        "",
        "fa2:bfloat16:+64",
        "mla_decode:bfloat16",
        "mla_fa3",
        "mla_fa3:bfloat16:float32",
        "xqa",
        "xqa:bfloat16:bfloat16:64:128:4:windows",
        "rope:x",
        "fa2:bfloat16:1x2x3",
    ):
        with pytest.raises(InvalidInput, match=r"^module: got"):
            command.parse(wrong)


def test_modules_are_built_with_progress(bare):
    done = attnops_build(FA3, "fa2:bfloat16:64", FA3)
    assert done.exit_code == 0, done.output
    first, *lines = done.stdout.splitlines()
    assert first == f"building {FA3} fa2:bfloat16:64, 3 at once, which may take minutes"
    assert [line.split()[:3] for line in lines] == [["1", "of", "2"], ["2", "of", "2"]]
    assert all(line.endswith(": built") for line in lines)
    assert len(flashinfer_modules.BUILT) == 2
    again = attnops_build(FA3)
    assert again.exit_code == 0 and again.stdout == f"{FA3}: built already\n"
    assert len(flashinfer_modules.BUILT) == 2


def test_json(bare):
    done = attnops_build(FA3, "--json")
    report = json.loads(done.stdout)
    assert report["there"] == [] and report["error"] == ""
    assert [(m["module"], m["error"]) for m in report["modules"]] == [(FA3, "")]


def test_a_build_that_fails_is_named_and_the_others_go_on(bare):
    """The stand-in has no source of `trtllm`."""
    done = attnops_build("trtllm", FA3)
    assert done.exit_code == 1
    assert "trtllm: failed: " in done.stdout and f"{FA3}: built" in done.stdout


def test_without_a_compiler_nothing_is_built_and_the_reason_is_given(bare, monkeypatch):
    monkeypatch.setattr(fi.shutil, "which", lambda name: None)
    monkeypatch.setattr(fi, "CUDA", "/nowhere")
    monkeypatch.setattr(fi, "absent_compiler", ABSENT_COMPILER)
    done = attnops_build(FA3)
    assert done.exit_code == 1 and not flashinfer_modules.BUILT
    why = "cannot build with flashinfer without nvcc and ninja: wants nvcc and ninja on PATH"
    assert why in done.stdout
    for name in command.parse(FA3).names:
        keep(name)
    assert attnops_build(FA3).exit_code == 0, "what is there needs no compiler"


def test_an_interrupt_begins_no_further_build(bare, monkeypatch):
    begun = []

    def stopped(library):
        begun.append(library.word)
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_built", stopped)
    words = ("fa2:bfloat16:64", "fa2:bfloat16:128", "fa2:bfloat16:256", FA3)
    with pytest.raises(KeyboardInterrupt):
        list(command.build(map(command.parse, words), at_once=1))
    assert len(begun) <= 2, "the one that is stopped, and one that its thread had begun"


def test_without_flashinfer_it_says_what_to_install():
    done = attnops_build(FA3, "--json")
    assert done.exit_code == 1
    report = json.loads(done.stdout)
    assert "pip install flashinfer-python" in report["error"] and not report["there"]


def test_a_module_under_another_name_is_an_error(bare, monkeypatch):
    monkeypatch.setattr(flashinfer_modules, "keep", lambda name: keep(name + "_new"))
    done = attnops_build(FA3)
    assert done.exit_code == 1
    assert "FlashInfer 0.7.2.post1 built it under another name than batch_prefill" in done.stdout


@pytest.mark.parametrize(
    "what",
    [
        (),
        ("fa2:bfloat16:x",),
        ("fa2:bfloat16:100",),
        ("decode:bfloat16:192x128",),
        ("decode:bfloat16:64:sinks",),
        ("fa2:bfloat16:64:window:window",),
        ("mla_fa2:float16:bfloat16",),
        ("llama-3-8b-shape",),
    ],
)
def test_bad_arguments_end_with_2(bare, what):
    done = attnops_build(*what)
    assert done.exit_code == 2
    if what:
        assert "fa3" in done.stderr and "trtllm" in done.stderr


def test_a_models_calls_name_their_modules(bare):
    problem = altered(packed().problem, target=SM90)
    decision = select(problem, "prefer=flashinfer")
    assert _lacking(decision, "") == (FA3,)
    assert _lacking(decision, "flashinfer") == (FA3,)
    assert _lacking(decision, "xqa") == () and _lacking(select(problem), "fa4") == ()


# What the reports say -----------------------------------------------------------------------------


def test_reports_name_the_command(bare):
    assert builds.notes() == ()
    select(altered(packed().problem, target=SM90), "prefer=flashinfer")
    note = f"varlen_attention.flashinfer: faster for some calls, and not built: {COMMAND}"
    assert builds.notes() == (note,)
    layer = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    with attnops.patch(torch.nn.Sequential(layer)) as handle:
        assert note in str(handle.report())
    build(FA3)
    builds.look()
    assert builds.notes() == ()


def test_doctor_names_the_command(bare):
    short = CliRunner().invoke(app, ["doctor"])
    assert short.exit_code == 0
    [line] = [line for line in short.stdout.splitlines() if line.startswith("build ")]
    assert "attnops build fa3:bfloat16:128" in line and "paged_attention.flashinfer" in line
    report = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    assert report["build"]["command"].startswith("attnops build ")
    found = {(k["op"], k["kernel"]): k["unbuilt"] for k in report["kernels"]}
    assert found["varlen_attention", "flashinfer"] == ["fa3:bfloat16:128"]
    assert found["paged_attention", "reference"] == []
    full = CliRunner().invoke(app, ["doctor", "--all"]).stdout
    assert "not chosen for all calls until built: attnops build" in " ".join(full.split())
    for words in found.values():
        for word in words:
            for name in command.parse(word).names:
                keep(name)
    builds.look()
    report = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    assert not any(k["unbuilt"] for k in report["kernels"]) and report["build"] is None


def test_doctor_names_what_measured_times_choose(bare, monkeypatch):
    kind = Problem.kind("varlen_attention", dtype=BF16, q_heads=8, kv_heads=8, head_dim=64)
    us = {"flashinfer": (1.0, 9.0), "aten_flash": (2.0, 3.0), "fa3": (0.5, 0.5)}
    table = Table("a GPU", "sm90", {}, (Grid(kind, (1.0,), (64.0, 256.0), (1.0,), us),))
    monkeypatch.setattr(doctor, "in_force", lambda target: SimpleNamespace(table=table))
    [(kernel, problem)] = doctor._fastest_measured(SM90)
    assert kernel.name == "flashinfer" and problem.sizes.queries.hi == 64


def test_explain_names_the_command(bare):
    decision = select(altered(packed().problem, target=SM90), "prefer=flashinfer")
    explanation = Explanation("this machine", None, (Site("attention", 1, decision),))
    assert f"flashinfer once it is built: {COMMAND}" in str(explanation)
    console = Console(width=400)
    with console.capture() as shown:
        tables.show_explanation(explanation, console)
    assert shown.get().count(COMMAND) == 2
    [call] = json.loads(json.dumps(explanation.as_dict()))["calls"]
    assert call["refused"]["flashinfer"][0]["want"] == COMMAND
    assert call["awaited"] == "flashinfer"


def test_what_the_shipped_table_gives_to_flashinfer_waits_for_its_module(bare):
    h200 = replace(SM90, gpu="NVIDIA H200")
    best = [p for kernel, p in doctor._fastest_measured(h200) if kernel.name == "flashinfer"]
    wide = next(p for p in best if p.head_dim == 256 and p.op == "paged_attention")
    before = select(altered(wide, plan="host"))
    assert before.kernel.name != "flashinfer" and before.awaited == "flashinfer"
    build(*before.refused["flashinfer"][0].modules)
    builds.look()
    assert select(altered(wide, plan="host")).kernel.name == "flashinfer"
