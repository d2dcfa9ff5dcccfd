"""When mode "auto" compiles, and how steps and prompts run while kernels of their graphs are being
compiled: through the model's own layers."""

import pytest
import torch

import attnops
from attnops.core.kernel import kernels_of
from attnops.core.problem import Target, pretend
from attnops.hf import Decode, Took
from attnops.hf.attention import over_pages
from attnops.hf.cache.model_pages import ModelPages
from attnops.hf.cache.page_sizes import Sizes
from attnops.hf.steps import captures, precompile, prompt
from attnops.kernels.triton.launch import linear_tiles
from attnops.ops import paged_layers
from tests.hf.decoding import asked, beside, first, generated, replays

CALL = (2, 9, 6)
SM90 = Target("cuda", 90, assume=("triton",))


class Threads:
    """Stands in for the threads that compile. left: how often they are still at it when asked."""

    def __init__(self):
        self.looks, self.left, self.waited = True, 10**9, []
        self.done = self  # a launch, and the event at its end

    def pending(self):
        return [self] if self.looks else []

    def wait(self, seconds):
        self.waited.append(seconds)
        self.left -= 1
        self.looks = self.looks and self.left > 0
        return not self.looks


@pytest.fixture
def threads(monkeypatch):
    found = Threads()
    monkeypatch.setattr(precompile, "BESIDE", found)
    monkeypatch.setattr(captures, "BESIDE", found)
    return found


def test_steps_run_without_graphs_until_their_kernels_are_compiled(threads):
    with first() as pair:
        took = pair.same(*CALL)
        assert (took.decode, took.why, took.prompt) == ("hf", precompile.COMPILING, "")
        assert pair.handle.plain_steps == CALL[2] - 1 and not pair.handle.graphs.captured
        assert 0 < threads.waited[0] <= captures.WAIT_S and not any(threads.waited[1:])
        threads.left = 4  # in the middle of a call
        took = pair.same(*CALL)
        assert (took.decode, took.why) == ("breakable", "")
        assert CALL[2] - 1 < pair.handle.plain_steps < 2 * (CALL[2] - 1)
        assert pair.handle.graphs.captured == 1 and replays(pair.handle) > 0


def test_steps_that_are_captured_do_not_wait(threads):
    threads.looks = False
    with first() as pair:
        pair.same(*CALL)
        before, threads.looks = replays(pair.handle), True
        assert pair.same(*CALL).decode == "breakable"
        assert replays(pair.handle) == before + CALL[2] - 1 and not pair.handle.plain_steps
        assert not threads.waited


def test_prompts_run_the_model_s_own_layers_until_their_kernels_are_compiled(threads):
    with first() as pair:
        for _ in range(3):
            assert pair.same(*CALL).prompt == ""
        assert precompile.COMPILING in str(pair.handle.report())
        threads.left = 0
        assert pair.same(*CALL).prompt == "captured"
        threads.looks = True
        assert pair.same(*CALL).prompt == "captured"


def test_kernels_of_others_are_not_waited_for(threads):
    """Those that were begun later than the capture's own."""
    threads.looks = False
    with first() as pair:
        pair.same(*CALL)
        threads.looks = True
        assert pair.same(*CALL) == Took("paged", "breakable", "", "", "captured")


def test_how_a_call_ran_that_came_after_one_that_waited(threads):
    with first() as pair:
        assert pair.same(*CALL).why == precompile.COMPILING
        threads.left = 0
        pair.same(*CALL)
        assert pair.same(2, 9, 1) == Took("paged", "", "", "", "captured")


@pytest.mark.parametrize("mode", ["breakable", "piecewise"])
def test_graphs_that_are_asked_for_by_name_wait(threads, mode):
    with beside("llama", mode) as pair:
        assert pair.same(*CALL).decode == mode and not threads.waited


def test_a_deterministic_policy_waits(threads):
    """Bits may not follow from the time."""
    with first() as pair, attnops.use(deterministic=True):
        generated(pair.model, *CALL)
        assert pair.took.decode == "breakable" and not threads.waited


def test_a_loop_of_one_s_own_begins_the_kernels_of_its_steps(threads, monkeypatch):
    begun = []
    begin = precompile.Over.begin
    monkeypatch.setattr(
        precompile.Over, "begin", lambda over, rows: (begun.append(rows), begin(over, rows))
    )
    with first() as pair, torch.no_grad():
        ids, _ = asked(*CALL)
        cache = pair.handle.new_cache(2, 20)
        token = pair.model(ids, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)
        want = pair.twin(torch.cat((ids, token), 1), logits_to_keep=1).logits
        got = pair.handle.step(token, cache)
        assert begun == [2] and not pair.handle.graphs.captured
        assert pair.handle.plain_steps == 1 and pair.decoder.look
        torch.testing.assert_close(got, want)
        threads.looks = False
        pair.handle.step(token, cache)
        assert pair.handle.graphs.captured == 1


def test_no_call_waits_for_inductor_by_itself():
    """However many steps ran."""
    assert Decode().compile_after is None
    with first(compile_after=None) as pair:
        pair.same(*CALL)
        pair.decoder._kept.taken.update({"more rows": 10**6, "prompt": 10**9})
        took = pair.same(*CALL)
        assert (took.decode, took.prompt) == ("breakable", "captured")
        assert "they are compiled by capture()" in str(pair.handle.report())
        pair.handle.capture(pair.handle.new_cache(2, 20))
        assert pair.same(*CALL).decode == "piecewise"


@pytest.mark.parametrize("built", [True, False])
def test_own_layers_take_kernels_that_are_there_meanwhile(threads, monkeypatch, built):
    """The one launch of a step would have to be compiled, and so would the write."""
    calls, real = [], over_pages._in_one_launch
    monkeypatch.setattr(over_pages, "_in_one_launch", lambda step: (calls.append(1), real(step))[1])
    monkeypatch.setattr(ModelPages, "one_launch", lambda pages: (True,) * len(pages.sizes.layers))
    writes, write = set(), over_pages.write_kv

    def noted(*given, kernel):
        writes.add(kernel)
        return write(*given, kernel=kernel)

    monkeypatch.setattr(over_pages, "write_kv", noted)
    if not built:
        monkeypatch.setattr(ModelPages, "meanwhile", lambda pages: ())
    with first() as pair:
        assert pair.same(*CALL).decode == "hf"
        assert (len(calls) > 1) is not built, "one is of the layer that was recorded"
        assert writes == ({"scatter", None} if built else {None}), "None where layers are recorded"
        threads.looks = False
        assert pair.same(*CALL).decode == "breakable"


def test_which_kernel_is_there(threads):
    """None that threads compile; a forced one alone."""
    sizes = Sizes(
        2, 64, (paged_layers(8, 2, 128, 0, torch.bfloat16, 16),), torch.device("cpu"), None
    )
    with pretend(SM90):
        assert ModelPages(sizes).kernels == ("triton",)
        [there] = ModelPages(sizes).meanwhile()
        for op, name in (("paged_attention", there.attention), ("write_kv", there.write)):
            assert name is not None and kernels_of(op)[name].ahead is None
        [forced] = ModelPages(sizes._replace(kernel="triton")).meanwhile()
        assert forced == (None, there.write)
        with attnops.use(deny=(there.attention, there.write)):
            [others] = ModelPages(sizes).meanwhile()
            assert not {there.attention, there.write} & {*others}


def test_chunks_of_few_tokens_are_those_of_the_kernel_of_few_rows():
    assert captures.FEW == linear_tiles.MOST_ROWS == prompt.CAPTURED[0]
