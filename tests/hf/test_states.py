"""States of linear attention beside pages: turns of a chat, rows without a request, returned
caches, and what states cannot do."""

import copy
import functools
from unittest.mock import patch as replaced

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import attnops
from attnops.core.errors import InvalidInput, NoGradient
from attnops.graphs import kinds
from attnops.graphs.compared import Before
from attnops.hf import tiny
from attnops.hf.cache.names import named
from tests.hf import hybrids
from tests.hf.decoding import Streamer, auto

NAME = "qwen3_5"
GREEDY = {"do_sample": False, "pad_token_id": 0}
TURNS = (30, 7, 40, 1)


def numbers(batch, tokens, seed=0):
    made = torch.Generator().manual_seed(seed)
    return torch.randint(1, tiny.VOCAB, (batch, tokens), generator=made)


def chat(model, batch, cache):
    """The text after some turns, the first with padding on the left."""
    text = torch.zeros(batch, 0, dtype=torch.long)
    mask = text
    for turn, count in enumerate(TURNS):
        here = torch.ones(batch, count, dtype=torch.long)
        if turn == 0:
            here[1:, :5] = 0
        text = torch.cat([text, numbers(batch, count, turn) * here], 1)
        mask = torch.cat([mask, here], 1)
        more = {"attention_mask": mask, "past_key_values": cache, "max_new_tokens": 4}
        text = model.generate(text, **more, **GREEDY)
        mask = torch.cat([mask, mask.new_ones(batch, text.shape[1] - mask.shape[1])], 1)
    return text


@functools.cache
def wanted(batch, name=NAME):
    model = hybrids.model(name)
    return chat(model, batch, hybrids.cache(model))


@pytest.fixture(scope="module")
def patched():
    model = tiny.model(NAME)
    with attnops.patch(model, decode=auto()) as handle:
        yield model, handle


def poisoned(handle, batch, rows=4):
    """A cache whose states hold no numbers before its first tokens."""
    cache = handle.new_cache(rows, 256)
    for states in cache.state.pages.states.tensors:
        states.fill_(float("nan"))
    return cache


@pytest.mark.parametrize("name", hybrids.NAMES)
def test_turns_of_a_chat(name):
    """Also in graphs, from the second chat on. A row of the batch reads no other row's state, and
    none of an earlier request."""
    want = {batch: wanted(batch, name) for batch in (1, 3)}
    model = copy.deepcopy(hybrids.model(name))
    with attnops.patch(model, decode=auto()) as handle:
        for prompt in ("", "captured"):
            for batch in (1, 3):
                cache = poisoned(handle, batch)
                assert torch.equal(chat(model, batch, cache), want[batch])
                took = handle.took
                assert (took.cache, took.decode) == ("paged", "breakable")
                # The experts of Qwen3-Next cannot be recorded in float32 on a CPU.
                assert took.prompt == "captured" or not prompt or name == "qwen3_next"
        count = len(handle._paged.states)
        assert f"linear attention of {count} of {count} layers" in str(handle.report())


def test_a_graph_of_a_prompt_reads_no_state(patched):
    """Of one that has no tokens before it, whose graph an earlier call has captured."""
    model, handle = patched
    ids, given = numbers(2, 9), {"max_new_tokens": 4, **GREEDY}
    want = tiny.model(NAME).generate(ids, **given)
    handle.new_cache(1, 8)  # whose pages are idle
    for prompt in ("", "captured", "captured"):
        for pages in handle._paged.pool._idle:
            for states in pages.states.tensors:
                states.fill_(float("nan"))
        assert torch.equal(model.generate(ids, **given), want)
        assert handle.took.prompt == prompt
    handle.release()


def test_a_returned_convolution_can_go_back():
    """Its layer keeps no state that could not."""
    model = copy.deepcopy(hybrids.model("lfm2"))
    given = {"max_new_tokens": 3, "return_dict_in_generate": True, **GREEDY}
    want = model.generate(numbers(2, 9), **given).past_key_values.layers[0]
    with attnops.patch(model, decode=auto()):
        got = model.generate(numbers(2, 9), **given).past_key_values.layers[0]
    assert got.is_croppable and want.is_croppable
    torch.testing.assert_close(got.conv_states[0], want.conv_states[0])


@pytest.mark.parametrize("name", [NAME, "minimax"])
def test_a_returned_cache_goes_on(name):
    """As transformers' own: with and without pages."""
    model = copy.deepcopy(hybrids.model(name))
    with attnops.patch(model, decode=auto()) as handle:
        for _ in range(2):
            first = model.generate(
                numbers(2, 9), max_new_tokens=3, return_dict_in_generate=True, **GREEDY
            )
            assert handle.took.cache == "paged"
            cache, text = first.past_key_values, torch.cat([first.sequences, numbers(2, 3, 9)], 1)
            assert type(cache) is type(hybrids.cache(model))
            want = model.generate(text, max_new_tokens=4, **GREEDY)
            got = model.generate(text, past_key_values=cache, max_new_tokens=4, **GREEDY)
            assert torch.equal(got, want)


def test_padding_where_the_first_layer_keeps_a_state():
    """transformers' own MiniMax counts its tokens by that layer, as none, and then sees padding."""
    config = copy.deepcopy(hybrids.model("minimax").config)
    config.layer_types = config.layer_types[::-1]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    text, mask, given = numbers(3, 9), torch.ones(3, 9).long(), {"max_new_tokens": 12, **GREEDY}
    mask[1, :3] = mask[2, :7] = 0
    want = [model.generate(row[None, n:], **given) for row, n in zip(text, (0, 3, 7), strict=True)]
    with attnops.patch(model, decode=auto()) as handle:
        cache = poisoned(handle, 3)
        got = model.generate(text, attention_mask=mask, **named(cache), **given)
        assert (handle.took.cache, handle.took.decode) == ("paged", "breakable")
    assert [row[9:].tolist() for row in got] == [row[0, -12:].tolist() for row in want]


@pytest.mark.parametrize("stop", [None, 3])
def test_a_kept_cache_has_no_step_too_many(stop, patched):
    """Its states could not go back: an end of all rows, or an error of the streamer, comes before
    the next step begins."""
    model, handle = patched
    ids, want = numbers(2, 9), []
    twin = tiny.model(NAME)
    ends = [*range(2, tiny.VOCAB, 2)]
    for each in (twin, model):
        own = each is model
        for _ in range(2):  # the second in graphs
            cache = handle.new_cache(2, 64) if own else DynamicCache(config=model.config)
            given = {"past_key_values": cache, "eos_token_id": ends, **GREEDY}
            try:
                text = each.generate(ids, max_new_tokens=20, streamer=Streamer(stop), **given)
            except (KeyError, ValueError):
                text = torch.cat([ids, numbers(2, 2, 8)], 1)
            length = int(cache.get_seq_length())
            kept = text[:, :length] if text.shape[1] > length else text
            longer = torch.cat([kept, numbers(2, 3, 9)], 1)
            longer = each.generate(longer, past_key_values=cache, max_new_tokens=4, **GREEDY)
            want.append((length, longer.tolist()))
    assert want[0] == want[1] == want[2] == want[3]


def test_states_do_not_go_back(patched):
    model, handle = patched
    cache = handle.new_cache(1, 64)
    model.generate(numbers(1, 9), past_key_values=cache, max_new_tokens=2, **GREEDY)
    with pytest.raises(RuntimeError, match="cannot go back"):
        cache.crop(-1)
    assert int(cache.get_seq_length()) == 10
    for refused in (cache.layers[0].activate_past_recording, cache.layers[0].reorder_cache):
        with pytest.raises(InvalidInput, match="got a cache of pages"):
            refused()
    cache.reset()
    assert not cache.has_previous_state(0)


def test_under_a_deterministic_policy(patched):
    """Steps are captured as the model runs them."""
    model, handle = patched
    with attnops.use(deterministic=True):
        for batch in (1, 3):
            cache = poisoned(handle, batch)
            assert torch.equal(chat(model, batch, cache), wanted(batch))
            assert handle.took.decode == "breakable"
    handle.release()


class Other(Before):
    """The states that a layer's code has written, as if they were others."""

    def again(self):
        return [t + 1 for t in super().again()]


def test_a_recording_with_another_state_is_not_used(patched):
    """What was recorded is compared with the layer's own code by the states that both write."""
    model, handle = patched
    with replaced.object(kinds, "Before", Other):
        model.generate(numbers(1, 9), max_new_tokens=3, **GREEDY)
    assert "has other results" in str(handle.graphs.report())
    handle.release()


def test_capture_makes_no_compiled_steps(patched):
    model, handle = patched
    cache = handle.new_cache(2, 64)
    model.generate(numbers(2, 9), past_key_values=cache, max_new_tokens=2, **GREEDY)
    assert set(handle.capture(cache).modes.values()) == {"whole"}
    assert handle._paged.decoder().regions is None
    handle.release()


def stopped(model, layer, text, cache):
    """Raise from a layer of the model."""

    def stop(*_):
        raise KeyError("the layer's own")

    hook = model.model.layers[layer].register_forward_pre_hook(stop)
    try:
        with pytest.raises(KeyError):
            model.generate(text, past_key_values=cache, max_new_tokens=3, **GREEDY)
    finally:
        hook.remove()


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("layer", [1, 3])
def test_an_error_half_way(layer, deterministic, patched):
    """Of a prompt, before the pages count its tokens. Without a token in them the next prompt
    begins again, also in a graph. Else some states are behind others, and none can go back."""
    model, handle = patched
    text, more = numbers(2, 9), {"max_new_tokens": 3, **GREEDY}
    want = tiny.model(NAME).generate(text, **more)
    with attnops.use(deterministic=deterministic):
        model.generate(text, past_key_values=poisoned(handle, 2), **more)
        cache = poisoned(handle, 2)
        stopped(model, layer, text, cache)
        longer = model.generate(text, past_key_values=cache, **more)
        assert torch.equal(longer, want)
        prompt = "" if deterministic else "captured"
        assert (handle.took.prompt, handle.took.decode) == (prompt, "breakable")
        longer = torch.cat([longer, numbers(2, 4, 3)], 1)
        stopped(model, layer, longer, cache)
        for _ in range(2):
            with pytest.raises(InvalidInput, match="did not reach every layer"):
                model.generate(longer, past_key_values=cache, **more)
        cache.reset()
        assert torch.equal(model.generate(text, past_key_values=cache, **more), want)
    handle.release()


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("by_hand", [True, False])
def test_a_row_that_comes_back_is_a_new_request(by_hand, deterministic, patched):
    """With padding in place of all tokens before. Steps left the row out."""
    model, handle = patched
    twin, more = tiny.model(NAME), {"max_new_tokens": 6, **GREEDY}
    with attnops.use(deterministic=deterministic):
        for _ in range(2):
            cache = handle.new_cache(2, 64)
            model.generate(numbers(2, 9), past_key_values=cache, **more)
            kept = int(cache.get_seq_length())
            if by_hand:
                handle.step(numbers(1, 1, 3), cache)
            else:
                with torch.no_grad():
                    model(numbers(1, 4, 3), past_key_values=cache, logits_to_keep=1)
            before = int(cache.get_seq_length())
            assert before > kept
            text, mask = (torch.zeros(2, before + 6, dtype=torch.long) for _ in range(2))
            text[1, -6:], mask[1, -6:], mask[0] = numbers(1, 6, 7), 1, 1
            got = model.generate(text, attention_mask=mask, past_key_values=cache, **more)
            assert torch.equal(got[1:, -12:], twin.generate(numbers(1, 6, 7), **more))
    handle.release()


def test_gradients_are_refused_and_not_kept(patched):
    model, handle = patched
    cache = handle.new_cache(2, 64)
    with torch.enable_grad(), pytest.raises(NoGradient):
        model(numbers(2, 9), past_key_values=cache)
    assert not any(states.requires_grad for states in cache.state.pages.states.tensors)
