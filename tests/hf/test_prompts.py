"""Prompts of generate() through compiled layers, on a stand-in for the device: eager's tokens, packed, in chunks, captured."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import attnops
from attnops.hf import tiny
from attnops.hf.cache_names import named
from attnops.hf.paged import decode, pool, prompt
from attnops.hf.paged.decode import Decoder
from attnops.hf.paged.prompt import parts_of
from attnops.hf.report import Took
from tests.hf.helpers import LIMIT, left_padded, of_a_library, positions, relative, tokens
from tests.hf.test_decode_graphs import Failing, asked, generated, how, nan_pages

assert nan_pages, "a fixture"

CALLS = ((2, 14, 3), (2, 14, 3), (3, 20, 2))
"""Rows, length of the prompt, new tokens. The first one's steps are compiled, and its prompt is not."""


def prompts(handle):
    return handle._paged.decoder().prompts


def layers(handle):
    """The layers that were traced."""
    return [program for program in prompts(handle).regions.programs if program.split.parts]


@pytest.fixture(autouse=True)
def long(monkeypatch):
    """No prompt is short."""
    monkeypatch.setattr(prompt, "CAPTURED", (1,))


@pytest.fixture
def few(monkeypatch, long):
    """Buckets of few tokens, which are captured at their second chunk."""
    monkeypatch.setattr(prompt, "CAPTURED", (32, 64))
    monkeypatch.setattr(prompt, "CAPTURE_AFTER", 1)


def test_tokens(nan_pages, few):
    """By one trace, whatever the number of rows and tokens, also of those in graphs. The first row has padding."""
    model = tiny.model("llama")
    want = [generated(model, *call) for call in CALLS]
    with attnops.patch(model, cache="paged", decode=how("piecewise", compile_after=0)) as handle:
        took = []
        for call, text in zip((*CALLS, *CALLS), (*want, *want), strict=True):
            assert torch.equal(generated(model, *call), text), call
            took.append(handle.took.prompt)
            assert "the last prompt ran through" in str(handle.report())
        assert took[:2] == ["", ""] and took[-1] == "captured", prompts(handle).why
        assert len(layers(handle)) == 1 and handle.plain_steps == 0
    assert "forward" not in vars(model)


@pytest.mark.sweep(6)
@torch.no_grad()
@pytest.mark.parametrize(("name", "kinds"), [("qwen3", 1), ("gemma3", 2), ("gpt_oss", 2), ("gpt2", 1), ("phi3", 1), ("qwen3_moe", 1)])
def test_logits(name, kinds, nan_pages, monkeypatch):
    """Of prompts longer than the windows, and of the next token, over what is in their pages then. In graphs, too."""
    monkeypatch.setattr(prompt, "CAPTURE_AFTER", 0)
    model, ids, mask = tiny.model(name), tokens(3, 60), left_padded(3, 60)
    want = model(ids, attention_mask=mask, position_ids=positions(mask)).logits
    with attnops.patch(model, cache="paged", decode=how("piecewise")) as handle:
        handle._paged.decoder()._at_once = True
        cache = handle.new_cache(3, 64)
        for took, sizes in (("compiled", (1,)), ("captured", (192,))):
            monkeypatch.setattr(prompt, "CAPTURED", sizes)
            cache.reset()
            for begin, end in ((0, 59), (59, 60)):
                now = {"attention_mask": mask[:, :end], "position_ids": positions(mask)[:, begin:end], "logits_to_keep": 1}
                got = model(ids[:, begin:end], **named(cache), **now).logits
                assert relative(got, want[:, end - 1 : end]) < LIMIT
            assert (prompts(handle).took, prompts(handle).why) == (took, "")
        assert len(layers(handle)) == kinds


@torch.no_grad()
def test_a_weight_that_is_replaced_between_prompts(nan_pages, monkeypatch):
    """Over one cache, in graphs, where no call between them ran the model's own layers."""
    monkeypatch.setattr(prompt, "CAPTURE_AFTER", 0)
    monkeypatch.setattr(prompt, "CAPTURED", (64,))
    model, ids = tiny.model("llama"), tokens(2, 21)
    eager = copy.deepcopy(model)
    with attnops.patch(model, cache="paged", decode=how("piecewise")) as handle:
        handle._paged.decoder()._at_once = True
        cache = handle.new_cache(2, 64)
        for _ in range(2):
            cache.reset()
            got = [model(ids[:, :20], **named(cache), position_ids=torch.arange(20)[None], logits_to_keep=1).logits]
            got.append(handle.step(ids[:, 20:], cache))
            assert (prompts(handle).took, prompts(handle).why) == ("captured", "")
            assert relative(torch.cat(got, 1), eager(ids).logits[:, 19:]) < LIMIT
            for each in (model, eager):
                each.lm_head.weight = nn.Parameter(model.lm_head.weight.flip(0) if each is model else model.lm_head.weight.clone())


@torch.no_grad()
def test_no_work_on_padding():
    """In a call of the model, too, whose cache goes on with tokens of each row."""
    model, seen, ids = tiny.model("llama"), [], tokens(3, 20)
    mask = (torch.arange(20) >= torch.tensor([[15], [0], [9]])).long()
    where = positions(mask)
    want = model(ids, attention_mask=mask, position_ids=where).logits
    model.model.norm.register_forward_pre_hook(of_a_library(lambda module, args: seen.append(args[0].shape[:2])))
    with attnops.patch(model, cache="paged", decode=how("piecewise")) as handle:
        handle._paged.decoder()._at_once = True
        cache = handle.new_cache(3, 24)
        for begin, end in ((0, 16), (16, 20)):
            now = {"attention_mask": mask[:, :end], "position_ids": where[:, begin:end]}
            got = model(ids[:, begin:end], **named(cache), logits_to_keep=1, **now).logits
            assert relative(got, want[:, end - 1 : end]) < LIMIT
            assert seen[-1] == (1, int(mask[:, begin:end].sum())) and int(cache.get_seq_length()) == end


def test_chunks(nan_pages, monkeypatch):
    """Long requests take several runs of one graph, which attends over pages, and so does a prompt that goes on with a cache."""
    monkeypatch.setattr(prompt, "CHUNK", 12)
    model = tiny.model("llama")
    calls = ((2, 14, 3), (1, 60, 3), (3, 30, 3), (4, 7, 3))
    want = [generated(model, *call) for call in calls]
    with attnops.patch(model, cache="paged", decode=how("piecewise", compile_after=0)) as handle:
        for call, text in zip(calls, want, strict=True):
            assert torch.equal(generated(model, *call), text), call
        assert handle.took.prompt == "compiled" and len(layers(handle)) == 2
        ids, given = asked(2, 14, 4)
        cache = handle.new_cache(2, 60)
        given.pop("attention_mask")
        text = model.generate(ids, **given, **named(cache))
        text = torch.cat([text, ids[:, :9]], 1)
        text = model.generate(text, **given, **named(cache))
        assert handle.took.prompt == "compiled" and len(layers(handle)) == 2
    again = model.generate(torch.cat([model.generate(ids, **given), ids[:, :9]], 1), **given)
    assert torch.equal(text, again)


@torch.no_grad()
def test_the_first_part_of_a_long_request_in_a_graph(nan_pages, monkeypatch):
    """It ends no request, so that it gives no logits."""
    monkeypatch.setattr(prompt, "CHUNK", 12)
    monkeypatch.setattr(prompt, "CAPTURED", (12,))
    monkeypatch.setattr(prompt, "CAPTURE_AFTER", 0)
    model, ids = tiny.model("llama"), tokens(2, 20)
    want = model(ids, logits_to_keep=1).logits
    with attnops.patch(model, cache="paged", decode=how("piecewise")) as handle:
        handle._paged.decoder()._at_once = True
        got = model(ids, **named(handle.new_cache(2, 24)), logits_to_keep=1).logits
        assert prompts(handle).took == "captured" and relative(got, want) < LIMIT


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::attnops.core.errors.NotFast")
def test_a_prompt_tries_one_capture_that_fails(monkeypatch):
    """The three tries are those of three prompts, and not of three chunks of one."""
    monkeypatch.setattr(prompt, "CHUNK", 12)
    monkeypatch.setattr(prompt, "CAPTURED", (12,))
    monkeypatch.setattr(prompt, "CAPTURE_AFTER", 0)
    model, ids, device = tiny.model("llama"), tokens(4, 10), Failing(lambda: torch.OutOfMemoryError("CUDA out of memory"), 0)
    want = model(ids, logits_to_keep=1).logits
    with attnops.patch(model, cache="paged", decode=how("piecewise", graphs=device)) as handle:
        handle._paged.decoder()._at_once = True
        device.times = 2
        for took in ("compiled", "compiled", "captured"):
            got = model(ids, **named(handle.new_cache(4, 12)), logits_to_keep=1).logits
            assert prompts(handle).took == took and relative(got, want) < LIMIT
        assert device.tried == 2 and not prompts(handle).tries


@pytest.mark.sweep(6)
@torch.no_grad()
@pytest.mark.parametrize("took", ["compiled", "captured"])
@pytest.mark.parametrize("padded", [False, True])
def test_the_host_reads_once_and_sends_once(took, padded, monkeypatch):
    """A read waits for the device, and so does each tensor of a list: none but those before the first chunk. The layers of a model that has
    not changed are not searched again."""
    monkeypatch.setattr(prompt, "CHUNK", 24)
    monkeypatch.setattr(prompt, "CAPTURED", (24,) if took == "captured" else (1,))
    monkeypatch.setattr(prompt, "CAPTURE_AFTER", 0)
    model, ids, mask, seen = tiny.model("llama"), tokens(3, 20), left_padded(3, 20), []
    given = {"attention_mask": mask, "position_ids": positions(mask)} if padded else {}
    want = model(ids, **given, logits_to_keep=1).logits

    def watched(owner, name, word):
        real = getattr(owner, name)

        def call(*args, **kwargs):
            # Kernels of a CPU read what is theirs.
            if not {"kernels", "reference.py", "tensors.py"} & {*Path(sys._getframe(1).f_code.co_filename).parts}:
                seen.append(word)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    with attnops.patch(model, cache="paged", decode=how("piecewise")) as handle:
        handle._paged.decoder()._at_once = True
        cache = handle.new_cache(3, 24)
        for last in (False, True):
            cache.reset()
            if last:
                for name in ("tolist", "item", "__bool__", "__int__", "__index__", "__float__", "nonzero"):
                    watched(torch.Tensor, name, "read")
                watched(torch, "tensor", "list")
                watched(prompt, "modules_of", "search")
                watched(prompt.Prompts, "_part", "chunk")
                watched(decode, "Glance", "search")
            got = model(ids, **named(cache), logits_to_keep=1, **given).logits
        now = list(seen)
        assert relative(got, want) < LIMIT and (prompts(handle).took, prompts(handle).why) == (took, "")
    assert now == [*["read"] * padded, "list", *["chunk"] * 3]


def test_parts():
    """Whole requests while they fit, equal parts of long ones, and every token in one part."""
    counts, before = [5, 3, 20, 4, 8, 1], [0, 0, 2, 0, 0, 0]
    found = parts_of(counts, before, 9)
    assert [sum(part.counts) for part in found] == [8, 6, 7, 7, 4, 9]
    assert [part.last for part in found] == [[4, 7], [], [], [6], [3], [7, 8]]
    assert [part.ends for part in found] == [[0, 1], [], [], [2], [3], [4, 5]]
    assert [part.before[2] for part in found if part.counts[2]] == [2, 8, 15]
    assert [sum(n) for n in zip(*(part.counts for part in found), strict=True)] == counts
    assert [part.begin for part in found[1:]] == [part.end for part in found[:-1]] and found[-1].end == sum(counts)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["auto", "piecewise"])
def test_compiled_after_a_fixed_number_of_tokens(mode):
    """So that two runs give the same tokens. Steps are compiled first. With mode "auto" prompts wait for capture()."""
    model = tiny.model("llama")
    with attnops.patch(model, cache="paged", decode=how(mode, compile_after=4)) as handle:
        took = []
        for _ in range(6):
            generated(model, 2, 64, 4)
            took.append(handle.took)
        modes = [each.decode for each in took]
        assert modes == [("breakable" if mode == "auto" else "piecewise"), *["piecewise"] * 5]
        if mode == "auto":
            assert not any(each.prompt for each in took)
            assert "capture()" in str(handle.report())
        else:
            assert [each.prompt for each in took][-2:] == ["compiled"] * 2 and took[0].prompt == ""
            assert took[-1] == Took("paged", "piecewise", prompt="compiled")


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    ("name", "more", "why"),
    [
        ("deepseek_v3", {}, "the pages hold latents"),
        ("llama", {"output_hidden_states": True, "return_dict_in_generate": True}, "it asks for more than logits"),
        ("llama", {"logits_to_keep": 5}, "more than the last logits are asked for"),
        ("gemma3", {"prefill_chunk_size": 48}, "it goes on with a cache of sliding windows"),
        ("llama", {"prefill_chunk_size": 3}, "a row has no token"),
    ],
)
def test_prompts_that_the_model_runs_itself(name, more, why, nan_pages, monkeypatch):
    model, whys, real = tiny.model(name), [], Decoder.try_prompt

    def noted(decoder, given):
        out = real(decoder, given)
        whys.append(decoder.prompts.why)
        return out

    monkeypatch.setattr(Decoder, "try_prompt", noted)
    length = 64 if name == "gemma3" else 14
    want = generated(model, 2, length, 1)
    with attnops.patch(model, cache="paged", decode=how("piecewise")) as handle:
        handle._paged.decoder()._at_once = True
        got = generated(model, 2, length, 1, **more)
    assert torch.equal(getattr(got, "sequences", got), want) and why in whys


def test_layers_that_cannot_be_compiled(nan_pages, monkeypatch):
    """The model runs its prompts, also after an error half way, of which no trace is left."""
    model = tiny.model("llama", num_hidden_layers=3)
    want = generated(model, 2, 14, 4)
    with attnops.patch(model, cache="paged", decode=how("piecewise", compile_after=0)) as handle:
        generated(model, 2, 14, 4)
        real, calls = prompt.Regions.__call__, []

        def fails(*args, **kwargs):
            calls.append(1)
            if len(calls) == 2:
                raise RuntimeError("no compiler here")
            return real(*args, **kwargs)

        with monkeypatch.context() as patched:
            patched.setattr(prompt.Regions, "__call__", fails)
            assert torch.equal(generated(model, 2, 14, 1), want[:, :15])
        assert torch.equal(generated(model, 2, 14, 4), want) and handle.took.prompt == ""
        assert "RuntimeError: no compiler here" in str(handle.report())
        handle.release()
        assert torch.equal(generated(model, 2, 14, 4), want) and handle.took.prompt == "compiled"


def test_capture_compiles_prompts():
    model = tiny.model("llama")
    want = generated(model, 2, 14, 3)
    with attnops.patch(model, cache="paged", decode=how("piecewise")) as handle:
        cache = handle.new_cache(2, 20)
        handle.capture(cache)
        made = len(layers(handle))
        assert torch.equal(generated(model, 2, 14, 3, **named(cache)), want)
        assert handle.took.prompt == "compiled" and len(layers(handle)) == made == 1


@pytest.mark.full
def test_graphs_over_pages_that_are_gone(few, monkeypatch):
    monkeypatch.setattr(pool, "MOST_IDLE", 1)
    model = tiny.model("llama")
    want = {length: generated(model, 2, length, 3) for length in (14, 40)}
    with attnops.patch(model, cache="paged", decode=how("piecewise", compile_after=0)) as handle:
        for length in (14, 14, 14, 14, 40, 40, 40, 14, 14, 14):
            assert torch.equal(generated(model, 2, length, 3), want[length])
        assert handle.took.prompt == "captured"
        held = handle._paged.decoder().graph_bytes
        handle.release()
        assert held > handle._paged.decoder().graph_bytes == 0
