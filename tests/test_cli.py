"""The command: every subcommand, its JSON, good and bad arguments, and what it says where packages are missing."""

import json
import re
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("typer", reason="the extra `cli` brings typer and rich")
pytest.importorskip("transformers", reason="explain and demo build transformers models")

from rich.console import Console
from typer.testing import CliRunner

from attnops import attention, configs as models, explain
from attnops.cli import doctor, features
from attnops.cli.app import app
from attnops.cli.explain import linear_sites, tokens_of
from attnops.configs import SHAPES
from attnops.core import problem
from attnops.core.kernel import all_kernels, kernels_of
from attnops.core.problem import LEAVES, Target
from attnops.hf import tiny
from attnops.lowering.explain import packages_of_kernels
from attnops.measured import MEASURED
from attnops.version import VERSION
from tests.helpers import ready_process, torch_process


def attnops(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def explained(*arguments):
    result = attnops("explain", *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["phases"]


@pytest.mark.parametrize(
    ("model", "batch", "kernel", "counts"),
    [
        ("llama-3-8b-shape", 8, "triton", [32, 32, 32, 32, 1]),
        ("llama-3-8b-shape", 256, "aten", [32, 32, 32, 32, 1]),
        ("gpt-oss-20b-shape", 8, "triton", [24, 24, 1]),
        ("deepseek-v3-shape", 8, "", []),
    ],
)
def test_linears_of_a_decode_step_are_explained(model, batch, kernel, counts):
    """By measured times and the sizes of the config, without experts and latents."""
    config = models.config_of(model).get_text_config(decoder=True)
    sites = list(linear_sites(config, torch.bfloat16, batch, Target.parse("h200", ("triton",))))
    assert [site.count for site in sites] == counts
    for site in sites:
        assert (site.decision.kernel.name, site.decision.costs["aten"].how) == (kernel, MEASURED)


def test_one_op_is_explained():
    arguments = ("llama", "--target", "h200", "--cache", "paged", "--phase", "decode", "--tokens", 8)
    ops = Counter(call["op"] for call in explained(*arguments)["decode"]["calls"])
    assert ops["linear"] == 5 and len(ops) > 2
    assert {call["op"] for call in explained(*arguments, "--op", "linear")["decode"]["calls"]} == {"linear"}


def test_no_command_names_three_to_begin_with():
    result = attnops()
    assert result.exit_code == 0
    found = re.findall(r"^  attnops (\w+)", result.stdout, re.M)
    assert found == ["doctor", "explain", "demo"] and "attnops --help" in result.stdout
    assert len(result.stdout.splitlines()) < 10
    assert all(name in attnops("--help").output for name in ("tune", "bench", *found))


def test_the_version_is_printed():
    result = attnops("--version")
    assert result.exit_code == 0 and result.stdout == f"attnops {VERSION}\n"


@pytest.mark.full
@pytest.mark.parametrize("module", ["attnops", "attnops.cli"])
def test_the_module_is_the_command(module):
    done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == f"attnops {VERSION}\n", done.stderr


# doctor ---------------------------------------------------------------------------------------------------------------


def test_doctor_lists_every_kernel():
    report = json.loads(attnops("doctor", "--json").stdout)
    assert {(k["op"], k["kernel"]) for k in report["kernels"]} == {(k.op, k.name) for k in all_kernels()}
    assert {"python", "torch", "triton", "transformers", "devices"} <= set(report["machine"])
    assert all(k["usable"] != bool(k["reasons"]) for k in report["kernels"])
    assert all(k["usable"] for k in report["kernels"] if k["kernel"] == "reference")


def test_doctor_lists_all_if_asked():
    result = attnops("doctor", "--all")
    assert result.exit_code == 0
    assert all(k.name in result.stdout for k in all_kernels())


def test_doctor_says_five_lines():
    kernels = json.loads(attnops("doctor", "--json").stdout)["kernels"]
    result = attnops("doctor")
    lines = result.stdout.splitlines()
    assert result.exit_code == 0 and [line.split()[0] for line in lines] == ["attnops", "torch", "device", "kernels", "install"]
    assert VERSION in lines[0] and torch.__version__ in lines[1]
    counted = re.search(r"(\d+) of (\d+) run here \((.*)\)", lines[3])
    assert [int(counted[1]), int(counted[2])] == [sum(k["usable"] for k in kernels), len(kernels)]
    assert sum(int(n) for n in re.findall(r"\d+", counted[3])) == int(counted[1])
    if not torch.cuda.is_available():
        assert lines[2:3] + lines[4:] == ["device   no CUDA device", "install  no package: the other kernels need a GPU"]


def test_doctor_names_the_package_that_adds_the_most():
    """Each kernel that the installation adds is refused without it for its packages alone."""
    packages = packages_of_kernels()
    nowhere, everywhere = Target.parse("sm90", ("triton",)), Target.parse("sm90", packages)
    absent = [k.absences(nowhere) for k in all_kernels() if not doctor.why_not(k, everywhere)]
    # Either of two packages may serve a kernel. No command brings the one that has no wheel for this torch.
    wants = [want for refusals in absent if refusals for want in str(refusals[0].want).split(", or ")]
    refused = Counter(want for want in wants if want.startswith("pip install "))
    found = doctor.best_install(nowhere)
    assert found is not None and (found["command"], len(found["kernels"])) == refused.most_common(1)[0]
    assert len(refused) >= 3 and found["command"].startswith("pip install")
    assert doctor.best_install(Target.parse("cpu", ())) is None and doctor.best_install(everywhere) is None


@pytest.mark.parametrize("name, backend", {"fa3": "sgl", "sdpa": "torch", "scatter": "torch", "reference": "reference"}.items())
def test_backends(name, backend):
    assert {doctor.backend_of(k) for k in all_kernels() if k.name == name} == {backend}


def test_doctor_on_a_gpu(monkeypatch):
    """As on a machine with one SM90 device; only torch's answers are made up."""
    device = SimpleNamespace(name="Some GPU", major=9, minor=0, total_memory=80 * 2**30)
    for name, answer in {"is_available": True, "device_count": 1, "get_device_properties": device, "get_device_capability": (9, 0)}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    problem._target_of.cache_clear()
    try:
        report = json.loads(attnops("doctor", "--json").stdout)
        text = attnops("doctor").stdout
        whole = attnops("doctor", "--all").stdout
    finally:
        problem._target_of.cache_clear()
    assert report["target"] == "sm90"
    assert report["machine"]["devices"] == [{"name": "Some GPU", "arch": "sm90", "memory_bytes": 80 * 2**30}]
    assert "Some GPU (sm90, 80 GiB)" in text and "Some GPU (sm90, 80 GiB)" in whole


def test_doctor_without_optional_packages():
    code = "from attnops.cli import main; import sys; sys.argv = ['attnops', 'doctor', '--json']; main()"
    report = json.loads(torch_process(code, block=["transformers", "triton"]))
    assert report["machine"]["triton"] is None and report["machine"]["transformers"] is None
    assert any(k["usable"] for k in report["kernels"])


@pytest.mark.sweep(2)
@pytest.mark.parametrize("absent", ["typer", "rich"])
def test_without_the_extra(absent):
    code = """
import sys
from attnops.cli import main
sys.stderr = sys.stdout
try:
    main()
except SystemExit as end:
    print("exit", end.code)
"""
    printed = torch_process(code, block=[absent])
    assert re.search(rf"got no [\w, ]*{absent}.*pip install 'attnops\[cli\]'", printed) and "exit 2" in printed


@pytest.mark.sweep(2)
@pytest.mark.parametrize("absent", [["transformers"], ["transformers", "typer"]], ids="-".join)
def test_bench_says_in_one_line_what_to_install(absent):
    code = """
import sys
from attnops.cli import main
sys.stderr, sys.argv = sys.stdout, ["attnops", "bench"]
try:
    main()
except SystemExit as end:
    print("exit", end.code)
"""
    line, end = torch_process(code, block=absent).splitlines()
    extras = "hf,cli" if "typer" in absent else "hf"
    assert line.startswith("attnops: packages: got no ") and line.endswith(f"pip install 'attnops[{extras}]'") and end == "exit 2"


def test_explain_without_transformers():
    code = """
from typer.testing import CliRunner
from attnops.cli.app import app
result = CliRunner().invoke(app, ["explain", "llama", "--target", "sm90"])
print(result.exit_code, result.stderr)
"""
    printed = torch_process(code, block=["transformers"])
    assert printed.startswith("2 attnops: ") and "attnops[hf]" in printed


# A kernel of a package that is nowhere, and a third party's module that cannot be loaded.
STRANGERS = """
import json, sys, torch
from typer.testing import CliRunner
from attnops.cli.app import app
from attnops.core.kernel import Kernel, Package, arch, register, report_broken
package = Package("far_away", ("far-away",))
takes, dtypes = frozenset({"causal"}), (torch.bfloat16,)
register(Kernel("far", "attention", lambda call: None, takes, dtypes, needs=(arch(90),), packages=(package,), cost_us=lambda p: 0))
report_broken("theirs (their.module)", "ImportError: no such thing")
def run(*arguments):
    return json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
report = run("doctor")
[far] = [k for k in report["kernels"] if k["kernel"] == "far"]
explain = ("explain", "llama", "--phase", "prefill", "--target")
chosen = [run(*explain, *more)["phases"]["prefill"]["calls"][0] for more in (["sm90"], ["sm90", "--assume", ""], ["sm100"])]
print(json.dumps({"far": far, "broken": report["broken"], "chosen": chosen}))
print(CliRunner().invoke(app, ["doctor", "--all"]).stdout)
"""


@pytest.mark.full
def test_a_new_kernel_and_a_broken_one_are_shown():
    first, _, text = ready_process(STRANGERS).partition("\n")
    found = json.loads(first)
    assert not found["far"]["usable"]
    assert found["far"]["reasons"] == [{"field": "package", "got": "far_away missing", "want": "pip install far-away"}]
    assert list(found["broken"]) == ["theirs (their.module)"]
    assert "no such thing" in text and "pip install far-away" in text
    there, nowhere, wrong_machine = found["chosen"]
    assert there["kernel"] == "far"
    assert [r["field"] for r in nowhere["refused"]["far"]] == ["package"]
    assert [r["field"] for r in wrong_machine["refused"]["far"]] == ["target"]


# explain --------------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(2)
@pytest.mark.parametrize("target", ["sm90", "sm100"])
def test_llama_shape_names_every_kernel(target):
    text = attnops("explain", "llama-3-8b-shape", "--target", target).stdout
    tables = text.split("model.layers.*.self_attn  x32  attention")[1:]
    assert len(tables) == 2
    verdict = r"(chosen|estimated slower|measured slower|not measured|on a GPU only where nothing else can|refuses +\S+ +\S+ +\S+)"
    for table in tables:
        for name in kernels_of("attention"):
            assert re.search(rf"^{name} +{verdict}", table, re.M), (name, table)


TARGETS = {
    "h100": "NVIDIA H100 80GB HBM3 (sm90)",
    "h200": "NVIDIA H200 (sm90)",
    "b200": "NVIDIA B200 (sm100)",
    "rtx4090": "NVIDIA GeForce RTX 4090 (sm89)",
    "gfx942": "gfx942",
}


@pytest.mark.parametrize("target", TARGETS)
def test_gpus_are_targets(tmp_path, target):
    """Of each GPU a decode step over pages: one launch where our own kernel runs."""
    (tmp_path / "config.json").write_text(json.dumps({**SHAPES["llama-3-8b-shape"], "num_hidden_layers": 1}))
    found = explained(tmp_path, "--target", target, "--cache", "paged", "--phase", "decode")["decode"]
    calls = {call["op"]: call for call in found["calls"]}
    assert found["target"] == TARGETS[target]
    step = calls["paged_attention" if target == "gfx942" else "decode_attention"]
    assert set(calls) == {"slot_mapping", "linear", step["op"]} | ({"write_kv"} if target == "gfx942" else set())
    assert calls["linear"]["kernel"] == ("aten" if target == "gfx942" else "triton")
    assert "page_size=64" in step["problem"] and not step["by_judge"]
    if target == "gfx942":
        assert step["kernel"] == "sdpa" and step["kernel"] in step["never_run"]
        assert all("target" in [r["field"] for r in step["refused"][name]] for name in ("fa3", "fa4", "flashinfer", "triton"))
    else:
        assert step["kernel"] not in ("sdpa", "reference")


def test_names_of_gpus_are_targets_in_python():
    where = [Target.parse(name) for name in ("h100", "h200", "sm90")]
    assert len({t.arch for t in where}) == 1 and [t.gpu for t in where] == ["NVIDIA H100 80GB HBM3", "NVIDIA H200", ""]
    q = torch.empty(1, 128, 8, 128, dtype=torch.bfloat16)
    h100, h200 = (explain(attention, q, q, q, target=name, quiet=True).sites[0].decision for name in ("h100", "h200"))
    assert h100.kernel == h200.kernel and h100.measured != h200.measured


def test_an_amd_gpu_is_no_cuda_device(monkeypatch):
    """As on a machine with ROCm, whose torch calls its devices "cuda"; only torch's answers are made up."""
    device = SimpleNamespace(name="AMD Instinct MI300X", gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: device)
    problem._target_of.cache_clear()
    try:
        found = Target.of(torch.device("cuda"))
    finally:
        problem._target_of.cache_clear()
    assert (found.device, str(found), found.title) == ("hip", "gfx942", "AMD Instinct MI300X (gfx942)")


@pytest.mark.sweep(9)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_is_answered(shape):
    for phase, found in explained(shape, "--target", "sm100", "--tokens", 300).items():
        for call in found["calls"]:
            told = {call["kernel"], *call["can_run"], *call["refused"]}
            assert told == set(kernels_of(call["op"])), phase
            assert all(r["field"] and r["want"] for reasons in call["refused"].values() for r in reasons)
            float32 = shape == "deepseek-v3-shape" and call["op"] == "route"  # whose logits are a product in float32
            assert ("dtype=bfloat16" in call["problem"]) != float32


@pytest.mark.parametrize("dtype", models.DTYPES)
def test_the_problem_has_the_dtype(dtype):
    [call] = explained("llama", "--target", "sm90", "--dtype", dtype, "--phase", "prefill")["prefill"]["calls"]
    assert (f"dtype={dtype}" in call["problem"]) == (dtype != "float32")


def test_sizes_and_phase_reach_the_problem():
    found = explained("llama", "--target", "sm90", "--batch", 2, "--tokens", 100, "--phase", "decode")
    assert list(found) == ["decode"]
    [call] = found["decode"]["calls"]
    assert "batch=2" in call["problem"] and "queries=1" in call["problem"] and "context=65..128" in call["problem"]


def test_gpt_oss_has_sinks_and_a_window():
    [windowed, full] = explained("gpt-oss-20b-shape", "--target", "sm90", "--phase", "prefill", "--op", "attention")["prefill"]["calls"]
    assert "window=(127, -1)" in windowed["problem"] and windowed["count"] == full["count"] == 12
    assert "sinks=True" in windowed["problem"] and "sinks=True" in full["problem"]


def test_this_machine_is_the_default():
    found = explained("llama", "--phase", "prefill")["prefill"]
    assert found["target"].endswith("(this machine)") and found["assumed"] is None


@pytest.mark.parametrize("folder", [True, False], ids=["folder", "file"])
def test_a_config_file(tmp_path, folder):
    config = {**SHAPES["llama-3-8b-shape"], "num_hidden_layers": 3, "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = explained(tmp_path if folder else tmp_path / "config.json", "--target", "cpu", "--phase", "prefill")
    [call] = found["prefill"]["calls"]
    assert call["count"] == 3


@pytest.mark.parametrize(("positions", "tokens"), [(512, 256), (514, 256), (1024, 512), (4096, 512), (3, 1), (None, 512)])
def test_the_default_prompt_fits_the_model(positions, tokens):
    config = SimpleNamespace(get_text_config=lambda decoder: SimpleNamespace(max_position_embeddings=positions))
    assert tokens_of(config) == tokens


def test_a_model_of_few_positions(tmp_path):
    """BERT's table of positions has 512 rows, and a step follows the prompt."""
    shape = {"model_type": "bert", "num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    assert {phase: len(found["calls"]) for phase, found in explained(tmp_path, "--target", "h100").items()} == {"prefill": 1, "decode": 1}
    result = attnops("explain", tmp_path, "--target", "h100", "--tokens", 512)
    assert result.exit_code == 2 and "want at most 511: the model has 512 positions" in " ".join(result.stderr.split())


def test_a_vision_model_gives_its_text_model():
    assert explained("llava", "--target", "sm90", "--phase", "prefill")["prefill"]["calls"]


BAD = {
    "unknown model": (["nope"], "model: got 'nope'"),
    "a model on the Hub": (["meta-llama/Llama-3.1-8B"], "hf download meta-llama/Llama-3.1-8B config.json"),
    "unknown cache": (["qwen2", "--cache", "blocks"], "cache"),
    "pages cannot hold it": (["doge", "--cache", "paged", "--target", "h200"], 'cache="paged"'),
    "unknown target": (["llama", "--target", "gpu"], "target: got 'gpu'"),
    "no sm": (["llama", "--target", "sm"], "target: got 'sm'"),
    "unknown dtype": (["llama", "--dtype", "int8"], "dtype: got 'int8'"),
    "no tokens": (["llama", "--tokens", 0], "tokens: got 0"),
    "no batch": (["llama", "--batch", -1], "batch: got -1"),
    "assume without a target": (["llama", "--assume", "flashinfer"], "assume: got flashinfer"),
    "unknown phase": (["llama", "--phase", "all"], "phase"),
    "unknown op": (["llama", "--op", "lineal"], "op: got 'lineal', want attention |"),
    "no model": ([], "MODEL"),
    "no number": (["llama", "--tokens", "many"], "tokens"),
    "no decoder": (["t5"], "model_type: got 't5'"),
    "nothing to patch": (["falcon"], "computes attention by itself"),
}


@pytest.mark.parametrize("arguments, says", BAD.values(), ids=BAD)
def test_bad_arguments(arguments, says):
    result = attnops("explain", *arguments)
    assert result.exit_code == 2, result.output
    assert says.lower() in result.stderr.lower()
    assert "Traceback" not in result.output and result.stdout == ""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "want a JSON file"),
        ("[1]", "model_type: got"),
        ("{}", "model_type: got"),
        ('{"model_type": "no-such-thing"}', "'no-such-thing'"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "a valid config of llama"),
        ('{"model_type": "llama", "num_attention_heads": 3, "hidden_size": 64}', "a valid config of llama"),
    ],
)
def test_bad_config_files(tmp_path, text, says):
    path = tmp_path / "config.json"
    path.write_text(text)
    result = attnops("explain", path, "--target", "sm90")
    assert result.exit_code == 2, result.output
    assert says in result.stderr and "Traceback" not in result.output


def test_a_folder_without_a_config(tmp_path):
    result = attnops("explain", tmp_path, "--target", "sm90")
    assert result.exit_code == 2 and "a config.json" in result.stderr


def test_an_idle_package_is_noted():
    result = attnops("explain", "llama", "--target", "sm90", "--assume", "no_such_package", "--phase", "prefill")
    assert result.exit_code == 0 and "no kernel needs no_such_package" in result.stderr


def test_names_are_bundled():
    assert set(models.names()) == {*SHAPES, *tiny.NAMES}


# demo -----------------------------------------------------------------------------------------------------------------


def test_demo_without_compiling():
    result = attnops("demo", "--no-compile", "--tokens", 3, "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 0 and report["equal"]
    for model in report["models"]:
        assert set(model["kernels"]) == {"here", "h200", "b200"} and all(model["kernels"].values())
        assert [len(row) for row in model["tokens"]] == [3, 3] and model["equal_tokens"] == [6, 6]
        assert all(ms > 0 for ms in model["ms_a_token"].values())
        row = rf"{model['name']} +6 of 6 +[\d.]+ +[\d.]+ +{model['kernels']['here'][0]} +{model['kernels']['h200'][0]} "
        assert re.search(row, result.stderr)
    # It says first what it does, then each step with its seconds, and at the end where the gain is.
    lines = result.stderr.splitlines()
    assert lines[0].startswith("attnops demo: two small models") and re.search(r"^  import .* \.\.\. \d+\.\d s$", result.stderr, re.M)
    assert "The gain is on a GPU: " in result.stderr and re.search(r"^https://\S+/docs/performance.md ", result.stderr, re.M)


@pytest.mark.full
@pytest.mark.slow
def test_demo_compiles():
    from attnops.cli.demo import Clock, _one

    # Again in the same process: the code is loaded already.
    for _ in range(2):
        torch._dynamo.reset()
        report = _one("llama-small", Console(quiet=True), Clock(Console(quiet=True)), 3, True)
        assert report["equal"] and report["graph"]
    chosen = report["kernels"]["here"]
    assert chosen and all(any(re.search(rf"attnops\.\w*attention\.{name}(\(|: )", line) for line in report["graph"]) for name in chosen)


def test_demo_ends_with_1_when_a_token_differs(monkeypatch):
    from attnops.cli import demo

    honest = demo._generate
    monkeypatch.setattr(demo, "_generate", lambda *a, **k: honest(*a, **k) + hasattr(a[0], "_attnops"))
    result = attnops("demo", "--no-compile", "--tokens", 2)
    assert result.exit_code == 1 and "DIFFER" in result.stdout


def test_demo_wants_two_tokens():
    assert attnops("demo", "--no-compile", "--tokens", 1).exit_code == 2


# features -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", features.ops_of_kernels())
def test_reference_takes_everything(op):
    found = features.support(kernels_of(op)["reference"])
    assert found.runs == features.TARGETS
    assert all(at == features.TARGETS for at in found.takes.values())


def test_every_kernel_takes_some_typical_problem():
    # A kernel that took none would stand in the tables as one that runs nowhere.
    assert not [(k.op, k.name) for k in all_kernels() if not features.support(k).runs]


def test_features_change_the_problem():
    for op in features.ops_of_kernels():
        assert features.problems(op, Target.parse("sm90"))
        assert {name for feature in features.columns(op) for name in feature.change} <= set(LEAVES)
