"""Files and arguments that nobody means to give: each is one line, at once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attnops import configs as models
from attnops.bench.files import read
from attnops.cli.explain import explain_model
from attnops.cli.tune import run as tune
from attnops.core.errors import AttnopsError, BadTable, InvalidInput
from attnops.core.problem import Problem, Target
from attnops.core.select import select
from attnops.measured import forget, in_force, store
from attnops.measured.store import cpu_name, path_for
from attnops.measured.table import from_json
from tests.helpers import ROOT

KIND = {"op": "attention", "q_heads": 4, "kv_heads": 2, "head_dim": 16, "v_head_dim": 16}
GRID = {"problem": KIND, "batch": [1], "queries": [8], "ratio": [1], "us": {"sdpa": [9.0]}}
TABLE = {"format": 2, "gpu": cpu_name(), "target": "cpu", "made": {}, "versions": {}, "grids": [GRID]}
HUGE = 10**400


def changed(**change):
    return json.dumps(TABLE | {"grids": [GRID | change]})


TEXTS = {
    "head dim of 400 digits": changed(problem=KIND | {"head_dim": HUGE}),
    "time of 400 digits": changed(us={"sdpa": [HUGE]}),
    "axis of 400 digits": changed(batch=[HUGE]),
    "5,000 digits": f'{{"format": 2, "gpu": {"9" * 5000}}}',
    "nan": changed(us={"sdpa": [float("nan")]}),
    "inf": changed(batch=[float("inf")]),
    "plan of nan": changed(plan_us={"sdpa": float("nan")}),
    "plan of 400 digits": changed(plan_us={"sdpa": HUGE}),
    "plan of a list": changed(plan_us=[1]),
    "brackets": "[" * 100_000,
    "nested": '{"format": 2, "made": ' + '{"a":' * 5000 + "1" + "}" * 5000 + "}",
    "not utf-8": b"\xff\xfe\x00",
    "empty": "",
    "null": "null",
}  # fmt: skip


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Where the user's table of this CPU lies."""
    monkeypatch.setenv("ATTNOPS_CACHE_DIR", str(tmp_path))
    path = path_for(cpu_name())
    path.parent.mkdir(parents=True)
    forget()
    yield path
    monkeypatch.undo()
    forget()


def ignored(path: Path) -> str:
    forget()
    found = in_force(Target())
    assert found.table is None or found.path != path
    [reason] = [why for where, why in found.ignored if where == path]
    assert select(Problem("attention", Target(), q_heads=4, kv_heads=2, head_dim=16, v_head_dim=16)).kernel is not None
    return reason


def test_the_table_is_one(place):
    place.write_text(json.dumps(TABLE))
    forget()
    assert in_force(Target()).path == place


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_that_is_no_table_is_reported_and_ignored(place, name):
    text = TEXTS[name]
    place.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert ignored(place)
    if isinstance(text, str):
        with pytest.raises(BadTable):
            from_json(text)


def odd_file(path: Path, kind: str) -> None:
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    elif kind == "huge":
        path.touch()
        os.truncate(path, store.LARGEST_BYTES * 10)
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "brackets":
        path.write_text("[" * 100_000)
    else:
        path.touch(mode=0o000)
        if os.access(path, os.R_OK):
            pytest.skip("root reads everything")


@pytest.mark.parametrize("kind", ["fifo", "folder", "endless", "huge", "loop", "unreadable"])
def test_what_is_no_file_is_reported_and_ignored(place, kind):
    odd_file(place, kind)
    assert ignored(place)


# explain --------------------------------------------------------------------------------------------------------------

LLAMA = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": 0}, {"hidden_size": 10**18}, {"hidden_size": -64}, {"hidden_size": 1e18}, {"hidden_size": "64"},
        {"hidden_size": None},
        {"num_hidden_layers": 0}, {"num_hidden_layers": 10**400}, {"num_hidden_layers": 10**6}, {"num_hidden_layers": 1e9},
        {"num_attention_heads": 0}, {"vocab_size": 10**30}, {"vocab_size": -1},
        {"num_hidden_layers": float("nan")}, {"model_type": [1]}, {"model_type": "mixtral", "num_local_experts": 10**8},
    ],
    ids=lambda change: str(change)[:40],
)  # fmt: skip
def test_a_config_of_odd_numbers_is_one_line(tmp_path, change):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA | change))
    with pytest.raises(AttnopsError) as caught:
        explain_model(str(file), target="cpu", tokens=4)
    assert len(str(caught.value).splitlines()) == 1 and len(str(caught.value)) < 1000, str(caught.value)
    torch.zeros(1)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "", "\x00", "9" * 5000, "[]", "1", '"llama"', "{" + '"a": 1,' * 3], ids=lambda t: t[:8]
)
def test_a_text_that_is_no_config_is_one_line(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InvalidInput) as caught:
        models.config_of(str(tmp_path))
    assert len(str(caught.value).splitlines()) == 1 and len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", ["x" * 5000, "/" * 5000, "a\x00b", "/dev/zero", "", "~", "../" * 2000 + "x"], ids=lambda n: repr(n[:6]))
def test_a_name_that_is_no_model_is_one_line(name):
    with pytest.raises(InvalidInput) as caught:
        models.config_of(name)
    assert len(str(caught.value).splitlines()) == 1 and len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    ("name", "hint"), [("org/model", True), ("org/config.json", False), ("attnops/model", False), ("attnops/hf", False)]
)
def test_the_hub_is_named_for_names_of_the_hub(name, hint, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(InvalidInput) as caught:
        models.config_of(name)
    assert (f"hf download {name}" in str(caught.value)) == hint


def test_a_config_larger_than_any_is_not_read(tmp_path):
    (tmp_path / "config.json").touch()
    most = store.LARGEST_BYTES
    os.truncate(tmp_path / "config.json", most + 1)
    with pytest.raises(InvalidInput) as caught:
        models.config_of(str(tmp_path))
    assert str(caught.value) == f"model: got {tmp_path / 'config.json'}: more than {most} bytes, want <= {most}"


# tune, and what cannot be written -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -float("inf"), -1.0, 0.0])
@pytest.mark.parametrize("field", ["budget_s", "first_calls_s"])
def test_a_budget_is_finite(field, seconds):
    with pytest.raises(InvalidInput, match=f"{field}: got .*, want a finite number > 0"):
        tune(None, **{field: seconds})


@pytest.mark.parametrize("kind", ["fifo", "folder", "device"])
def test_a_table_takes_the_place_of_a_file_only(tmp_path, kind):
    path = tmp_path / "out.json"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(os.devnull)
    before = path.lstat()
    with pytest.raises(InvalidInput, match="want a regular file"):
        tune(None, output=path)
    with pytest.raises(InvalidInput, match="want a regular file"):
        store.save(from_json(json.dumps(TABLE)), path)
    assert path.lstat().st_ino == before.st_ino and list(tmp_path.iterdir()) == [path]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["fifo", "folder", "endless", "huge", "loop", "brackets"])
def test_a_results_file_that_is_none_is_one_line(tmp_path, kind):
    path = tmp_path / "decode.json"
    odd_file(path, kind)
    with pytest.raises(InvalidInput, match="want a results file of attnops bench") as caught:
        read(path)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.sweep(5)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("command", [["doctor", "--json"], ["doctor"], ["doctor", "--all"], ["--help"], []], ids=" ".join)
def test_a_full_disk_ends_a_command_cleanly(command):
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "attnops.cli", *command], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if "torchao" not in line]
    assert lines == ["attnops: [Errno 28] No space left on device"]


def test_a_closed_pipe_ends_a_command_cleanly():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "attnops.cli", "doctor", "--json"], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert done.returncode == 1 and "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
