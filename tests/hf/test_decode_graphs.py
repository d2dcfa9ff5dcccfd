"""Decode steps of generate() in graphs, on a stand-in for the device: eager's tokens over changing
batches, and nothing else touched."""

import copy
import functools
import gc
import inspect
import time
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

import attnops
from attnops.core.errors import InvalidInput, NotFast, PatchError
from attnops.hf import Decode, Took, page_model as paged, tiny
from attnops.hf.cache import idle_pages as pool, names as cache_names
from attnops.hf.cache.model_pages import EMPTY, ModelPages
from attnops.hf.cache.names import named
from attnops.hf.steps import captures as states, decode, graphed_steps as steps
from tests.graphs.standin import StandIn
from tests.hf.decoding import (
    CALL,
    Failing,
    asked,
    beside,
    generated,
    graphed,
    how,
    in_threads,
    replays,
)
from tests.hf.helpers import LIMIT, near, relative


def test_a_prompt_in_chunks_of_one_token_is_no_decode_step(small_pages):
    """Its padding goes on: what a chunk brings may be more of it, which no step of graphs stores or
    counts."""
    with beside() as pair:
        pair.same(3, 14, 6, prefill_chunk_size=1)
        assert replays(pair.handle) == 6 - 1


@pytest.mark.parametrize("far", [("cuda",), ("cuda", "cpu")])
def test_a_prompt_of_one_token_is_followed_by_graphs(far, monkeypatch):
    """The first of all, and that of a conversation that goes on with the one token whose keys the
    last turn has not stored."""
    # Devices that the host runs ahead of.
    monkeypatch.setattr("attnops.hf.attention.descriptor._FAR", far)
    more = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    with beside() as pair:
        cache = pair.handle.new_cache(2, 20)
        text = want = torch.full((2, 1), 7)
        for turn in (1, 2):
            want = pair.twin.generate(want, attention_mask=torch.ones_like(want), **more)
            text = pair.model.generate(
                text, attention_mask=torch.ones_like(text), **named(cache), **more
            )
            assert replays(pair.handle) == 3 * turn and torch.equal(text, want)


@pytest.mark.parametrize("fails", [False, True], ids=["kept", "dropped"])
def test_captures_draw_no_random_numbers(fails, monkeypatch):
    """Sampled tokens of a model that draws, too, are those without graphs: whether captures are
    kept, or tried and dropped."""
    model, real, in_layers = tiny.model("llama"), steps.breakable, steps.layered
    model.model.layers[0].mlp.act_fn = torch.nn.Sequential(
        model.model.layers[0].mlp.act_fn, torch.nn.Dropout(0.4)
    )

    def failing(step):
        @functools.wraps(step)
        def failed(*args, **kwargs):
            step(*args, **kwargs)
            raise RuntimeError("a step that cannot be captured")

        return failed

    def captured(step, *given, **more):
        return real(failing(step), *given, **more)

    def drawn(model):
        ids, given = asked(2, 9, 6)
        torch.manual_seed(3)
        return model.generate(ids, **{**given, "do_sample": True})

    if fails:
        monkeypatch.setattr(steps, "breakable", captured)
        monkeypatch.setattr(steps, "layered", lambda *given: failing(in_layers(*given)))
    with graphed(twin := copy.deepcopy(model), "auto") as handle:
        with pytest.warns(NotFast) if fails else nullcontext():
            found = drawn(twin)
        assert handle.took.decode == ("hf" if fails else "breakable")
    assert torch.equal(found, drawn(model))


def test_only_steps_of_generate_are_in_graphs():
    ids, given = asked(*CALL)
    given["return_dict_in_generate"] = True
    own = inspect.signature(tiny.model("llama").forward)
    with beside() as pair:
        model, twin, handle = pair.model, pair.twin, pair.handle
        assert inspect.signature(model.forward) == own, "transformers looks at it"
        model(ids)
        with torch.no_grad():
            cache = handle.new_cache(2, 20)
            model(ids, **named(cache))
            model(ids[:, :1], **named(cache))
        assert handle.graphs is None
        # generate() hands a tokenizer on to the model. The first token is the prompt's.
        pair.same(*CALL, tokenizer=object())
        assert replays(handle) == CALL[2] - 1
        got, want = (each.generate(ids, **given, output_logits=True) for each in (model, twin))
        assert relative(torch.stack(got.logits), torch.stack(want.logits)) < LIMIT, (
            "what is kept is not written over"
        )
        assert handle.plain_steps == 0
        with_states = model.generate(ids, **given, output_hidden_states=True)
        assert handle.plain_steps == CALL[2] - 1, "what graphs do not give is counted"
        assert len(with_states.hidden_states) == CALL[2]


def test_a_capture_leaves_the_cache_as_it_was(small_pages):
    """Rows of nobody are what a capture runs on: neither tokens nor lengths of the requests that
    are there may change."""
    model = tiny.model("llama")
    ids, _ = asked(3, 9, 1)
    with torch.no_grad(), graphed(model) as handle:
        ours, other = handle.new_cache(4, 30), handle.new_cache(4, 30)
        for cache in (ours, other):
            model(ids, **named(cache))
        for at in range(3):
            want = model(ids[:, at : at + 1], **named(other)).logits
            got = handle.step(ids[:, at : at + 1], ours)
            near(got, want)
        for mine, theirs in zip(ours.state.pages.pools, other.state.pages.pools, strict=True):
            assert (
                torch.equal(mine.isnan(), theirs.isnan())
                and relative(mine.nan_to_num(), theirs.nan_to_num()) < LIMIT
            )
        assert int(ours.get_seq_length()) == 12
        assert ours.state.pages.pad.tolist() == [0, 0, 0, EMPTY]


def test_steps_by_hand():
    """Through crops, other calls of the model in between, resets, fewer rows, and comparisons with
    eager."""
    model = tiny.model("llama")
    ids, _ = asked(3, 12, 1)

    def run(step, cache):
        found = [model(ids[:, :6], **named(cache)).logits[:, -1:]]
        found += [step(ids[:, at : at + 1], cache) for at in range(6, 9)]
        cache.crop(-2)
        found.append(model(ids[:, 7:9], **named(cache)).logits[:, -1:])
        found += [step(ids[:2, at : at + 1], cache) for at in range(9, 11)]
        cache.reset()
        found.append(model(ids[:, :3], **named(cache)).logits[:, -1:])
        found.append(step(ids[:, 3:4], cache))
        return torch.cat(found)

    with torch.no_grad(), graphed(model, check_every=2) as handle:
        want = run(lambda one, cache: model(one, **named(cache)).logits, handle.new_cache(3, 20))
        near(run(handle.step, handle.new_cache(3, 20)), want)
        assert handle.graphs.report().compared == 3


def test_all_captured_beforehand():
    told, names = [], ["decode x3", "decode x2", "decode x1"]
    with beside() as pair:
        cache = pair.handle.new_cache(3, 30)
        report = pair.handle.capture(cache, lambda *progress: told.append(progress))
        assert [str(row.bucket) for row in report.rows] == names
        assert told == [(number, 3, name) for number, name in enumerate(names, 1)]
        assert int(cache.get_seq_length()) == 0
        pair.same(3, 9, 4, **named(cache))
        assert len(pair.handle.graphs.report().rows) == 3


def test_what_a_step_refuses():
    model = tiny.model("llama")
    ids, _ = asked(3, 9, 1)
    one, name = ids[:2, :1], cache_names.NAME
    with torch.no_grad(), graphed(model) as handle:
        cache = handle.new_cache(2, 12)
        with pytest.raises(InvalidInput, match="empty or half written"):
            handle.step(one, cache)
        model(ids[:2], **named(cache))
        for given, text in (
            ((ids[:, :1], cache), r"input_ids: got int64 \[3, 1\]"),
            ((ids[:2, :2], cache), r"input_ids: got int64 \[2, 2\]"),
            ((one[0, 0], cache), r"input_ids: got int64 \[\]"),
            ((one.float(), cache), r"input_ids: got float32 \[2, 1\]"),
            ((one, DynamicCache()), f"{name}: got DynamicCache"),
            ((one, cache, one[:, 0]), r"position_ids: got int64 \[2\]"),
            ((one, cache, one[:1]), r"position_ids: got int64 \[1, 1\]"),
        ):
            with pytest.raises(InvalidInput, match=text):
                handle.step(*given)
        with pytest.raises(InvalidInput, match=f"{name}: got DynamicCache"):
            handle.capture(DynamicCache())
        assert handle.graphs is None
        handle.step(one, cache)
        handle.step(one[:1], cache)
        with pytest.raises(RuntimeError, match="rows that the step before did not have"):
            handle.step(one, cache)
        handle.step(one[:1], cache)
        with pytest.raises(RuntimeError, match="a cache that is full"):
            handle.step(one[:1], cache)
    with pytest.raises(PatchError, match="step: got a model that is not patched any more"):
        handle.step(ids, cache)


def test_caches_side_by_side_and_threads_have_graphs_each(small_pages):
    with beside() as pair:
        kept, failures = pair.handle.new_cache(2, 20), []
        pair.same(*CALL, **named(kept))

        def run():
            try:
                pair.same(*CALL)
            except BaseException as error:
                failures.append(error)

        in_threads(run)
        assert not failures and pair.handle.plain_steps == 0


def test_a_cache_that_is_gone_leaves_its_graphs_to_the_next():
    model = tiny.model("llama")
    ids = torch.full((2, 9), 5)
    with torch.no_grad(), graphed(model) as handle:
        captured = []
        for _ in range(3):
            cache = handle.new_cache(2, 40)
            model(ids, **named(cache))
            handle.step(ids[:, :1], cache)
            captured.append(handle.graphs)
            assert int(cache.get_seq_length()) == 10
            del cache
            gc.collect()
        assert captured[0] is captured[1] is captured[2] and len(handle.decode.graphs.graphs) == 1
        assert handle.new_cache(2, 40, page_size=4).state.pages.page_size == 4
        handle.release()
        assert handle._paged.pool.idle_bytes == 0 and not handle._paged.decoder()._kept.over


def test_larger_pages_do_not_lie_beside_the_old_ones(monkeypatch):
    with beside() as pair:
        pair.same(1, 9, 3)
        before = torch.utils.weak.WeakTensorKeyDictionary()
        [over] = pair.decoder._kept.over.values()
        before[over.cache.state.pages.pools[0]] = 1
        del over
        sizes, real = [], pool.ModelPages
        monkeypatch.setattr(
            pool,
            "ModelPages",
            lambda *given: (gc.collect(), sizes.append(len(before)), real(*given))[2],
        )
        pair.same(2, 12, 3)
        assert sizes == [0], "freed before the larger ones were made"


INTERRUPTED = {
    "made": (ModelPages, "clear", (1, 9, 3)),
    "freed": (decode.Decoder, "forget", (2, 12, 3)),
}


@pytest.mark.parametrize("when", INTERRUPTED)
def test_an_interrupt_loses_no_pages(when, monkeypatch):
    """Where a cache is made over idle pages, and where these are freed for larger ones: graphs over
    lost ones would stay for good."""
    owner, name, call = INTERRUPTED[when]
    real = getattr(owner, name)
    with beside() as pair:
        pair.same(1, 9, 3)
        idle = pair.handle._paged.pool._idle
        [before] = idle

        def interrupted(*args):
            if name == "clear":
                real(*args)
            raise KeyboardInterrupt

        with monkeypatch.context() as now, pytest.raises(KeyboardInterrupt):
            now.setattr(owner, name, interrupted)
            generated(pair.model, *call)
        assert [*idle] == [before]
        pair.same(*call)
        assert {pages for pages, _ in pair.decoder._kept.over} == {*idle}


OUTSIDE = {
    "invalidated": RuntimeError(
        "CUDA error: operation failed due to a previous error during capture\nmore"
    ),
    "generator": RuntimeError("Offset increment outside graph capture encountered unexpectedly."),
    "memory": torch.OutOfMemoryError("CUDA out of memory. Tried"),
    "own": RuntimeError("CUDA error: operation not permitted when stream is capturing"),
}


@pytest.mark.filterwarnings("ignore::attnops.core.errors.NotFast")
@pytest.mark.parametrize(
    ("kind", "early", "times"),
    [
        *((kind, False, 2) for kind in OUTSIDE),
        ("memory", False, 50),
        ("own", True, 1),
    ],
)
def test_captures_that_fail_for_no_fault_of_the_model_are_tried_again(kind, early, times):
    """Three times at most, each at the next generate(), and pages stay meanwhile. A failure of the
    model's own is kept at once.

    What CUDA refuses before our own capture is for another one's sake, and none of the model's.
    """
    device, calls = Failing(lambda: OUTSIDE[kind], times, early), 6
    own = kind == "own" and not early
    with beside(mode="auto", graphs=device) as pair:
        took = [pair.same(*CALL) for _ in range(calls)]
        with_pages = 1 if own else min(calls, 1 + states.TRIES) if times == 50 else calls
        assert [each.cache for each in took] == ["paged"] * with_pages + ["hf"] * (
            calls - with_pages
        )
        assert ("tries again" in took[0].why) is not own and "tries again" not in took[-1].why
        if times == 50 or own:
            assert {each.decode for each in took} == {"hf"}
            [step] = pair.decoder.failures.lasting
            assert "release()" in str(step)
        else:
            assert (
                took[-1].decode == "breakable"
                and not pair.decoder.failures.lasting
                and not took[-1].why
            )
        pair.handle.release()
        device.times = 0
        assert pair.same(*CALL).decode == "breakable" and not pair.took.why


def test_few_sets_of_pages_are_kept():
    """Calls that are too unlike for one set have sets of their own, of which two wait."""
    with beside() as pair:
        idle = pair.handle._paged.pool._idle
        for call in ((1, 100, 3), (9, 9, 3), (30, 4, 3), (1, 100, 3)):
            generated(pair.model, *call)
            assert len(idle) <= 1 + pool.MOST_IDLE
        kept = pair.handle.new_cache(1, 8)
        assert len(idle) <= pool.MOST_IDLE
        assert {pages for pages, _ in pair.decoder._kept.over} <= {*idle, kept.state.pages}


@pytest.mark.parametrize(("mode", "told"), [("breakable", UserWarning), ("auto", NotFast)])
def test_memory_that_is_short(mode, told, monkeypatch):
    """Idle pages are freed for new ones; if that is not enough, the call has transformers' cache
    and says why."""
    with beside(mode=mode) as pair:
        pair.same(1, 40, 3)
        real, failing = pool.ModelPages, [False, True]

        def short(*given):
            if failing.pop():
                raise torch.OutOfMemoryError("a test's")
            return real(*given)

        monkeypatch.setattr(pool, "ModelPages", short)
        assert pair.same(20, 9, 4).cache == "paged" and pair.handle._paged.pool.idle_bytes > 0
        pair.handle.release()
        failing[:] = [True, True]
        with pytest.warns(told, match="there is no memory for pages"):
            assert pair.same(*CALL).cache == "hf" and "a test's" in pair.took.why


@pytest.mark.parametrize("mode", ["breakable", "auto"])
def test_a_copy_of_a_patched_model_has_graphs_of_its_own(mode):
    with beside(mode=mode, compile_after=99) as pair:
        pair.same(*CALL)
        copied = copy.deepcopy(pair.model)
        assert torch.equal(generated(copied, *CALL), generated(pair.twin, *CALL))
        other = vars(copied)["_attnops"]
        assert other is not pair.handle and replays(other) == replays(pair.handle) == 3
        assert other.took == pair.took == Took("paged", "breakable")


@pytest.mark.parametrize(
    ("name", "given", "text"),
    [
        ("llama", {"cache": "hf", "decode": "piecewise"}, "decode: got 'piecewise'"),
        ("llama", {"decode": "piecewise", "mask": "additive"}, "mask: got 'additive'"),
        ("llama", {"cache": "paged", "decode": "whole"}, "decode: got 'whole'"),
        ("kimi_linear", {"cache": "paged", "decode": "breakable"}, "of latents cannot have"),
        ("qwen3_5", {"cache": "paged", "decode": "piecewise"}, "which compiled steps cannot have"),
        (
            "llama",
            {"decode": "piecewise"},
            "got decode='piecewise' for LlamaForCausalLM on cpu; want a model on a GPU, or "
            "decode='auto'",
        ),
    ],
)
def test_what_patch_refuses(name, given, text):
    model = tiny.model(name)
    with pytest.raises((InvalidInput, PatchError), match=text):
        attnops.patch(model, **given)
    assert "forward" not in vars(model)
    with pytest.raises(InvalidInput, match=r"decode\.inner: got 'fast'"):
        Decode("piecewise", inner="fast")


def test_a_second_patch_names_the_options_that_differ():
    model, given = tiny.model("llama"), {"cache": "paged", "decode": how()}
    with attnops.patch(model, **given) as handle:
        assert attnops.patch(model, **given) is handle
        other = replace(
            given["decode"], mode="piecewise", check_every=3, inner=torch.compile, graphs=StandIn()
        )
        graphs = r"decode.graphs=StandIn at \w+"
        got = (
            "mask='dense', decode='piecewise', decode.inner=compile, decode.check_every=3, "
            f"{graphs}"
        )
        has = (
            f"mask='auto', decode='breakable', decode.inner='eager', decode.check_every=0, {graphs}"
        )
        with pytest.raises(
            PatchError,
            match=rf"^patch: got {got} for a model that is patched with {has}; call unpatch\(\)",
        ):
            attnops.patch(model, mask="dense", cache="paged", decode=other)


def test_threads_that_begin_together_share_one_decoder(monkeypatch):
    """Else graphs of two would be captured at once, of which the handle knows one."""
    made = []

    class Slow(paged.Decoder):
        def __init__(self, *given):
            made.append(self)
            time.sleep(0.05)
            super().__init__(*given)

    monkeypatch.setattr(paged, "Decoder", Slow)
    with beside() as pair:
        in_threads(pair.handle._paged.decoder)
        assert len(made) == 1
