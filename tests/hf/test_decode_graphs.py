"""Decode steps of generate() in graphs, on a stand-in for the device: eager's tokens over changing batches, and nothing else touched."""

import copy
import functools
import gc
import inspect
import threading
import time
import warnings
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

import attnops
from attnops.core.errors import InvalidInput, NotFast, PatchError
from attnops.hf import Decode, tiny
from attnops.hf.cache_names import named
from attnops.hf.paged import decode, failed, mode as paged, pool, steps
from attnops.hf.paged.pages import EMPTY, ModelPages
from tests.graphs.standin import StandIn
from tests.hf.helpers import LIMIT, relative

CALLS = ((1, 14, 4), (3, 14, 6), (2, 14, 6), (1, 20, 6), (5, 9, 5), (2, 14, 6))
"""Rows, length of the prompt, new tokens."""


def how(mode="breakable", **more):
    return Decode(mode, **{"inner": "eager", "graphs": StandIn(), **more})


def asked(rows, length, new):
    ids = torch.randint(3, 90, (rows, length), generator=torch.Generator().manual_seed(length + rows), device="cpu")
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return ids, {"attention_mask": mask, "max_new_tokens": new, "min_new_tokens": new, "do_sample": False}


def generated(model, *call, **more):
    ids, given = asked(*call)
    return model.generate(ids, **given, **more)


def replays(handle):
    return sum(row.replays for row in handle.graphs.report().rows)


@pytest.fixture
def nan_pages(monkeypatch):
    """Pages hold NaN until something is stored, and are of 4 tokens, so that windows of 8 are shorter than the text."""
    real = pool.ModelPages

    def made(sizes, page_size=None):
        keyed = sizes.layers[0].op == "paged_attention"
        pages = real(sizes, 4 if keyed and page_size is None else page_size)
        for each in pages.pools:
            each.fill_(float("nan"))
        pages.forced = page_size
        return pages

    monkeypatch.setattr(pool, "ModelPages", made)


KINDS = ("llama", "gpt_oss", "deepseek_v3")


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", KINDS)
def test_tokens_of_changing_batches(name, nan_pages):
    """Fewer rows than before, rows that nobody has, longer texts, pages that are made anew; windows; experts; latents."""
    model = tiny.model(name)
    want = [generated(model, *call) for call in CALLS]
    with attnops.patch(model, cache="paged", decode=how()) as handle:
        for call, tokens in zip(CALLS, want, strict=True):
            assert torch.equal(generated(model, *call), tokens), call
        assert handle.plain_steps == 0
        assert set(handle.graphs.report().modes.values()) == ({"whole"})
    assert handle.graphs is None
    assert "forward" not in vars(model)


def test_a_prompt_in_chunks_of_one_token_is_no_decode_step(nan_pages):
    """Its padding goes on: what a chunk brings may be more of it, which no step of graphs stores or counts."""
    model = tiny.model("llama")
    want = generated(model, *CALLS[1])
    with attnops.patch(model, cache="paged", decode=how()) as handle:
        assert torch.equal(generated(model, *CALLS[1], prefill_chunk_size=1), want)
        assert replays(handle) == CALLS[1][2] - 1


@pytest.mark.parametrize("far", [("cuda",), ("cuda", "cpu")])
def test_a_prompt_of_one_token_is_followed_by_graphs(far, monkeypatch):
    """The first of all, and that of a conversation that goes on with the one token whose keys the last turn has not stored."""
    # Devices that the host runs ahead of.
    monkeypatch.setattr("attnops.hf.attention.mask._FAR", far)
    model, start = tiny.model("llama"), torch.full((2, 1), 7)
    more = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    want = model.generate(start, attention_mask=torch.ones_like(start), **more)
    want = model.generate(want, attention_mask=torch.ones_like(want), **more)
    with attnops.patch(model, cache="paged", decode=how()) as handle:
        cache, text = handle.new_cache(2, 20), start
        for turn in (1, 2):
            text = model.generate(text, attention_mask=torch.ones_like(text), **named(cache), **more)
            assert replays(handle) == 3 * turn
        assert torch.equal(text, want)


@pytest.mark.parametrize("fails", [False, True], ids=["kept", "dropped"])
def test_captures_draw_no_random_numbers(fails, monkeypatch):
    """Sampled tokens of a model that draws, too, are those without graphs: whether captures are kept, or tried and dropped."""
    model = tiny.model("llama")
    model.model.layers[0].mlp.act_fn = torch.nn.Sequential(model.model.layers[0].mlp.act_fn, torch.nn.Dropout(0.4))
    ids, given = asked(2, 9, 6)
    given["do_sample"], found, real = True, [], steps.breakable

    def failing(step, *given, **more):
        @functools.wraps(step)
        def failed(*args, **kwargs):
            step(*args, **kwargs)
            raise RuntimeError("a step that cannot be captured")

        return real(failed, *given, **more)

    for ours in (False, True):
        with attnops.patch(model, cache="paged", decode=how("auto")) if ours else nullcontext() as handle:
            if ours and fails:
                monkeypatch.setattr(steps, "breakable", failing)
            torch.manual_seed(3)
            with pytest.warns(NotFast) if ours and fails else nullcontext():
                found.append(model.generate(ids, **given))
            assert handle is None or handle.took.decode == ("hf" if fails else "breakable")
    assert torch.equal(*found)


def test_only_steps_of_generate_are_in_graphs():
    model = tiny.model("llama")
    own = inspect.signature(model.forward)
    with attnops.patch(model, cache="paged", decode=how()) as handle:
        assert inspect.signature(model.forward) == own, "transformers looks at it"
        ids, given = asked(2, 9, 4)
        model(ids)
        with torch.no_grad():
            cache = handle.new_cache(2, 20)
            model(ids, **named(cache))
            model(ids[:, :1], **named(cache))
        assert handle.graphs is None
        model.generate(ids, **given)
        # The first token is the prompt's.
        assert replays(handle) == given["max_new_tokens"] - 1
        beams = model.generate(ids, **given, num_beams=2)
        looked_up = model.generate(ids[:1], max_new_tokens=4, do_sample=False, prompt_lookup_num_tokens=3)
        scores = model.generate(ids, **given, output_logits=True, return_dict_in_generate=True)
        assert handle.plain_steps == 0
        with_states = model.generate(ids, **given, output_hidden_states=True, return_dict_in_generate=True)
        assert handle.plain_steps == given["max_new_tokens"] - 1, "what graphs do not give is counted"
    assert torch.equal(model.generate(ids, **given, num_beams=2), beams)
    assert torch.equal(model.generate(ids[:1], max_new_tokens=4, do_sample=False), looked_up)
    want = model.generate(ids, **given, output_logits=True, return_dict_in_generate=True)
    assert relative(torch.stack(scores.logits), torch.stack(want.logits)) < LIMIT, "what is kept is not written over"
    assert len(with_states.hidden_states) == given["max_new_tokens"]


def test_a_tokenizer_is_no_reason_for_plain_steps():
    """generate() hands it on to the model, for stopping criteria that read text."""
    model = tiny.model("llama")
    want = generated(model, 2, 9, 4)
    with attnops.patch(model, cache="paged", decode=how()) as handle:
        assert torch.equal(generated(model, 2, 9, 4, tokenizer=object()), want)
        assert replays(handle) == 3 and handle.plain_steps == 0


def test_a_capture_leaves_the_cache_as_it_was(nan_pages):
    """Rows of nobody are what a capture runs on: neither tokens nor lengths of the requests that are there may change."""
    model = tiny.model("llama")
    ids, _ = asked(3, 9, 1)
    with torch.no_grad(), attnops.patch(model, cache="paged", decode=how()) as handle:
        ours, other = handle.new_cache(4, 30), handle.new_cache(4, 30)
        for cache in (ours, other):
            model(ids, **named(cache))
        for at in range(3):
            want = model(ids[:, at : at + 1], **named(other)).logits
            got = handle.step(ids[:, at : at + 1], ours)
            assert relative(got, want) < LIMIT
        for mine, theirs in zip(ours.state.pages.pools, other.state.pages.pools, strict=True):
            assert torch.equal(mine.isnan(), theirs.isnan()) and relative(mine.nan_to_num(), theirs.nan_to_num()) < LIMIT
        assert int(ours.get_seq_length()) == 12
        assert ours.state.pages.pad.tolist() == [0, 0, 0, EMPTY]


def test_steps_by_hand():
    """Through crops, other calls of the model in between, resets, fewer rows, and comparisons with eager."""
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
        return torch.cat([x.clone() for x in found])

    with torch.no_grad(), attnops.patch(model, cache="paged", decode=how(check_every=2)) as handle:
        want = run(lambda one, cache: model(one, **named(cache)).logits, handle.new_cache(3, 20))
        kept = []
        got = run(lambda one, cache: kept.append(handle.step(one, cache).clone()) or kept[-1], handle.new_cache(3, 20))
        assert relative(got, want) < LIMIT
        assert handle.graphs.report().compared == 3


def test_all_captured_beforehand():
    model, told = tiny.model("llama"), []
    want = generated(model, 3, 9, 4)
    with attnops.patch(model, cache="paged", decode=how()) as handle:
        cache = handle.new_cache(3, 30)
        report = handle.capture(cache, lambda done, of, bucket: told.append((done, of, bucket)))
        assert [str(row.bucket) for row in report.rows] == ["decode x3", "decode x2", "decode x1"]
        assert told == [(1, 3, "decode x3"), (2, 3, "decode x2"), (3, 3, "decode x1")]
        assert int(cache.get_seq_length()) == 0
        assert torch.equal(generated(model, 3, 9, 4, **named(cache)), want)
        assert len(handle.graphs.report().rows) == 3


def test_what_a_step_refuses():
    model = tiny.model("llama")
    ids, _ = asked(3, 9, 1)
    with torch.no_grad(), attnops.patch(model, cache="paged", decode=how()) as handle:
        cache = handle.new_cache(2, 20)
        with pytest.raises(InvalidInput, match="empty or half written"):
            handle.step(ids[:2, :1], cache)
        model(ids[:2], **named(cache))
        with pytest.raises(InvalidInput, match=r"input_ids: got int64 \[3, 1\]"):
            handle.step(ids[:, :1], cache)
        with pytest.raises(InvalidInput, match=r"input_ids: got int64 \[2, 2\]"):
            handle.step(ids[:2, :2], cache)
        handle.step(ids[:2, :1], cache)
        handle.step(ids[:1, :1], cache)
        with pytest.raises(RuntimeError, match="rows that the step before did not have"):
            handle.step(ids[:2, :1], cache)
    with pytest.raises(PatchError, match="step: got a model that is not patched any more"):
        handle.step(ids, cache)


def test_a_full_cache_is_not_stepped_over():
    model = tiny.model("llama")
    with torch.no_grad(), attnops.patch(model, cache="paged", decode=how()) as handle:
        cache = handle.new_cache(1, 8)
        model(torch.full((1, 7), 5), **named(cache))
        handle.step(torch.full((1, 1), 5), cache)
        with pytest.raises(RuntimeError, match="a cache that is full"):
            handle.step(torch.full((1, 1), 5), cache)


def test_caches_side_by_side_and_threads_have_graphs_each(nan_pages):
    model = tiny.model("llama")
    want = generated(model, 2, 9, 4)
    with attnops.patch(model, cache="paged", decode=how()) as handle:
        kept = handle.new_cache(2, 20)
        assert torch.equal(generated(model, 2, 9, 4, **named(kept)), want)
        found = []
        threads = [threading.Thread(target=lambda: found.append(generated(model, 2, 9, 4))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 3 and all(torch.equal(each, want) for each in found)
        assert handle.plain_steps == 0


def test_a_cache_that_is_gone_leaves_its_graphs_to_the_next():
    model = tiny.model("llama")
    ids = torch.full((2, 9), 5)
    with torch.no_grad(), attnops.patch(model, cache="paged", decode=how()) as handle:
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


def test_steps_of_another_cache_are_no_reason_to_look_at_weights(monkeypatch):
    model, looks, real = tiny.model("llama"), [], decode.Glance.same
    monkeypatch.setattr(decode.Glance, "same", lambda glance: looks.append(1) or real(glance))
    ids = torch.full((2, 9), 5)
    with torch.no_grad(), attnops.patch(model, cache="paged", decode=how()) as handle:
        ours = handle.new_cache(2, 40)
        model(ids, **named(ours))
        handle.step(ids[:, :1], ours)

        def step(input_ids, scores):
            handle.step(ids[:, :1], ours)
            return scores

        looks.clear()
        model.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False, logits_processor=[step], **named(handle.new_cache(2, 40)))
        assert handle.plain_steps == 0 and len(looks) == 2, "each once after the prompt"


def test_larger_pages_do_not_lie_beside_the_old_ones(monkeypatch):
    model = tiny.model("llama")
    with attnops.patch(model, cache="paged", decode=how()) as handle:
        generated(model, 1, 9, 3)
        before = torch.utils.weak.WeakTensorKeyDictionary()
        [over] = handle._paged.decoder()._kept.over.values()
        before[over.cache.state.pages.pools[0]] = 1
        del over
        sizes, real = [], pool.ModelPages
        monkeypatch.setattr(pool, "ModelPages", lambda *given: (gc.collect(), sizes.append(len(before)), real(*given))[2])
        generated(model, 2, 12, 3)
        assert sizes == [0], "freed before the larger ones were made"


INTERRUPTED = {"made": (ModelPages, "clear", (1, 9, 3)), "freed": (decode.Decoder, "forget", (2, 12, 3))}


@pytest.mark.parametrize("when", INTERRUPTED)
def test_an_interrupt_loses_no_pages(when, monkeypatch):
    """Where a cache is made over idle pages, and where these are freed for larger ones: graphs over lost ones would stay for good."""
    owner, name, call = INTERRUPTED[when]
    model, real = tiny.model("llama"), getattr(owner, name)
    want = generated(model, *call)
    with attnops.patch(model, cache="paged", decode=how()) as handle:
        generated(model, 1, 9, 3)
        [before] = handle._paged.pool._idle

        def interrupted(*args):
            if name == "clear":
                real(*args)
            raise KeyboardInterrupt

        with monkeypatch.context() as now, pytest.raises(KeyboardInterrupt):
            now.setattr(owner, name, interrupted)
            generated(model, *call)
        assert [*handle._paged.pool._idle] == [before]
        assert torch.equal(generated(model, *call), want)
        assert {pages for pages, _ in handle._paged.decoder()._kept.over} == {*handle._paged.pool._idle}


def test_reasons_of_many_states_do_not_pile_up(monkeypatch):
    model = tiny.model("llama")
    monkeypatch.setattr(failed, "MOST", 2)
    monkeypatch.setattr(steps, "breakable", lambda *given, **more: 1 / 0)
    with attnops.patch(model, cache="paged", decode=how("auto")) as handle:
        for number in range(4):
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
            with pytest.warns(NotFast) if number == 0 else nullcontext():
                generated(model, 2, 9, 3)
            assert "ZeroDivisionError" in handle.took.why
        assert len(handle._paged.decoder().failed) == 2


OUTSIDE = {
    "invalidated": lambda: RuntimeError("CUDA error: operation failed due to a previous error during capture\nmore"),
    "generator": lambda: RuntimeError("Offset increment outside graph capture encountered unexpectedly."),
    "memory": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried"),
    "own": lambda: RuntimeError("CUDA error: operation not permitted when stream is capturing"),
}


class Failing(StandIn):
    """Fails at the end of the first captures of each Graphed or tail that is made on it, and before them where `early`."""

    def __init__(self, error, times, early=False):
        super().__init__()
        self.error, self.times, self.early, self.tried = error, times, early, 0

    def warm(self, run):
        if self.early and self.tried < self.times:
            self.tried += 1
            raise self.error()
        super().warm(run)

    def end(self):
        if not self.early and self.tried < self.times:
            self.tried += 1
            raise self.error()
        return super().end()


@pytest.mark.parametrize("kind", OUTSIDE)
@pytest.mark.parametrize("times", [2, 50])
def test_captures_that_fail_for_no_fault_of_the_model_are_tried_again(kind, times):
    """Three times at most, each at the next generate(), and pages stay meanwhile. A failure of the model's own is kept at once."""
    model, device = tiny.model("llama"), Failing(OUTSIDE[kind], times)
    want = generated(model, 2, 9, 4)
    with attnops.patch(model, decode=how("auto", graphs=device)) as handle:
        took = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NotFast)
            for _ in range(6):
                assert torch.equal(generated(model, 2, 9, 4), want)
                took.append(handle.took)
        paged_calls = 6 if times == 2 and kind != "own" else 1 if kind == "own" else 1 + failed.TRIES
        assert [each.cache for each in took] == ["paged"] * paged_calls + ["hf"] * (6 - paged_calls)
        found = [each.decode for each in took]
        if times == 50 or kind == "own":
            assert found == ["hf"] * 6
            steps = handle._paged.decoder().failed
            assert len(steps) == 1 and "release()" in str(next(iter(steps)))
            assert "tries again" not in took[-1].why
        else:
            assert found[-1] == "breakable" and not handle._paged.decoder().failed
            assert "tries again" in took[0].why and not took[-1].why
        handle.release()
        device.times = 0
        assert torch.equal(generated(model, 2, 9, 4), want)
        assert handle.took.decode == "breakable" and not handle.took.why


def test_a_wait_that_another_capture_refuses_is_tried_again():
    """Before our own capture: then it is none of the model's."""
    model, device = tiny.model("llama"), Failing(OUTSIDE["own"], 1, early=True)
    with attnops.patch(model, cache="paged", decode=how("auto", graphs=device)) as handle:
        with pytest.warns(NotFast, match="tries again"):
            generated(model, 2, 9, 4)
        generated(model, 2, 9, 4)
        assert handle.took.decode == "breakable" and not handle.took.why


def test_few_sets_of_pages_are_kept():
    """Calls that are too unlike for one set have sets of their own, of which two wait."""
    model = tiny.model("llama")
    with attnops.patch(model, cache="paged", decode=how()) as handle:
        for call in ((1, 100, 3), (9, 9, 3), (30, 4, 3), (1, 100, 3)):
            generated(model, *call)
            assert len(handle._paged.pool._idle) <= 1 + pool.MOST_IDLE
        kept = handle.new_cache(1, 8)
        assert len(handle._paged.pool._idle) <= pool.MOST_IDLE
        assert {pages for pages, _ in handle._paged.decoder()._kept.over} <= {*handle._paged.pool._idle, kept.state.pages}


def test_memory_that_is_short(monkeypatch):
    """Idle pages are freed for new ones; if that is not enough, the call has transformers' cache and says why."""
    model = tiny.model("llama")
    want = generated(model, 2, 9, 4)
    with attnops.patch(model, cache="paged", decode=how()) as handle:
        generated(model, 1, 40, 3)
        real, failing = pool.ModelPages, [True]

        def short(*given):
            if failing.pop():
                raise torch.OutOfMemoryError("a test's")
            return real(*given)

        monkeypatch.setattr(pool, "ModelPages", short)
        failing[:] = [False, True]
        generated(model, 20, 9, 4)
        assert handle.took.cache == "paged" and handle._paged.pool.idle_bytes > 0
        handle.release()
        failing[:] = [True, True]
        with pytest.warns(UserWarning, match="there is no memory for pages"):
            assert torch.equal(generated(model, 2, 9, 4), want)
        assert handle.took.cache == "hf" and "a test's" in handle.took.why


def test_a_copy_of_a_patched_model_has_graphs_of_its_own():
    model = tiny.model("llama")
    want = generated(model, 2, 9, 4)
    with attnops.patch(model, cache="paged", decode=how()) as handle:
        generated(model, 2, 9, 4)
        twin = copy.deepcopy(model)
        assert torch.equal(generated(twin, 2, 9, 4), want)
        assert replays(handle) == 3
        other = vars(twin)["_attnops"]
        assert other is not handle and replays(other) == 3


@pytest.mark.parametrize(
    ("name", "given", "text"),
    [
        ("llama", {"cache": "hf", "decode": "piecewise"}, "decode: got 'piecewise'"),
        ("llama", {"decode": "piecewise", "mask": "additive"}, "mask: got 'additive'"),
        ("llama", {"cache": "paged", "decode": "whole"}, "decode: got 'whole'"),
        ("qwen3_next", {"cache": "paged", "decode": "breakable"}, "have states that move"),
        ("llama", {"decode": "piecewise"}, "got decode='piecewise' for LlamaForCausalLM on cpu; want a model on a GPU, or decode='auto'"),
        ("llama", {"cache": "paged", "decode": Decode("breakable")}, "got decode='breakable' for LlamaForCausalLM on cpu"),
    ],
)
def test_what_patch_refuses(name, given, text):
    model = tiny.model(name)
    with pytest.raises((InvalidInput, PatchError), match=text):
        attnops.patch(model, **given)
    assert "forward" not in vars(model)


def test_a_second_patch_names_the_options_that_differ():
    model, given = tiny.model("llama"), {"cache": "paged", "decode": how()}
    with attnops.patch(model, **given) as handle:
        assert attnops.patch(model, **given) is handle
        for other, got in (
            ({**given, "mask": "dense"}, "got mask='dense' for a model that is patched with mask='auto'"),
            ({**given, "decode": replace(given["decode"], mode="piecewise", check_every=3)},
             "got decode='piecewise', decode.check_every=3 for a model that is patched with decode='breakable', decode.check_every=0"),
            ({**given, "decode": replace(given["decode"], graphs=StandIn(), inner=torch.compile)},
             r"got decode.inner=compile, decode.graphs=StandIn at \w+ for .* with decode.inner='eager', decode.graphs=StandIn at \w+"),
        ):  # fmt: skip
            with pytest.raises(PatchError, match=rf"^patch: {got}; call unpatch\(\) on its handle first, or patch\(\) with the options"):
                attnops.patch(model, **other)


def test_decode_says_what_is_wrong():
    with pytest.raises(InvalidInput, match=r"decode\.inner: got 'fast'"):
        Decode("piecewise", inner="fast")


def test_threads_that_begin_together_share_one_decoder(monkeypatch):
    """Else graphs of two would be captured at once, of which the handle knows one."""
    model, made = tiny.model("llama"), []
    real = paged.Decoder

    class Slow(real):
        def __init__(self, *given):
            made.append(self)
            time.sleep(0.05)
            super().__init__(*given)

    monkeypatch.setattr(paged, "Decoder", Slow)
    with attnops.patch(model, cache="paged", decode=how()) as handle:
        threads = [threading.Thread(target=handle._paged.decoder) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(made) == 1
