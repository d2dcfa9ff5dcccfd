"""The captured loop of generate(), on a stand-in for the device: transformers' tokens, caches,
streams and random numbers."""

import copy
import functools
import inspect
import re

import pytest
import torch
import transformers
from transformers import GenerationConfig, GenerationMixin

from attnops.core.errors import NotFast
from attnops.hf import Decode, tiny
from attnops.hf.cache.names import cache_in, cache_of, named
from attnops.hf.steps import decode_loop as sample, eligibility as plain
from attnops.hf.steps.decode import Decoder
from tests.graphs.standin import StandIn
from tests.hf.decoding import CALL, ENDS, OPTIONS, Streamer, beside, graphed


def asked(rows, length=9):
    ids = torch.randint(
        3, 90, (rows, length), generator=torch.Generator().manual_seed(length + rows), device="cpu"
    )
    mask = torch.ones_like(ids)
    for row, padding in enumerate((2, 0, 3, 1)[:rows]):
        mask[row, :padding] = 0
    return ids.masked_fill(mask == 0, 0), mask


def generated(model, rows=2, **more):
    ids, mask = asked(rows)
    return model.generate(
        ids, **{"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "top_k": 0, **more}
    )


def drawn(model, **more):
    """The tokens of two calls, of which the second draws on, and the state of random numbers after
    them."""
    torch.manual_seed(7)
    found = [generated(model, **more), generated(model, **more)]
    return [*(x.tolist() for x in found), torch.get_rng_state().tolist()]


def loop_of(handle):
    return handle._paged.loop


@pytest.fixture(scope="module")
def model():
    return tiny.model("llama")


@pytest.fixture(scope="module")
def shared(model):
    """A patched copy of the model, and its handle."""
    with graphed(twin := copy.deepcopy(model)) as handle:
        yield twin, handle


@pytest.fixture
def fresh(model):
    """As `shared`, for one test."""
    with graphed(twin := copy.deepcopy(model)) as handle:
        yield twin, handle


def test_a_step_is_two_graphs(shared):
    ours, handle = shared
    generated(ours)
    device, graphs = handle.decode.graphs, handle.graphs
    device.calls.clear()
    before = sum(row.replays for row in graphs.report().rows)
    generated(ours)
    assert sum(row.replays for row in graphs.report().rows) - before == 7
    assert device.calls == ["replay"] * 15, "the prompt's token has a tail and no step"


def test_without_padding(model, shared):
    """transformers 5.23 hands the model no mask then. The second turn begins with the one token
    that the cache lacks."""
    ours, handle = shared
    ids, cache = torch.full((2, 9), 7), handle.new_cache(2, 40)
    for loop in ([], [lambda ids, scores: scores]):
        more = {"max_new_tokens": 4, "do_sample": False, "logits_processor": loop}
        cache.reset()
        want = got = ids
        for _ in range(2):
            want = model.generate(want, attention_mask=torch.ones_like(want), **more)
            got = ours.generate(got, attention_mask=torch.ones_like(got), **named(cache), **more)
            assert torch.equal(got, want) and (handle.took.decode, handle.plain_steps) == (
                "breakable",
                0,
            )
            assert (handle.took.loop == "") is (not loop)


def test_the_prompts_own_token_ends_all(model, shared):
    first = generated(model)[:, 9].tolist()
    for more in ({"eos_token_id": first}, {"max_new_tokens": 1}):
        want = generated(model, **more)
        assert want.shape == (2, 10) and torch.equal(generated(shared[0], **more), want)


def stock_cache(model):
    return transformers.DynamicCache(config=model.config)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("whose", ["returned", "the caller's"])
def test_caches_that_live_on(whose, model, fresh):
    """After a row's end and after the length, a cache holds as many positions as transformers'
    does, and a second turn goes on."""
    kept = whose == "the caller's"

    def turns(model, cache):
        ids, mask = asked(2)
        found = []
        for more in (
            {"eos_token_id": ENDS, "max_new_tokens": 20},
            {"max_new_tokens": 3},
            {"eos_token_id": ENDS, "max_new_tokens": 20},
        ):
            given = {**more, "pad_token_id": 1, "do_sample": False, "return_dict_in_generate": True}
            out = model.generate(ids, attention_mask=mask, **named(cache), **given)
            found += [out.sequences.tolist(), int(cache_of(out).get_seq_length())]
            assert type(out).__name__ == "GenerateDecoderOnlyOutput" and out.logits is None
            ids, cache = out.sequences, cache_of(out) if kept else None
            mask = torch.cat(
                [mask, torch.ones(2, ids.shape[1] - mask.shape[1], dtype=torch.int64)], 1
            )
        return found

    ours, handle = fresh
    want = turns(model, stock_cache(model) if kept else None)
    assert turns(ours, handle.new_cache(2, 80) if kept else None) == want
    assert handle.took.loop == "" and handle.plain_steps == 0


def test_a_cache_that_is_full_when_the_rows_end(model, shared):
    """The step too many would have no room: such a text goes to transformers' loop."""
    ids, mask = asked(2)
    text = torch.cat([mask, torch.ones(2, 3, dtype=torch.int64)], 1)

    def second(model, cache, **more):
        model.generate(ids, attention_mask=mask, **named(cache), max_new_tokens=2, do_sample=False)
        # The ten tokens that the cache has are not passed again.
        more = {
            "attention_mask": text,
            **named(cache),
            "max_new_tokens": 9,
            "do_sample": False,
            **more,
        }
        return model.generate(torch.full((2, 2), 5), **more)

    end = {"eos_token_id": second(model, stock_cache(model))[:, 6].tolist(), "pad_token_id": 1}
    want = second(model, stock_cache(model), **end)
    assert want.shape[1] < 2 + 9
    ours, handle = shared
    for room, reason in (
        (10 + want.shape[1] - 1, "its text may not fit the cache"),
        (10 + 2 + 9 - 1, ""),
    ):
        assert torch.equal(second(ours, handle.new_cache(2, room), **end), want)
        assert handle.took.loop == reason


def test_an_error_of_the_streamer(model, shared):
    """It leaves the cache where transformers' loop leaves it, and the loop free."""
    ours, handle = shared

    def run(model, make):
        found = []
        for stop in (0, 1, 4):
            cache = make()
            with pytest.raises(KeyError, match="the streamer's own"):
                generated(model, **named(cache), streamer=Streamer(stop))
            found.append(int(cache.get_seq_length()))
        return found

    assert (
        run(ours, lambda: handle.new_cache(2, 40))
        == run(model, lambda: stock_cache(model))
        == [0, 9, 12]
    )
    assert (
        torch.equal(generated(ours), generated(model))
        and handle.took.loop == ""
        and handle.plain_steps == 0
    )


def given(asked, **more):
    return asked._replace(given={**asked.given, **more})


def config(asked, **more):
    vars(changed := copy.copy(asked.config)).update(more)
    return asked._replace(config=changed)


ALTERED = {
    "its cache is a NoneType": lambda asked: given(asked, **named(None)),
    "arguments that change from step to step": lambda asked: given(asked, output_attentions=True),
    "that change from": lambda asked: config(asked, use_cache=False),
    "not int64 on the device": lambda asked: asked._replace(input_ids=asked.input_ids.int()),
    "no positions for each row": lambda asked: given(
        asked, position_ids=asked.given["position_ids"][:1]
    ),
    "no positions": lambda asked: given(asked, position_ids=None),
    "none pads them": lambda asked: config(asked, _pad_token_tensor=None),
    "may not fit the cache": lambda asked: config(
        asked, _mask_length=cache_in(asked.given).max_length
    ),
}


def test_the_conditions_of_a_plain_loop(model, shared, monkeypatch):
    """Each by itself, for a call that is plain but for it."""
    seen, (ours, _) = [], shared
    monkeypatch.setattr(
        sample, "why_not_plain", lambda *given: seen.append(given) or plain.why_not_plain(*given)
    )
    out = generated(ours, eos_token_id=ENDS, pad_token_id=1, return_dict_in_generate=True)
    [(asked, decoder)] = seen
    assert cache_of(out) is cache_in(asked.given), "it keeps its pages"
    assert not [*plain.why_not_plain(asked, decoder)]
    for why, altered in ALTERED.items():
        [found] = plain.why_not_plain(altered(asked), decoder)
        assert why in found
    compiled = copy.copy(asked.owner)
    object.__setattr__(compiled, "_compiled_call_impl", abs)
    assert "compiles the model" in next(
        plain.why_not_plain(asked._replace(owner=compiled), decoder)
    )
    monkeypatch.setattr(decoder, "how", Decode("hf"))
    assert "graphs cannot be made" in next(plain.why_not_plain(asked, decoder))


def test_what_looks_at_each_call_of_the_model(fresh):
    """Hooks, another forward, and a model that prepares its own inputs."""
    calls, (model, handle) = [], fresh
    generated(model)
    with model.register_forward_hook(lambda *_: calls.append(1)):
        tokens = generated(model)
        assert len(calls) == 8 and "hooks or forward" in handle.took.loop
    real = model.forward
    model.forward = functools.wraps(real)(
        lambda *args, **kwargs: calls.append(1) or real(*args, **kwargs)
    )
    assert torch.equal(generated(model), tokens) and len(calls) == 16
    model.forward = real
    assert torch.equal(generated(model), tokens) and len(calls) == 16 and handle.took.loop == ""
    with beside("phi3") as pair:
        pair.same(*CALL)
        assert pair.took.loop == "Phi3ForCausalLM has a prepare_inputs_for_generation of its own"


def test_the_fields_that_choose_a_method_are_known():
    source = inspect.getsource(GenerationConfig.get_generation_mode)
    fields = set(re.findall(r"self\.(\w+)", source)) - {"do_sample", "top_k"}
    assert fields <= {*plain.COUNTS, *plain.CHOICES}


def test_a_tail_that_cannot_be_captured(model):
    class Refuses(StandIn):
        def end(self):
            if any("argmax" in name for name, _ in self.open.log):
                raise RuntimeError("operation not permitted")
            return super().end()

    call = {**OPTIONS["all"], "rows": 3, "eos_token_id": ENDS}
    with graphed(twin := copy.deepcopy(model), graphs=Refuses()) as handle:
        with pytest.warns(
            NotFast, match="no CUDA graph for the choice of its tokens.*operation not permitted"
        ):
            assert drawn(twin, **call) == drawn(model, **call)
        assert (
            "the choice of a token: cannot be captured" in handle.took.loop
            and "operation not permitted" in handle.took.loop
        )
        assert handle.plain_steps == 0


def other_arguments(
    self, input_ids, generation_config, model_kwargs, is_first_iteration=True, *, whole
):
    raise AssertionError("it is not to be called")


@pytest.mark.parametrize(
    ("method", "why"),
    [(None, "has no _prefill"), (other_arguments, "has a _prefill of other arguments")],
)
def test_a_transformers_with_other_methods(method, why, model, fresh, monkeypatch):
    """Its own loop then runs around the graphs, and the user is told."""
    want, (ours, handle) = generated(model), fresh
    real = GenerationMixin._prefill
    monkeypatch.setattr(type(model), "_prefill", real, raising=False)  # for transformers' own loop
    monkeypatch.setattr(GenerationMixin, "_prefill", method)
    with pytest.warns(NotFast, match=f"choice of its tokens: transformers .* {why}"):
        assert torch.equal(generated(ours), want)
    assert (
        why in handle.took.loop and handle.took.decode == "breakable" and not loop_of(handle)._idle
    )


def test_steps_without_graphs_in_the_middle(model, fresh, monkeypatch):
    """Where graphs are not to be had, a step is transformers' own, with the mask and the positions
    of its place."""
    call = {**OPTIONS["all"], "rows": 3, "eos_token_id": ENDS, "max_new_tokens": 20}
    real, calls, (ours, handle) = Decoder.try_step, [], fresh
    monkeypatch.setattr(
        Decoder,
        "try_step",
        lambda *given: calls.append(1) or (real(*given) if len(calls) % 4 == 1 else None),
    )
    assert drawn(ours, **call) == drawn(model, **call)
    assert handle.took.loop == "" and handle.plain_steps > 0


def test_a_generate_within_generate(model, fresh):
    """Each has buffers of its own, and one of two equal tails is kept."""
    ours, handle = fresh
    inner, reasons, other = [], [], {"attention_mask": torch.ones(2, 9, dtype=torch.int64)}

    class Nested(Streamer):
        def put(self, tokens):
            super().put(tokens)
            if len(self.got) == 4:
                inner.append(generated(ours, **other))
                reasons.append(handle.took.loop)

    for _ in range(2):  # with a tail that is made, and with one that was kept
        assert torch.equal(generated(ours, streamer=Nested()), generated(model))
    assert all(torch.equal(each, generated(model, **other)) for each in inner)
    assert reasons == ["", ""] and len(loop_of(handle)._idle) <= sample._MOST


@pytest.mark.parametrize(
    ("bounds", "kept"),
    [((2, 0, 64), [8, 7]), ((1, 2**28, 3), [5, 8, 7]), ((1, 2**28, 64), [6, 5, 8, 7])],
)
def test_few_tails_are_kept(bounds, kept, fresh, monkeypatch):
    """Those that were used last: more of them where they are small, up to a number. bounds: of
    those, of bytes, and that number."""
    for name, bound in zip(("_MOST", "_MOST_BYTES", "_MOST_SMALL"), bounds, strict=True):
        monkeypatch.setattr(sample, name, bound)
    ours, handle = fresh
    device = handle.decode.graphs
    for top_k in (6, 5, 7, 8, 7):
        drawn(ours, do_sample=True, top_k=top_k, max_new_tokens=2)
    assert [
        dict(tail.choice.processors[0][1:-1])["top_k"] for tail in loop_of(handle)._idle
    ] == kept
    assert sum(graph.alive for graph in device.graphs) == len(kept) + 1
    assert not vars(copy.deepcopy(ours))["_attnops"]._paged.loop._idle
    handle.release()
    assert device.calls[-2:] == ["settle", "release"] and not any(
        graph.alive for graph in device.graphs
    )


@pytest.mark.parametrize("sampled", [False, True])
def test_the_capture_of_a_choice_leaves_random_numbers_to_other_threads(sampled, model):
    class Another(StandIn):
        def end(self):
            graph = super().end()
            torch.rand(1)
            return graph

    found = []
    for device in (StandIn(), Another()):
        torch.manual_seed(3)
        with graphed(twin := copy.deepcopy(model), graphs=device):
            generated(twin, do_sample=sampled)
        found.append(torch.rand(3).tolist())
    assert found[0][2:] == found[1][:1], (
        "one draw in the capture of the step, one in that of the choice"
    )
