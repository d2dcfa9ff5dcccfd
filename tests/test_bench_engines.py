"""Other engines in the suite `generate`: scripts that stand for Pythons of other environments, and
modules that stand for engines."""

import os
import subprocess
import sys
import time
import types
from dataclasses import replace

import pytest

pytest.importorskip("transformers", reason="the suite measures transformers models")

import transformers
from typer.testing import CliRunner

from attnops.bench import Point, decode, engines, generate, models, peers, run as suites
from attnops.bench.files import bad
from attnops.cli.app import app
from attnops.core.errors import InvalidInput
from tests.test_bench import TOY

POINTS = (Point(1, 4), Point(2, 8))
ANSWER = """
import json, os, subprocess, sys, time
spec = json.loads(sys.argv[2])
def answer(batch, context):
    facts = {"version": "1.2", "how": "by heart", "path": os.environ.get("PYTHONPATH")}
    print("a log line")
    print(json.dumps({"batch": batch, "context": context, "seconds": [0.006, 0.012, 0.018], "first_s": 2.5, "facts": facts}), flush=True)
"""  # noqa: E501
ENGINES = {
    "torch": "import types\nstack = lambda rows, dim: types.SimpleNamespace(tolist=lambda: "
    "[list(row) for row in zip(*rows)])\n"
    "cuda = types.SimpleNamespace(synchronize=lambda: None)",
    "vllm/__init__": """
import json, os, sys, types
__version__, asked = "0.9", []
SamplingParams = types.SimpleNamespace
class LLM:
    def __init__(self, model, kv_cache_memory_bytes, max_model_len, max_num_seqs, **more):
        config = json.load(open(os.path.join(model, "config.json")))
        assert config["architectures"] == ["LlamaForCausalLM"] and config["dtype"] == more["dtype"] == "float32", config
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" and max_num_seqs == 2 and max_model_len >= 8 + 6
        assert not [p for p in sys.path if p.endswith("bench")] and "attnops" not in sys.modules, sys.path
        cc = types.SimpleNamespace(cudagraph_mode=types.SimpleNamespace(name="FULL"))
        self.llm_engine, self.vllm_config, self.left = self, types.SimpleNamespace(compilation_config=cc), []
        print("a log line")
    def add_request(self, name, prompt, params):
        assert name not in asked and all(3 <= token for token in prompt["prompt_token_ids"])
        asked.append(name), self.left.append((name, params))
    def has_unfinished_requests(self):
        return bool(self.left)
    def step(self):
        name, params = self.left.pop(0)
        assert (params.temperature, params.ignore_eos, params.output_kind) == (0.0, True, "at the end")
        made = types.SimpleNamespace(token_ids=[7] * (params.max_tokens - (os.environ.get("SHORT") == "1")))
        return [types.SimpleNamespace(request_id=name, outputs=[made])]
""",  # noqa: E501
    "vllm/sampling_params": "class RequestOutputKind:\n    FINAL_ONLY = 'at the end'",
    "sglang/__init__": "__version__ = '0.5'",
    "sglang/srt/__init__": "",
    "sglang/srt/server_args": """
import types
class ServerArgs(types.SimpleNamespace):
    disable_cuda_graph = False
class PortArgs:
    init_new = staticmethod(lambda server: None)
""",
    "sglang/bench_one_batch": """
import os, time
now = [0.0]
if "SECONDS" in os.environ:
    time.perf_counter = lambda: now[0]
_set_envs_and_config = initialize_moe_config = initialize_fp8_gemm_config = initialize_fp4_gemm_config = lambda server: None
def prepare_synthetic_inputs_for_latency_test(batch, context, prompts):
    assert len(prompts) == batch and all(len(prompt) == context for prompt in prompts)
    return prompts
class Runner:
    clear = lambda self: None
    def extend(self, requests):
        now[0] += 0.1 + now[0] / 10
        return [0] * len(requests), None, "state"
    def decode(self, token, state):
        now[0] += 0.001
        return [t + 1 for t in token], None
def load_model(server, ports, gpu, rank):
    assert get_tokenizer("somewhere") is None and server.cuda_graph_bs == [1, 2] and server.attention_backend == "fa3"
    return Runner(), None
""",  # noqa: E501
}


@pytest.fixture
def python(tmp_path):
    """A function that writes a program, which then acts as the Python of an engine."""

    def write(text, first="#!" + sys.executable):
        (tmp_path / "python").write_text(f"{first}\n{text}")
        (tmp_path / "python").chmod(0o755)
        return str(tmp_path / "python")

    return write


@pytest.fixture
def real(tmp_path, python):
    """A program that runs the script with the modules that stand for engines."""
    for name, text in ENGINES.items():
        (tmp_path / "modules" / f"{name}.py").parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "modules" / f"{name}.py").write_text(text)
    return python(f'PYTHONPATH={tmp_path}/modules exec {sys.executable} "$@"', "#!/bin/sh")


def outcome(python, engine="vllm", name="generate"):
    """Of the only case of an engine."""
    setup = replace(TOY, engines=((engine, python),), points=POINTS)
    suite = next(suite for suite in suites.SUITES if suite.name == name)
    case = next(iter(suite.cases(setup)))
    assert case == f"llama, {engine}", "engines go first, while the process holds no model"
    return suites.outcome_of(suite, case, setup)


def test_rows_are_of_what_the_process_printed(python, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/of/this/process")
    config = (
        'assert json.load(open("config.json"))["model_type"] == "llama" and spec["model"] == '
        "os.getcwd()\n"
    )
    steady, larger, first = outcome(
        python(ANSWER + config + "for point in spec['points']: answer(*point)")
    )["rows"]
    new = generate.NEW["toy"]
    assert (steady["case"], larger["case"], first["case"]) == (
        "llama 1x4",
        "llama 2x8",
        "llama 1x4, first call",
    )
    assert (steady["median_us"], steady["spread_us"]) == pytest.approx((12000 / new, 6000 / new))
    assert (
        larger["tokens_s"] == pytest.approx(2 * 1e6 / larger["median_us"], rel=1e-3)
        and larger["new_tokens"] == new
    )
    assert (steady["version"], steady["how"], steady["layers"], steady["path"]) == (
        "1.2",
        "by heart",
        1,
        None,
    )
    assert (first["way"], first["first_s"], first["median_us"]) == ("vllm", 2.5, 2.5e6)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("sys.exit('RuntimeError: no GPU here')", "RuntimeError: no GPU here"),
        ("os.kill(os.getpid(), 9)", "ended with exit code -9"),
        ("", "ended with exit code 0"),
    ],
)
def test_an_engine_that_fails_is_left_out_with_its_last_line(python, text, why):
    found = outcome(python(ANSWER + text))
    assert found["left_out"] == why and "rows" not in found
    assert not bad({"generate": suites.joined({"a case": found})})


def test_points_before_a_failure_count(python):
    steady, larger, first = outcome(python(ANSWER + "answer(1, 4)\nsys.exit('MemoryError')"))[
        "rows"
    ]
    assert (
        steady["median_us"] > 0
        and first["first_s"] == 2.5
        and larger == {"case": "llama 2x8", "way": "vllm", "wrong": "MemoryError"}
    )
    assert not bad({"generate": {"rows": [larger]}}), "a peer that cannot run is not wrong"


def test_a_program_that_is_none_is_left_out(python, tmp_path):
    assert "no executable file" in outcome(str(tmp_path / "absent"))["left_out"]
    assert "No such file" in outcome(python("", "#!/of/nowhere"))["left_out"]


def test_a_timeout_ends_all_processes(python, tmp_path, monkeypatch):
    child, wait, end = tmp_path / "child", subprocess.Popen.wait, time.monotonic() + 60

    def waited(process, *limit):
        while limit and not (child.exists() and child.read_text()) and time.monotonic() < end:
            time.sleep(0.01)
        return wait(process, *limit)

    monkeypatch.setattr(peers, "LIMIT_S", 0.1)
    monkeypatch.setattr(subprocess.Popen, "wait", waited)
    start = (
        f"child = subprocess.Popen(['sleep', '60'])\nopen({str(child)!r}, "
        "'w').write(str(child.pid))\n"
    )
    steady, larger, _ = outcome(python(ANSWER + "answer(1, 4)\n" + start + "time.sleep(60)"))[
        "rows"
    ]
    assert steady["median_us"] > 0 and larger["wrong"] == "not done after 0.1 s"
    pid = int(child.read_text())
    while running(pid) and time.monotonic() < end:
        time.sleep(0.01)
    assert not running(pid)


def running(pid):
    """Is it a process that has not ended? One that init has not collected yet has."""
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


@pytest.mark.parametrize(
    ("engine", "version", "graphs"), [("vllm", "0.9", "FULL"), ("sglang", "0.5", "decode steps")]
)
def test_the_script_times_whole_calls(real, engine, version, graphs):
    steady, larger, first = outcome(real, engine)["rows"]
    for row in (steady, larger):
        assert (row["way"], row["version"], row["graphs"]) == (
            engine,
            version,
            graphs,
        ) and "not judged" in row["how"], row
        assert (
            0 < row["median_us"] * row["new_tokens"] < 1e6 * first["first_s"]
            and row["spread_us"] >= 0
        )
    assert 0 < first["first_s"] < 60


def test_a_step_is_a_call_less_a_shorter_one(real, monkeypatch):
    """Of an engine whose prompts take longer each time, and a token a millisecond."""
    monkeypatch.setenv("SECONDS", "1")
    steps = outcome(real, "sglang", "decode")["rows"]
    assert [(row["case"], row["new_tokens"]) for row in steps] == [
        ("llama 1x4", decode.NEW),
        ("llama 2x8", decode.NEW),
    ]
    assert all(row["median_us"] == pytest.approx(1000) for row in steps)


def test_a_model_is_built_before_the_engine_runs_and_once(python, monkeypatch):
    """And none for whole calls of several tokens."""
    told, build, answers = [], transformers.AutoModelForCausalLM.from_config, peers.answers

    def built(*given, **more):
        told.append("build")
        return build(*given, **more)

    def answered(*given):
        told.append("run")
        return answers(*given)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", built)
    monkeypatch.setattr(models, "needed", lambda *given: 0)
    monkeypatch.setattr(peers, "answers", answered)
    script = ANSWER + "answer(1, 4)\nanswer(2, 8)"
    setup = replace(TOY, engines=(("vllm", python(script)),), points=POINTS)
    for suite, *given in (("decode", 9, 1, 3), ("first_token", 1, 1), ("generate", 6, 1)):
        peers.cases(setup, suite, *given)["llama, vllm"]()
    assert told == ["build", "run", "build", "run", "run"]


def test_long_points_are_named_and_have_positions(python, monkeypatch):
    monkeypatch.setattr("attnops.bench.LONG", 8)
    config = 'assert json.load(open("config.json"))["max_position_embeddings"] > 1040\n'
    script, points = python(ANSWER + config + "answer(1, 1040)"), (Point(1, 1040),)
    setup = replace(TOY, engines=(("vllm", script),), points=points)
    [row] = peers.cases(setup, "decode", 9, 1, 3)["llama, vllm"]()
    assert row["of_bandwidth"] > 0 and row["median_us"] > 0
    first = peers.cases(setup, "first_token", 1, 1)
    assert first["llama, vllm"]()[0]["of_matmul"] > 0


@pytest.mark.parametrize("long", [False, True])
def test_prompts_that_are_subtracted_are_cached(long, monkeypatch):
    """By vLLM, whose steps are the difference of two calls, where the prompts are long. Rows say
    so."""
    given, some = {}, types.SimpleNamespace
    compiles = some(compilation_config=some(cudagraph_mode=""))
    llm = some(
        LLM=lambda **options: given.update(options) or some(llm_engine=some(vllm_config=compiles)),
        __version__="",
        RequestOutputKind=some(FINAL_ONLY=0),
    )
    monkeypatch.setattr(engines, "import_module", lambda name: llm)
    spec = {"model": "", "dtype": "", "points": [(1, 8)], "new": 9, "token_bytes": 1}
    facts, _ = engines.vllm({**spec, "less": 3, "long": long})
    assert given["enable_prefix_caching"] is long
    assert facts["how"].endswith("; prompts in its prefix cache") is long


def test_answers_of_another_length_have_no_time(real, monkeypatch):
    monkeypatch.setenv("SHORT", "1")
    assert outcome(real)["left_out"] == "RuntimeError: got [5] tokens, want 6 of each of 1 requests"


@pytest.mark.parametrize("given", ["vllm", "vllm=", "=python", "other=python"])
def test_engines_are_named_with_their_python(given):
    with pytest.raises(InvalidInput, match=r"NAME=PYTHON, with a NAME of vllm \| sglang"):
        peers.parse([given])


def test_the_command_takes_engines(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "attnops.cli.bench.run_suites",
        lambda chosen, setup, **more: seen.append(setup.engines) or {},
    )
    options = ["--device", "cpu", "--engine", "vllm=a=b", "--engine", "sglang=c"]
    assert CliRunner().invoke(app, ["bench", "generate", *options]).exit_code == 0
    assert seen == [(("vllm", "a=b"), ("sglang", "c"))]
    other = CliRunner().invoke(app, ["bench", "overhead", *options])
    assert (
        other.exit_code != 0
        and "one of decode, first_token, generate, for --engine" in " ".join(other.output.split())
    )
