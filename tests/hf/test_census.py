"""The census of model types: what it builds, what it calls wrong, how it ends a type that takes too
long, and what it writes."""

import json
import os
import sys
import time

import pytest
import torch
from packaging.version import Version
from transformers import AttentionInterface

import attnops
import attnops.hf
from attnops.core.errors import InvalidInput, PatchError
from benchmarks.census import checks, models, results, run, testers
from tests.helpers import ROOT

KINDS = models.kinds()
NO_COMPILE = "compile,generate,gradients,copies,steps"


def subject(name):
    return checks.Subject(models.build(models.own(KINDS[name])))


def verdicts(one, *names):
    return {name: run.verdict(check) for name, check in checks.checks_of(one) if name in names}


def hide_a_key(query, key, value):
    value = value.clone()
    value[:, :, 0] = 0
    return query, key, value


def swap_heads(query, key, value):
    return query.roll(1, 1), key, value


@pytest.mark.parametrize("name", ["llama", "bert"])
@pytest.mark.parametrize("broken", [None, hide_a_key, swap_heads])
def test_a_dropped_token_and_a_swapped_head_are_wrong(name, broken, monkeypatch):
    one = subject(name)
    real = AttentionInterface._global_mapping["attnops"]

    def attention(module, query, key, value, *args, **kwargs):
        query, key, value = broken(query, key, value) if broken else (query, key, value)
        return real(module, query, key, value, *args, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, "attnops", attention)
    found = verdicts(
        one, "sensitive", "forward none auto", "forward right auto", "gradients auto", "unpatch"
    )
    assert found.pop("sensitive") == found.pop("unpatch") == ("ok", "")
    assert {status for status, _ in found.values()} == ({"wrong"} if broken else {"ok"}), found


def test_a_foreign_error_is_wrong_and_ours_a_refusal(monkeypatch):
    one = subject("bert")

    def foreign(*args, **kwargs):
        raise ValueError("not ours")

    monkeypatch.setitem(AttentionInterface._global_mapping, "attnops", foreign)
    assert verdicts(one, "forward none auto")["forward none auto"][0] == "wrong"

    def wrapped(*args, **kwargs):
        try:
            raise PatchError("want another")
        except PatchError as error:
            raise RuntimeError("of a compiler") from error

    monkeypatch.setitem(AttentionInterface._global_mapping, "attnops", wrapped)
    assert verdicts(one, "forward none auto")["forward none auto"] == (
        "refused",
        "PatchError: want another",
    )


def late(kind, out):
    path = out / f"{kind.name}.jsonl"
    run.note(
        path,
        built=True,
        plan=["first", "second", "third"],
        cls="C",
        patched=1,
        modules=1,
        skipped=[],
    )
    run.note(path, check="first", status="ok", reason="", seconds=0)
    if kind.name == "bert":
        os._exit(3)
    time.sleep(60)


def test_a_type_that_takes_too_long_or_dies_is_wrong(tmp_path):
    told = []
    run.census(
        [KINDS["llama"], KINDS["bert"]],
        tmp_path,
        2,
        0.5,
        late,
        lambda text, flush: told.append(text),
    )
    for name, why in (("llama", "ran into the limit of 0 s"), ("bert", "its process ended with 3")):
        rows = {row["check"]: row for row in run.read(tmp_path / f"{name}.jsonl") if "check" in row}
        assert [row["status"] for row in rows.values()] == ["ok", "wrong", "wrong"]
        assert rows["second"]["reason"] == why and rows["third"]["reason"] == f"not reached: {why}"
    assert len(told) == 2 and run.finished(tmp_path / "bert.jsonl")


def test_the_whole_way(tmp_path, capsys, monkeypatch, docs):
    arguments = ["--types", "gpt2,bloom", "--skip", NO_COMPILE, "--out", str(tmp_path)]
    assert run.main(arguments) == 0
    first = capsys.readouterr().out
    assert "bloom: refused" in first and "ok" in first
    assert run.main(arguments) == 0 and "bloom: refused" not in capsys.readouterr().out, (
        "finished types are not run again"
    )
    found = results.summary(
        {name: run.read(tmp_path / f"{name}.jsonl") for name in ("gpt2", "bloom")}, ROOT
    )
    assert found["types"]["gpt2"]["state"] == "ran" and set(found["types"]["gpt2"]["checks"]) == {
        "ok"
    }
    assert "computes attention by itself" in found["types"]["bloom"]["reason"]
    census = docs("census")
    monkeypatch.setattr(census, "FILE", tmp_path / "census.json")
    census.FILE.write_text(json.dumps(found))
    page = census.census_full()
    assert (
        "| `gpt2` | GPT2LMHeadModel | 2 of 2 |" in page
        and "| `bloom` | BloomForCausalLM | BloomAttention" in page
    )
    (tmp_path / "gpt2.jsonl").write_text(
        (tmp_path / "gpt2.jsonl").read_text().replace('"status": "ok"', '"status": "wrong"', 1)
    )
    assert run.main(arguments) == 1


def test_every_type_has_a_config_and_sizes_are_small():
    assert len(KINDS) > 300
    config = models.config_of(KINDS["gemma3_text"])
    assert config.hidden_size == 32 and set(config.layer_types) == {
        "sliding_attention",
        "full_attention",
    }
    assert config.sliding_window == 4


def test_a_model_whose_cache_slides_but_not_its_masks_has_no_pages():
    model = models.build(models.own(KINDS["moshi"]))
    with pytest.raises(PatchError, match="sliding_window=4 in MoshiForCausalLM"):
        attnops.patch(model, cache="paged")
    assert (
        model.config._attn_implementation == "eager" and torch.get_default_dtype() == torch.float32
    )


def test_the_committed_census_has_no_wrong_row():
    if not run.RESULTS.exists():
        pytest.skip("no census is committed")
    found = json.loads(run.RESULTS.read_text())
    assert not found["counts"]["checks"].get("wrong")
    states = found["counts"]["types"]
    assert states["unrun"] + states["unbuilt"] <= 30
    assert Version(found["transformers"]) >= Version("5.24")
    ran = {name: one["compiled"] for name, one in found["types"].items() if one["state"] == "ran"}
    assert not [name for name, backends in ran.items() if "aot_eager" not in backends]
    assert {name for name, backends in ran.items() if "inductor" in backends} == set(run.INDUCTOR)
    assert (
        set(found["types"]) <= set(KINDS)
        or found["transformers"] != sys.modules["transformers"].__version__
    )


@pytest.mark.parametrize(
    ("stock", "status"),
    [(2.0, "eager"), (1.0, "wrong"), (3.0, "wrong"), (None, "refused"), (0.0, "eager")],
)
def test_what_the_compiler_changes_without_a_patch_is_no_fault(stock, status, monkeypatch):
    """stock: what it multiplies eager's results by. A patched model's are twice eager's; None, 0:
    that raises; 0: eager's, too."""
    one = subject("bert")
    real = checks.run

    def run_scaled(model, given):
        if not isinstance(model, torch._dynamo.OptimizedModule):
            return real(model, given)
        patched = one.model.config._attn_implementation != "eager"
        if patched and not stock:
            raise InvalidInput("mask", 17, "9")
        if stock == 0.0:
            raise RuntimeError("a dimension of length 17")
        by = 2.0 if patched else stock or 1.0
        return {name: by * value for name, value in real(one.model, given).items()}

    monkeypatch.setattr(checks, "run", run_scaled)
    assert verdicts(one, "compile aot_eager none")["compile aot_eager none"][0] == status


TESTS = """
import unittest

import torch
from transformers import BertConfig, BertForMaskedLM, BertModel

from ...test_modeling_common import floats


class BertModelTester:
    def prepare_config_and_inputs_for_common(self):
        config = BertConfig(
            vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=37, initializer_range=0.02
        )
        return config, {"inputs_embeds": floats(4, 7, 32), "attention_mask": torch.ones(4, 7), "labels": torch.zeros(4, 7)}


class BertModelTest(unittest.TestCase):
    all_model_classes = (BertModel, BertForMaskedLM)

    def setUp(self):
        self.model_tester = BertModelTester()

    def _prepare_for_class(self, inputs, cls):
        return dict(inputs)


class BertIntegrationTest(unittest.TestCase):
    def setUp(self):
        raise OSError("no network")
"""  # noqa: E501


@pytest.fixture
def folder(tmp_path):
    """A folder as a checkout of transformers, with the tests of one family."""
    family = tmp_path / "tests" / "models" / "bert"
    family.mkdir(parents=True)
    (tmp_path / "tests" / "test_modeling_common.py").write_text(
        "import torch\n\ndef floats(*shape):\n    return torch.rand(shape)\n"
    )
    (family / "test_modeling_bert.py").write_text(TESTS)
    front = tmp_path / "src" / "transformers" / "__init__.py"
    front.parent.mkdir(parents=True)
    front.write_text('__version__ = "5.99.0"\n')
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == testers.PACKAGE]:
        del sys.modules[name]


def test_a_type_that_does_not_run_is_tried_with_transformers_own_tests(
    folder, tmp_path, monkeypatch
):
    def unbuilt(kind):
        raise ValueError("this config is none")

    monkeypatch.setattr(models, "own", unbuilt)
    assert testers.open_folder(folder) == "5.99.0"
    skip, found = tuple(NO_COMPILE.split(",")), {}
    for tests in (False, True):
        out = tmp_path / str(tests)
        out.mkdir()
        run.survey(KINDS["bert"], out, skip, tests)
        found[tests] = results.one(run.read(out / "bert.jsonl"))
    assert (found[False]["state"], found[False]["reason"]) == (
        "unbuilt",
        "ValueError: this config is none",
    )
    assert (found[True]["state"], found[True]["cls"]) == ("ran", "BertForMaskedLM") and found[True][
        "source"
    ] == testers.SOURCE
    assert set(found[True]["checks"]) == {"ok"}
    head = next(row for row in run.read(tmp_path / "True" / "bert.jsonl") if "built" in row)
    assert head["inputs"] == {"inputs_embeds": [4, 7, 32]}, "masks and labels are left out"


def test_a_part_without_attention_is_refused():
    model = models.build(models.own(KINDS["sam"]))
    with pytest.raises(
        PatchError, match="nothing to patch in SamPromptEncoder: it has no attention module"
    ):
        checks.patches(model, "prompt_encoder")
    assert checks.patches(model, "mask_decoder")["patched"] > 0
