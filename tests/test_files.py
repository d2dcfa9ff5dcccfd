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
from attnops.core.errors import AttnopsError, InvalidInput
from attnops.core.problem import Target
from attnops.measured import in_force, store
from attnops.measured.store import cpu_name, path_for
from tests.helpers import ROOT
from tests.measuring import tables_in, timed


@pytest.fixture
def place(tmp_path):
    """Where the user's table of this CPU lies."""
    with tables_in(tmp_path):
        path = path_for(cpu_name())
        path.parent.mkdir(parents=True)
        yield path


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
    elif kind == "not utf-8":
        path.write_bytes(b"\xff\xfe\x00")
    else:
        path.touch(mode=0o000)
        if os.access(path, os.R_OK):
            pytest.skip("root reads everything")


KINDS = ["fifo", "folder", "endless", "huge", "loop", "brackets", "not utf-8", "unreadable"]


def says_in_a_line(text, function, *given, **more):
    """Whatever is given, however long, the error is short."""
    with pytest.raises(AttnopsError, match=text) as caught:
        function(*given, **more)
    assert len(str(caught.value).splitlines()) == 1 and len(str(caught.value)) < 1500


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_reported_and_ignored(place, kind):
    """A table, and a file of results."""
    odd_file(place, kind)
    found = in_force(Target())
    assert found.table is None and [path for path, _ in found.ignored] == [place]
    says_in_a_line("want a results file of attnops bench", read, place)


# explain ------------------------------------------------------------------------------------------

LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


ODD = [
    ("hidden_size", 0),
    ("hidden_size", -64),
    ("hidden_size", 10**18),
    ("hidden_size", 1e18),
    ("hidden_size", "64"),
    ("hidden_size", None),
    ("num_hidden_layers", 0),
    ("num_hidden_layers", 10**400),
    ("num_hidden_layers", 10**6),
    ("num_hidden_layers", float("nan")),
    ("num_attention_heads", 0),
    ("vocab_size", 10**30),
    ("model_type", [1]),
    ("model_type", "no-such-thing"),
    ("num_attention_heads", 3),
    ("num_local_experts", 10**8),
]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("field", "value"), ODD, ids=lambda value: str(value)[:20])
def test_a_config_of_odd_numbers_is_one_line(tmp_path, field, value):
    file = tmp_path / "config.json"
    kind = {"model_type": "mixtral"} if field == "num_local_experts" else {}
    file.write_text(json.dumps({**LLAMA, **kind, field: value}))
    says_in_a_line(None, explain_model, str(file), target="cpu", tokens=4)
    torch.zeros(1)


NO_CONFIG = ["[" * 100_000, '{"a":' * 100_000, "", "\x00", "9" * 5000, "[]", '{"a": 1,']


@pytest.mark.parametrize("text", NO_CONFIG, ids=lambda t: t[:8])
def test_a_text_that_is_no_config_is_one_line(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    says_in_a_line("model", models.config_of, str(tmp_path))


NO_MODEL = ["x" * 5000, "/" * 5000, "a\x00b", "/dev/zero", "", "~", "../" * 2000 + "x"]


@pytest.mark.parametrize("name", NO_MODEL, ids=lambda n: repr(n[:6]))
def test_a_name_that_is_no_model_is_one_line(name):
    says_in_a_line("model", models.config_of, name)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("org/model", True),
        ("org/config.json", False),
        ("attnops/model", False),
        ("attnops/hf", False),
    ],
)
def test_the_hub_is_named_for_names_of_the_hub(name, hint, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(InvalidInput) as caught:
        models.config_of(name)
    assert (f"hf download {name}" in str(caught.value)) == hint


def test_a_config_larger_than_any_is_not_read(tmp_path):
    odd_file(tmp_path / "config.json", "huge")
    says_in_a_line("config.json: more than", models.config_of, str(tmp_path))


# tune, and what cannot be written -----------------------------------------------------------------


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -float("inf"), -1.0, 0.0])
@pytest.mark.parametrize("field", ["budget_s", "first_calls_s"])
def test_a_budget_is_finite(field, seconds):
    with pytest.raises(InvalidInput, match=f"{field}: got .*, want a finite number > 0"):
        tune(None, **{field: seconds})


@pytest.mark.parametrize("kind", ["fifo", "folder", "endless"])
def test_a_table_takes_the_place_of_a_file_only(tmp_path, kind):
    path = tmp_path / "out.json"
    odd_file(path, kind)
    before = path.lstat()
    says_in_a_line("want a regular file", tune, None, output=path)
    says_in_a_line("want a regular file", store.save, timed(sdpa=1.0), path)
    assert path.lstat().st_ino == before.st_ino and list(tmp_path.iterdir()) == [path]


def ended(command, stdout):
    """What a command that cannot print writes to stderr."""
    program = [sys.executable, "-m", "attnops.cli", *command]
    done = subprocess.run(program, cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    return done.stderr


@pytest.mark.sweep(5)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize(
    "command", [["doctor", "--json"], ["doctor"], ["doctor", "--all"], ["--help"], []], ids=" ".join
)
def test_a_full_disk_ends_a_command_cleanly(command):
    with open("/dev/full", "w") as full:
        lines = ended(command, full).splitlines()
    assert [line for line in lines if "torchao" not in line] == [
        "attnops: [Errno 28] No space left on device"
    ]


def test_a_closed_pipe_ends_a_command_cleanly():
    reader, writer = os.pipe()
    os.close(reader)
    said = ended(["doctor", "--json"], writer)
    os.close(writer)
    assert "Traceback" not in said and "Exception ignored" not in said
