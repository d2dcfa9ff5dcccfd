"""Prompts of generate() through compiled layers, on a stand-in for the device: eager's tokens,
packed, in chunks, captured."""

import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from attnops.core.errors import InvalidInput
from attnops.hf import tiny
from attnops.hf.attention import descriptor
from attnops.hf.cache import idle_pages
from attnops.hf.cache.names import named
from attnops.hf.report import Took
from attnops.hf.steps import chunk_step, decode, prompt
from attnops.hf.steps.decode import Decoder
from tests.hf.decoding import CALL, Failing, asked, beside, generated, prompts_in_graphs
from tests.hf.helpers import left_padded, near, of_a_library, positions, tokens

CALLS = ((2, 14, 3), (2, 14, 3), (3, 20, 2))
"""Rows, length of the prompt, new tokens. The first one's steps are compiled, and its prompt is
not."""


def layers(pair):
    """The layers that were traced."""
    return [program for program in pair.decoder.prompts.regions.programs if program.split.parts]


@pytest.fixture(autouse=True)
def bounds(monkeypatch):
    """Sets the sizes of chunks in graphs, those of any chunk, and after how many one is captured.
    No prompt is short at first."""

    def given(captured, chunk=prompt.CHUNK, after=0):
        prompts_in_graphs(monkeypatch, *captured, after=after)
        monkeypatch.setattr(prompt, "CHUNK", chunk)

    given((1,))
    return given


@contextmanager
def by_hand(model="llama", **more):
    """A patched model whose first prompt is compiled, without gradients."""
    with torch.no_grad(), beside(model, "piecewise", **more) as pair:
        pair.decoder.at_once = True
        yield pair


def called(pair, cache, ids, mask=None, begin=0):
    """The last logits of these tokens, and of all so far by the twin. mask: of all so far."""
    given, end = {"logits_to_keep": 1}, ids.shape[1]
    if mask is not None:
        given |= {"attention_mask": mask, "position_ids": positions(mask)}
    want = pair.twin(ids, **given).logits
    if mask is not None:
        given["position_ids"] = given["position_ids"][:, begin:end]
    near(pair.model(ids[:, begin:end], **named(cache), **given).logits, want)
    return pair.decoder.prompts.took, pair.decoder.prompts.why


def test_tokens(small_pages, bounds):
    """By one trace, whatever the number of rows and tokens, also of those in graphs. The first row
    has padding."""
    bounds((32, 64), after=1)
    with beside(mode="piecewise", compile_after=0) as pair:
        took = []
        for call in (*CALLS, *CALLS):
            took.append(pair.same(*call).prompt)
            assert "the last prompt ran through" in str(pair.handle.report())
        assert took[:2] == ["", ""] and took[-1] == "captured", pair.decoder.prompts.why
        assert len(layers(pair)) == 1 and pair.handle.plain_steps == 0
    assert "forward" not in vars(pair.model)


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    ("name", "kinds"),
    [("qwen3", 1), ("gemma3", 2), ("gpt_oss", 2), ("gpt2", 1), ("phi3", 1), ("qwen3_moe", 1)],
)
def test_logits(name, kinds, small_pages, bounds):
    """Of prompts longer than the windows, and of the next token, over what is in their pages then.
    In graphs, too."""
    ids, mask = tokens(3, 60), left_padded(3, 60)
    with by_hand(name) as pair:
        cache = pair.handle.new_cache(3, 64)
        for took, sizes in (("compiled", (1,)), ("captured", (192,))):
            bounds(sizes)
            cache.reset()
            for begin, end in ((0, 59), (59, 60)):
                assert called(pair, cache, ids[:, :end], mask[:, :end], begin) == (took, "")
        assert len(layers(pair)) == kinds


def test_a_weight_that_is_replaced_between_prompts(small_pages, bounds):
    """Over one cache, in graphs, where no call between them ran the model's own layers."""
    bounds((64,))
    ids = tokens(2, 21)
    with by_hand() as pair:
        cache = pair.handle.new_cache(2, 64)
        for _ in range(2):
            cache.reset()
            assert called(pair, cache, ids[:, :20]) == ("captured", "")
            near(pair.handle.step(ids[:, 20:], cache), pair.twin(ids).logits[:, 20:])
            pair.change(
                lambda model: setattr(
                    model.lm_head, "weight", nn.Parameter(model.lm_head.weight.flip(0))
                )
            )


def test_no_work_on_padding():
    """In a call of the model, too, whose cache goes on with tokens of each row."""
    seen, ids = [], tokens(3, 20)
    mask = (torch.arange(20) >= torch.tensor([[15], [0], [9]])).long()
    with by_hand() as pair:
        pair.model.model.norm.register_forward_pre_hook(
            of_a_library(lambda module, args: seen.append(args[0].shape[:2]))
        )
        cache = pair.handle.new_cache(3, 24)
        for begin, end in ((0, 16), (16, 20)):
            called(pair, cache, ids[:, :end], mask[:, :end], begin)
            assert (
                seen[-1] == (1, int(mask[:, begin:end].sum()))
                and int(cache.get_seq_length()) == end
            )


@pytest.mark.parametrize("end", [21, 13])
def test_later_tokens_in_graphs(small_pages, bounds, end):
    """By hand, over the cache of a prompt: several tokens of each row, or one."""
    bounds((32,), after=0)
    ids, mask = tokens(2, end), left_padded(2, end)
    with by_hand() as pair:
        for _ in range(2):
            cache = pair.handle.new_cache(2, 24)
            assert called(pair, cache, ids[:, :12], mask[:, :12]) == ("captured", "")
            called(pair, cache, ids, mask, 12)
            modes = {mode for _, mode in pair.decoder._kept.over if "chunks" in mode}
            later = {"later chunks, compiled"} if end > 13 else set()
            assert modes == {"first chunks, compiled", *later}


@pytest.mark.parametrize(
    ("shape", "why"), [((1, 12), "want 2, as input_ids"), ((2, 11), "too few columns")]
)
def test_a_mask_of_another_size_is_refused(shape, why):
    given = {"attention_mask": torch.ones(shape, dtype=torch.int64), "logits_to_keep": 1}
    with by_hand() as pair, pytest.raises(InvalidInput, match=why):
        pair.model(tokens(2, 12), **named(pair.handle.new_cache(2, 24)), **given)


def test_chunks(small_pages, bounds):
    """Long requests take several runs of one graph, which attends over pages, and so does a prompt
    that goes on with a cache."""
    bounds((1,), chunk=12)
    with beside(mode="piecewise", compile_after=0) as pair:
        for call in ((2, 14, 3), (1, 60, 3), (3, 30, 3), (4, 7, 3)):
            pair.same(*call)
        assert pair.took.prompt == "compiled" and len(layers(pair)) == 2
        ids, given = asked(2, 14, 4)
        cache, texts = pair.handle.new_cache(2, 60), []
        given.pop("attention_mask")
        for model, more in ((pair.model, named(cache)), (pair.twin, {})):
            text = model.generate(ids, **given, **more)
            texts.append(model.generate(torch.cat([text, ids[:, :9]], 1), **given, **more))
        assert torch.equal(*texts)
        assert pair.took.prompt == "compiled" and len(layers(pair)) == 2


@pytest.mark.filterwarnings("ignore::attnops.core.errors.NotFast")
def test_a_prompt_tries_one_capture_that_fails(small_pages, bounds):
    """The three tries are those of three prompts, and not of three chunks of one. The first part of
    a long request ends none, so that it gives no logits."""
    bounds((12,), chunk=12)
    device = Failing(lambda: torch.OutOfMemoryError("CUDA out of memory"), 0)
    with by_hand(graphs=device) as pair:
        device.times = 2
        for took in ("compiled", "compiled", "captured"):
            assert called(pair, pair.handle.new_cache(4, 12), tokens(4, 10))[0] == took
        assert device.tried == 2 and not pair.decoder.prompts.failures.passing
        assert called(pair, pair.handle.new_cache(2, 24), tokens(2, 20))[0] == "captured"


@pytest.mark.sweep(6)
@pytest.mark.parametrize("took", ["compiled", "captured"])
@pytest.mark.parametrize("padded", [False, True])
def test_the_host_reads_once_and_sends_once(took, padded, bounds, monkeypatch):
    """A read waits for the device, and so does each tensor of a list: none but those before the
    first chunk. The layers of a model that has not changed are not searched again."""
    bounds((24,) if took == "captured" else (1,), chunk=24)
    ids, mask, seen = tokens(3, 20), left_padded(3, 20) if padded else None, []

    def watched(owner, name, word):
        real = getattr(owner, name)

        def call(*args, **kwargs):
            # Kernels of a CPU read what is theirs, and these functions what the host has read.
            code = sys._getframe(1).f_code
            own = {"kernels", "reference.py", "tensors.py"}.intersection(
                Path(code.co_filename).parts
            )
            if not (own or code.co_name in ("_zeros_of", "_checked_padding")):
                seen.append(word)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    given = {} if mask is None else {"attention_mask": mask, "position_ids": positions(mask)}
    with by_hand() as pair:
        cache = pair.handle.new_cache(3, 24)
        assert called(pair, cache, ids, mask) == (took, "")
        cache.reset()
        for name in ("tolist", "item", "__bool__", "__int__", "__index__", "__float__", "nonzero"):
            watched(torch.Tensor, name, "read")
        for owner, name, word in (
            (torch, "tensor", "list"),
            (descriptor, "on_host", "read"),
            (descriptor, "_on_host", "read"),
            (chunk_step, "modules_of", "search"),
            (prompt.Prompts, "_part", "chunk"),
            (decode, "Glance", "search"),
        ):
            watched(owner, name, word)
        pair.model(ids, **named(cache), logits_to_keep=1, **given)
    assert seen == [*["read"] * padded, "list", *["chunk"] * 3]


@pytest.mark.full
@pytest.mark.parametrize("mode", ["auto", "piecewise"])
def test_compiled_after_a_fixed_number_of_tokens(mode):
    """So that two runs give the same tokens. Steps are compiled first. With mode "auto" prompts
    have no compiler before capture()."""
    with beside(mode=mode, compile_after=4) as pair:
        took = [pair.same(2, 64, 4) for _ in range(6)]
        modes = [each.decode for each in took]
        assert modes == [("breakable" if mode == "auto" else "piecewise"), *["piecewise"] * 5]
        if mode == "auto":
            assert not any(each.prompt for each in took)
            assert "such prompts are not captured" in str(pair.handle.report())
        else:
            # Steps are compiled after the first prompt. Two more of 128 tokens each are as many as
            # 64 for each of the 4 steps.
            assert [each.prompt for each in took] == [*[""] * 3, *["compiled"] * 3]
            assert took[-1] == Took("paged", "piecewise", prompt="compiled")


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    ("name", "more", "why"),
    [
        ("deepseek_v3", {}, "the pages hold latents, and compiled layers take none"),
        (
            "llama",
            {"output_hidden_states": True, "return_dict_in_generate": True},
            "it asks for more than logits",
        ),
        ("llama", {"logits_to_keep": 5}, "more than the last logits are asked for"),
        (
            "gemma3",
            {"prefill_chunk_size": 40},
            "it has more than 1 tokens, and such prompts are not captured",
        ),
        ("llama", {"prefill_chunk_size": 3}, "a row has no token"),
    ],
)
def test_prompts_that_the_model_runs_itself(name, more, why, small_pages, monkeypatch):
    whys, real, call = [], Decoder.try_prompt, (2, 80 if name == "gemma3" else 14, 1)

    def noted(decoder, given):
        out = real(decoder, given)
        whys.append(decoder.prompts.why)
        return out

    monkeypatch.setattr(Decoder, "try_prompt", noted)
    with by_hand(name) as pair:
        got = generated(pair.model, *call, **more)
        assert (
            torch.equal(getattr(got, "sequences", got), generated(pair.twin, *call)) and why in whys
        )


def test_layers_that_cannot_be_compiled(small_pages, monkeypatch):
    """The model runs its prompts, also after an error half way, of which no trace is left."""
    real, calls = prompt.Regions.__call__, []

    def fails(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("no compiler here")
        return real(*args, **kwargs)

    with beside(tiny.model("llama", num_hidden_layers=3), "piecewise", compile_after=0) as pair:
        pair.same(2, 14, 4)
        with monkeypatch.context() as patched:
            patched.setattr(prompt.Regions, "__call__", fails)
            pair.same(2, 14, 1)
        assert pair.same(2, 14, 4).prompt == "" and "RuntimeError: no compiler here" in str(
            pair.handle.report()
        )
        pair.handle.release()
        assert pair.same(2, 14, 4).prompt == "compiled"


def test_capture_compiles_prompts():
    with beside(mode="piecewise") as pair:
        cache = pair.handle.new_cache(2, 20)
        pair.handle.capture(cache)
        made = len(layers(pair))
        assert (
            pair.same(*CALL, **named(cache)).prompt == "compiled" and len(layers(pair)) == made == 1
        )


@pytest.mark.full
def test_graphs_over_pages_that_are_gone(bounds, monkeypatch):
    bounds((32, 64), after=1)
    monkeypatch.setattr(idle_pages, "MOST_IDLE", 1)
    with beside(mode="piecewise", compile_after=0) as pair:
        for length in (14, 14, 14, 14, 40, 40, 40, 14, 14, 14):
            pair.same(2, length, 3)
        assert pair.took.prompt == "captured"
        held = pair.decoder.captures.nbytes
        pair.handle.release()
        assert held > pair.decoder.captures.nbytes == 0
