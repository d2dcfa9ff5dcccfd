"""Two commits measured in turn: what a row says, what a process answers, and what is refused."""

import argparse
import io
import json
import subprocess
import sys
from itertools import product

import pytest
import torch

from benchmarks import in_turn
from tests.helpers import ROOT

SCRIPT = ROOT / "benchmarks" / "in_turn.py"
FACTS = {"error": 0.1, "budget": 0.2, "layers": 1}
TOY = {"model": "llama", "layers": 1, "batch": 2, "context": 8, "new": 2}


def test_a_slow_host_slows_both_alike():
    """The ratio within a round tells what the medians of times that drift do not."""
    before = [100.0 * slow for slow in (1, 4, 2, 8, 1, 16)]
    times = {"before": before, "now": [1.25 * us for us in before]}
    times["before"][0] *= 5  # a round that one side lost
    first, second = in_turn.rows_of("a case", times, dict.fromkeys(times, FACTS))
    assert (
        second["of_before"] == 1.25 and second["of_before_low"] < 1.25 == second["of_before_high"]
    )
    assert (first["way"], second["way"], first["rounds"]) == ("before", "now", 6)
    assert first["median_us"] == 450 and second["error"] == 0.1 and "of_before" not in first


@torch.no_grad()
def test_a_process_answers_with_its_facts_and_then_with_times(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("steps\ngenerate()\n"))
    in_turn.serve(argparse.Namespace(**TOY, calls=False))
    facts, *times = map(json.loads, capsys.readouterr().out.splitlines())
    assert (
        facts["code"].startswith(str(ROOT / "attnops"))
        and 0 <= facts["error"] <= facts["budget"] < 1e-3
    )
    assert (facts["layers"], facts["new_tokens"], len(times)) == (1, 2, 2) and min(times) > 0


@torch.no_grad()
def test_calls_are_compared_with_torchs_own_attention_and_timed(monkeypatch):
    monkeypatch.setattr(in_turn, "REPEATS", 1)
    facts, ask = in_turn.calls_of(torch.device("cpu"))
    assert 0 < facts["error"] <= facts["budget"]
    assert min(map(ask, in_turn.CALLS)) > 0


def test_a_lost_page_is_over_the_bound_of_calls():
    given, _ = in_turn.arguments(torch.device("cpu"))
    want = in_turn.attended(*given[:4])
    table = given[3].clone()
    table[2, 5] = table[3, 5]
    assert (in_turn.attended(*given[:3], table) - want).abs().max() > 0.02


class Told:
    def __init__(self, **facts):
        self.folder, self.facts = ROOT, {"code": f"{ROOT}/attnops/__init__.py", **FACTS, **facts}

    def answer(self):
        return dict(self.facts)


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"code": "/elsewhere/attnops/__init__.py"}, "got the code of /elsewhere"),
        ({"error": 0.3}, "off by 0.3, want 0.2 at most"),
        ({"error": float("nan")}, "off by nan"),
    ],
)
def test_other_code_and_wrong_logits_are_refused(facts, why):
    assert in_turn.facts_of("now", Told()) == FACTS
    with pytest.raises(SystemExit, match=why):
        in_turn.facts_of("now", Told(**facts))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ([f"{ROOT}/docs"], "want a checkout of attnops"),
        ([str(ROOT), "--rounds", "2"], "--rounds: got 2, want at least 3"),
    ],
)
def test_what_is_no_checkout_or_too_little(given, why, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *given])
    with pytest.raises(SystemExit):
        in_turn.main()
    assert why in capsys.readouterr().err


@pytest.mark.full  # its parts are above; two processes load transformers
@pytest.mark.slow
def test_the_whole_way(tmp_path):
    """By the code of a folder that is given relative to the current one."""
    (tmp_path / "other").mkdir()
    for name in ("attnops", "lowering", "graphs"):
        (tmp_path / "other" / name).symlink_to(ROOT / name)
    sizes = [f"--{name}={value}" for name, value in TOY.items()]
    command = [
        sys.executable,
        str(SCRIPT),
        "other",
        *sizes,
        "--rounds=3",
        "--commit=c0ffee",
        "--out=found.json",
    ]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=240)
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["commit"], found["suite"]) == ("c0ffee", "generate") and found["code"]
    cases = product([f"llama 2x8, {kind}" for kind in in_turn.KINDS], ("before", "now"), [3])
    assert [(row["case"], row["way"], row["rounds"]) for row in found["rows"]] == [*cases]
