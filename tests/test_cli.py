"""The command: every subcommand, its JSON, good and bad arguments, and what it says where packages
are missing."""

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

from attnops import configs as models
from attnops.cli import doctor, features
from attnops.cli.app import app
from attnops.cli.explain import explain_config, linear_sites
from attnops.configs import SHAPES
from attnops.core import problem
from attnops.core.errors import InvalidInput
from attnops.core.kernel import all_kernels, kernels_of
from attnops.core.problem import Target
from attnops.lowering.explain import packages_of_kernels
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
    h200 = Target.parse("h200", ("triton",))
    sites = list(linear_sites(config, torch.bfloat16, batch, h200))
    assert [site.count for site in sites] == counts
    assert {site.decision.kernel.name for site in sites} <= {kernel}


def test_no_command_names_three_to_begin_with():
    result = attnops()
    assert result.exit_code == 0 and len(result.stdout.splitlines()) < 10
    found = re.findall(r"^  attnops (\w+)", result.stdout, re.M)
    assert found == ["doctor", "explain", "demo"] and "attnops --help" in result.stdout
    assert all(name in attnops("--help").output for name in ("tune", "bench", *found))


def test_the_version_is_printed():
    result = attnops("--version")
    assert result.exit_code == 0 and result.stdout == f"attnops {VERSION}\n"


@pytest.mark.full
def test_the_module_is_the_command():
    assert (
        subprocess.check_output([sys.executable, "-m", "attnops", "--version"], text=True)
        == f"attnops {VERSION}\n"
    )


# doctor -------------------------------------------------------------------------------------------


def test_doctor_says_five_lines_and_lists_all_if_asked():
    report = json.loads(attnops("doctor", "--json").stdout)
    kernels = report["kernels"]
    assert {(k["op"], k["kernel"]) for k in kernels} == {(k.op, k.name) for k in all_kernels()}
    assert {"python", "torch", "triton", "transformers", "devices"} <= set(report["machine"])
    assert all(k["usable"] != bool(k["reasons"]) for k in kernels)
    assert all(k["usable"] for k in kernels if k["kernel"] == "reference")
    lines = attnops("doctor").stdout.splitlines()
    assert [line.split()[0] for line in lines] == [
        "attnops",
        "torch",
        "device",
        "kernels",
        "install",
    ]
    assert VERSION in lines[0] and torch.__version__ in lines[1]
    assert f"{sum(k['usable'] for k in kernels)} of {len(kernels)} run here (" in lines[3]
    if not torch.cuda.is_available():
        assert lines[2] == "device   no CUDA device"
        assert lines[4] == "install  no package: the other kernels need a GPU"
    result = attnops("doctor", "--all")
    assert result.exit_code == 0 and all(k.name in result.stdout for k in all_kernels())


def test_doctor_names_the_package_that_adds_the_most():
    """Each kernel that the installation adds is refused without it for its packages alone."""
    nowhere, everywhere = (
        Target.parse("sm90", packages) for packages in (("triton",), packages_of_kernels())
    )
    absent = [k.absences(nowhere) for k in all_kernels() if not doctor.why_not(k, everywhere)]
    # Either of two packages may serve a kernel. No command brings the one that has no wheel for
    # this torch.
    wants = [
        want for refusals in absent if refusals for want in str(refusals[0].want).split(", or ")
    ]
    refused = Counter(want for want in wants if want.startswith("pip install "))
    found = doctor.best_install(nowhere)
    assert (
        len(refused) >= 3 and (found["command"], len(found["kernels"])) == refused.most_common(1)[0]
    )
    assert (
        doctor.best_install(Target.parse("cpu", ())) is None
        and doctor.best_install(everywhere) is None
    )


@pytest.fixture
def gpu(monkeypatch):
    """A function that makes torch find one CUDA device of these properties."""

    def find(**properties):
        device = SimpleNamespace(**properties)
        answers = {"is_available": True, "device_count": 1, "get_device_properties": device}
        for name, answer in (answers | {"get_device_capability": (9, 0)}).items():
            monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
        problem._target_of.cache_clear()

    yield find
    monkeypatch.undo()
    problem._target_of.cache_clear()


def test_doctor_on_a_gpu(gpu):
    gpu(name="Some GPU", major=9, minor=0, total_memory=80 * 2**30)
    assert Target.of(torch.device("cuda", 0)) == Target("cuda", 90, gpu="Some GPU")
    report = json.loads(attnops("doctor", "--json").stdout)
    assert report["target"] == "sm90"
    assert report["machine"]["devices"] == [
        {"name": "Some GPU", "arch": "sm90", "memory_bytes": 80 * 2**30}
    ]
    for more in ((), ("--all",)):
        assert "Some GPU (sm90, 80 GiB)" in attnops("doctor", *more).stdout


def test_an_amd_gpu_is_no_cuda_device(gpu, monkeypatch):
    """ROCm's torch calls its devices "cuda"."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    gpu(name="AMD Instinct MI300X", gcnArchName="gfx942:sramecc+:xnack-")
    found = Target.of(torch.device("cuda"))
    assert (found.device, str(found), found.title) == (
        "hip",
        "gfx942",
        "AMD Instinct MI300X (gfx942)",
    )


def test_doctor_without_optional_packages():
    code = (
        "from attnops.cli import main; import sys; sys.argv = ['attnops', 'doctor', "
        "'--json']; main()"
    )
    report = json.loads(torch_process(code, block=["transformers", "triton"]))
    assert report["machine"]["triton"] is None and report["machine"]["transformers"] is None
    assert any(k["usable"] for k in report["kernels"])


def said(*command, absent):
    """The last two lines of a command without some packages: what it says, and its exit code."""
    code = f"""
import sys
from attnops.cli import main
sys.stderr, sys.argv = sys.stdout, {["attnops", *command]}
try:
    main()
except SystemExit as end:
    print("exit", end.code)
"""
    return torch_process(code, block=absent).splitlines()[-2:]


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("command", "absent", "extra"),
    [
        (["doctor"], ["typer"], "cli"),
        (["doctor"], ["rich"], "cli"),
        (["bench"], ["transformers"], "hf"),
        (["bench"], ["transformers", "typer"], "hf,cli"),
        (["explain", "llama", "--target", "sm90"], ["transformers"], "hf"),
    ],
)
def test_a_command_says_in_one_line_what_to_install(command, absent, extra):
    line, end = said(*command, absent=absent)
    assert (
        line.startswith("attnops: ")
        and f"pip install 'attnops[{extra}]'" in line
        and end == "exit 2"
    )


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
"""  # noqa: E501


@pytest.mark.full
def test_a_new_kernel_and_a_broken_one_are_shown():
    first, _, text = ready_process(STRANGERS).partition("\n")
    found = json.loads(first)
    far = found["far"]
    assert not far["usable"]
    assert far["reasons"] == [
        {"field": "package", "got": "far_away missing", "want": "pip install far-away"}
    ]
    assert list(found["broken"]) == ["theirs (their.module)"]
    assert "no such thing" in text and "pip install far-away" in text
    there, *elsewhere = found["chosen"]
    assert there["kernel"] == "far"
    assert [r["field"] for call in elsewhere for r in call["refused"]["far"]] == [
        "package",
        "target",
    ]


# explain ------------------------------------------------------------------------------------------


@pytest.mark.sweep(2)
@pytest.mark.parametrize("target", ["sm90", "sm100"])
def test_the_text_names_every_kernel(target):
    text = attnops("explain", "llama-3-8b-shape", "--target", target).stdout
    prefill, decode = text.split("model.layers.*.self_attn  x32  attention")[1:]
    reasons = "estimated slower|measured slower|not measured|on a GPU only where nothing else can"
    for name in kernels_of("attention"):
        line = re.compile(rf"^{name} +(chosen|{reasons}|refuses +\S+ +\S+ +\S+)", re.M)
        assert line.search(prefill) and line.search(decode), name


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
    (tmp_path / "config.json").write_text(
        json.dumps({**SHAPES["llama-3-8b-shape"], "num_hidden_layers": 1})
    )
    found = explained(tmp_path, "--target", target, "--cache", "paged", "--phase", "decode")[
        "decode"
    ]
    calls, amd = {call["op"]: call for call in found["calls"]}, target == "gfx942"
    assert found["target"] == TARGETS[target]
    attention = {"paged_attention", "write_kv"} if amd else {"decode_attention"}
    assert set(calls) == {"slot_mapping", "linear", *attention}
    assert calls["linear"]["kernel"] == ("aten" if amd else "triton")
    step = calls["paged_attention" if amd else "decode_attention"]
    assert "page_size=64" in step["problem"] and not step["by_judge"]
    if amd:
        assert step["kernel"] == "sdpa" and step["kernel"] in step["never_run"]
        for name in ("fa3", "fa4", "flashinfer", "triton"):
            assert "target" in [r["field"] for r in step["refused"][name]]
    else:
        assert step["kernel"] not in ("sdpa", "reference")


@pytest.mark.sweep(9)
@pytest.mark.parametrize("shape", [*SHAPES, "llava"])
def test_every_shape_is_answered(shape):
    for phase, found in explained(shape, "--target", "sm100", "--tokens", 300).items():
        for call in found["calls"]:
            assert {call["kernel"], *call["can_run"], *call["refused"]} == set(
                kernels_of(call["op"])
            ), phase
            assert all(
                r["field"] and r["want"] for reasons in call["refused"].values() for r in reasons
            )


def test_what_is_given_reaches_the_problem():
    def call(*arguments):
        found = explained("llama", "--phase", "decode", *arguments)
        assert list(found) == ["decode"]
        return found["decode"]["calls"][0]

    given = call("--target", "sm90", "--batch", 2, "--tokens", 100)["problem"]
    for text in ("batch=2", "queries=1", "context=65..128", "dtype=bfloat16"):
        assert text in given
    assert "dtype=float16" in call("--target", "sm90", "--dtype", "float16")["problem"]
    assert call("--target", "h200", "--cache", "paged", "--op", "linear")["op"] == "linear"
    here = explained("llama", "--phase", "prefill")["prefill"]
    assert here["target"].endswith("(this machine)") and here["assumed"] is None


@pytest.mark.parametrize("folder", [True, False], ids=["folder", "file"])
def test_a_config_file(tmp_path, folder):
    config = {
        **SHAPES["llama-3-8b-shape"],
        "num_hidden_layers": 3,
        "quantization_config": {"quant_method": "fp8"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = explained(
        tmp_path if folder else tmp_path / "config.json", "--target", "cpu", "--phase", "prefill"
    )
    [call] = found["prefill"]["calls"]
    assert call["count"] == 3


def test_a_model_of_few_positions(tmp_path):
    """BERT's table of positions has 512 rows, and a step follows the prompt."""
    shape = {
        "model_type": "bert",
        "num_hidden_layers": 1,
        "hidden_size": 64,
        "num_attention_heads": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    for found in explained(tmp_path, "--target", "h100").values():
        assert len(found["calls"]) == 1
    result = attnops("explain", tmp_path, "--target", "h100", "--tokens", 512)
    assert result.exit_code == 2 and "want at most 511: the model has 512 positions" in " ".join(
        result.stderr.split()
    )


BAD = {
    "unknown model": (["nope"], "model: got 'nope'"),
    "a model on the Hub": (
        ["meta-llama/Llama-3.1-8B"],
        "hf download meta-llama/Llama-3.1-8B config.json",
    ),
    "unknown cache": (["qwen2", "--cache", "blocks"], "cache"),
    "pages cannot hold it": (["doge", "--cache", "paged", "--target", "h200"], 'cache="paged"'),
    "unknown target": (["llama", "--target", "gpu"], "target: got 'gpu'"),
    "no sm": (["llama", "--target", "sm"], "target: got 'sm'"),
    "unknown dtype": (["llama", "--dtype", "int8"], "dtype: got 'int8'"),
    "no tokens": (["llama", "--tokens", 0], "tokens: got 0"),
    "no batch": (["llama", "--batch", -1], "batch: got -1"),
    "assume without a target": (["llama", "--assume", "flashinfer"], "assume: got flashinfer"),
    "unknown phase": (["llama", "--phase", "all"], "phase"),
    "unknown op": (["llama", "--op", "lineal"], "op: got 'lineal', want accept |"),
    "no decoder": (["t5"], "model_type: got 't5'"),
    "nothing to patch": (["falcon"], "computes attention by itself"),
}


@pytest.mark.parametrize("arguments, says", BAD.values(), ids=BAD)
def test_bad_arguments(arguments, says):
    result = attnops("explain", *arguments)
    assert result.exit_code == 2, result.output
    assert says.lower() in result.stderr.lower()
    assert "Traceback" not in result.output and result.stdout == ""


def test_an_idle_package_is_noted():
    result = attnops(
        "explain", "llama", "--target", "sm90", "--assume", "no_such_package", "--phase", "prefill"
    )
    assert result.exit_code == 0 and "no kernel needs no_such_package" in result.stderr


# demo ---------------------------------------------------------------------------------------------


def test_demo_without_compiling():
    result = attnops("demo", "--no-compile", "--tokens", 3, "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 0 and report["equal"]
    for model in report["models"]:
        kernels = model["kernels"]
        assert kernels.keys() == {"here", "h200", "b200"} and all(kernels.values())
        assert [len(row) for row in model["tokens"]] == [3, 3] and model["equal_tokens"] == [6, 6]
        assert min(model["ms_a_token"].values()) > 0
        row = (
            rf"{model['name']} +6 of 6 +[\d.]+ +[\d.]+ +{kernels['here'][0]} +{kernels['h200'][0]} "
        )
        assert re.search(row, result.stderr)
    assert attnops("demo", "--no-compile", "--tokens", 1).exit_code == 2


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
    assert chosen and all(
        any(re.search(rf"attnops\.\w*attention\.{name}(\(|: )", line) for line in report["graph"])
        for name in chosen
    )


def test_demo_ends_with_1_when_a_token_differs(monkeypatch):
    from attnops.cli import demo

    honest = demo._generate
    monkeypatch.setattr(
        demo, "_generate", lambda *a, **k: honest(*a, **k) + hasattr(a[0], "_attnops")
    )
    result = attnops("demo", "--no-compile", "--tokens", 2)
    assert result.exit_code == 1 and "DIFFER" in result.stdout


# features -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", features.ops_of_kernels())
def test_reference_takes_everything(op):
    found = features.support(kernels_of(op)["reference"])
    assert found.runs == features.TARGETS
    assert all(at == features.TARGETS for at in found.takes.values())


def test_every_kernel_takes_some_typical_problem():
    # A kernel that took none would stand in the tables as one that runs nowhere.
    assert not [(k.op, k.name) for k in all_kernels() if not features.support(k).runs]


def test_an_import_that_fails_is_told_from_a_model_that_cannot_be_built(monkeypatch):
    """A model's code may import what is not installed; so may attnops.hf under an old
    transformers."""

    def needs(*_):
        raise ImportError("the model needs a package")

    config = models.config_of("llama-3-8b-shape")
    monkeypatch.setattr(models, "build_fake", needs)
    with pytest.raises(
        InvalidInput, match=r"^model: got LlamaConfig \(ImportError: the model needs"
    ):
        explain_config(config, dtype=torch.bfloat16, tokens=8)
    monkeypatch.setitem(sys.modules, "attnops.hf", None)
    with pytest.raises(ImportError, match=r"attnops\.hf"):
        explain_config(config, dtype=torch.bfloat16, tokens=8)
