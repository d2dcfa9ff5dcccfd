"""Kernels that the host plans for in decode steps of patched models, over stand-ins of FlashInfer
and of graphs: eager's tokens, plans that follow the lengths, and no more of them than need be."""

import copy
import gc
import weakref
from collections import Counter
from contextlib import contextmanager
from itertools import permutations

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
)

import attnops
from attnops.core.errors import InvalidInput
from attnops.core.kernel import fits_a_graph, kernels_of, replanned
from attnops.core.problem import Target, altered, pretend
from attnops.hf.cache import model_pages
from attnops.hf.cache.model_pages import ModelPages
from attnops.hf.cache.step_plans import StepPlans, mean_plan_us
from attnops.hf.steps.reasons import needs_plan
from attnops.ops import paged_layers
from attnops.ops.pages.plan import step_of
from tests.hf.decoding import Beside, how, logits
from tests.hf.helpers import relative
from tests.standins import flashinfer_modules

SIZES = {
    "vocab_size": 100,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
CALLS = ((2, 14, 20), (1, 14, 4), (3, 9, 6), (2, 20, 60))
"""Rows, length of the prompt, new tokens."""
LIMIT = 0.08
"""Of logits, relative to the largest: three layers in bfloat16."""
WORSE, WORST = 1.25, 2.0
"""Of their errors against float64, in the mean square and at worst, as a multiple of those of
transformers' own bfloat16."""


def llama(heads=2):
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_attention_heads=heads)
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def gemma3():
    """Two windows: pages of all tokens, and of the last 24."""
    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = Gemma3TextConfig(
        **SIZES,
        num_attention_heads=2,
        layer_types=kinds,
        sliding_window=24,
        query_pre_attn_scalar=64,
    )
    return Gemma3ForCausalLM(config).to(torch.bfloat16).eval()


class Forced(LogitsProcessor):
    """Tokens that do not hang on the logits: in bfloat16 those of a random model often tie."""

    def __call__(self, input_ids, scores):
        rows = torch.arange(len(scores), device=scores.device)
        chosen = (input_ids.shape[1] * 7 + rows * 5)[:, None] % 80 + 5
        return torch.full_like(scores, -1e9).scatter(1, chosen, 0.0)


def asked(new, **more):
    """Arguments of a `generate()` of so many tokens."""
    given = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    return {**given, "logits_processor": [Forced()], **more}


class Pair(Beside):
    """calls: of the stand-ins, by name."""

    calls = None

    def same(self, *call, **more):
        """The logits of every step are the twin's but for rounding."""
        exact = copy.deepcopy(self.twin).double()
        got, want, right = (
            logits(model, *call, logits_processor=[Forced()], **given).double()
            for model, given in ((self.model, more), (self.twin, {}), (exact, {}))
        )
        error, own = ((x - right).square().mean().sqrt() for x in (got, want))
        assert error < WORSE * own, call
        assert relative(got, right) < WORST * relative(want, right), call

    @property
    def ran(self):
        return Counter(self.calls)


@contextmanager
def patched(model, mode, kernel="flashinfer", arch=90, vendor=flashinfer_modules, **more):
    """A patched model beside its twin, on the stand-ins."""
    twin, cache = copy.deepcopy(model), "auto" if mode == "auto" else "paged"
    options = {"kernel": kernel, "cache": cache, "decode": how(mode, **more)}
    target = Target("cuda", arch, assume=("flashinfer",))
    with (
        vendor.installed() as calls,
        pretend(target),
        attnops.patch(model, **options) as handle,
    ):
        pair = Pair(model, twin, handle)
        pair.calls = calls
        yield pair


def serves_under(pair, policy, name):
    """A function of the stand-in runs under a policy, and none under another one."""
    with attnops.use(**policy):
        pair.same(*CALLS[0])
        assert pair.ran[name]
    before = len(pair.calls)
    with attnops.use("reference"):
        pair.same(*CALLS[0])
    assert len(pair.calls) == before


MODES = ("hf", "breakable", "auto", "piecewise")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("heads", [2, 8], ids=["decode", "fa2"])
def test_steps_of_changing_batches(heads, mode):
    """Left padding, rows that come and go, pages that are made anew and pages that fill up."""
    name, run = ("decode", "decode.run") if heads == 2 else ("fa2", "fa2.paged_run")
    with patched(llama(heads), mode) as pair:
        for call in CALLS:
            pair.same(*call)
        steps = sum(new - 1 for *_, new in CALLS)
        assert pair.ran[run] >= 3 * steps, "three layers a step"
        assert 0 < pair.ran[f"{name}.plan"] < steps


@pytest.mark.parametrize("mode", MODES)
def test_two_windows(mode):
    with patched(gemma3(), mode) as pair:
        for call in ((2, 14, 30), (3, 30, 20), (1, 14, 4)):
            pair.same(*call)
        assert pair.ran["decode.run"]


@pytest.mark.parametrize("mode", ["breakable", "piecewise"])
def test_the_graph_is_whole(mode):
    with patched(llama(), mode) as pair:
        pair.same(*CALLS[0])
        [row] = pair.handle.graphs.report().rows
        assert (row.graphs, row.breaks, row.replays) == (1, (), CALLS[0][2] - 1)


@pytest.mark.parametrize("mode", ["hf", "breakable", "auto"])
@pytest.mark.parametrize("policy", [{"kernel": "flashinfer"}, {"prefer": ("flashinfer",)}])
def test_a_policy_asks_for_it(policy, mode):
    with patched(llama(), mode, kernel=None) as pair:
        serves_under(pair, policy, "decode.run")


def test_a_step_over_the_same_pages_has_no_new_plan(monkeypatch):
    """Only the tokens of the last pages change, and the host reads lengths once a prompt."""
    waited = []
    plan_step = ModelPages.plan_step

    def spy(self, plans, rows, live):
        waited.append(live > 0 and self.lengths is None)
        plan_step(self, plans, rows, live)

    monkeypatch.setattr(ModelPages, "plan_step", spy)
    with patched(llama(), "breakable") as pair:
        pair.same(2, 14, 130)
        [page] = {pages.page_size for pages, _ in pair.decoder._kept.over}
        crossed = sum(n % page == 1 for row in (14, 11) for n in range(row + 2, row + 130))
        assert pair.ran["decode.plan"] == 1 + crossed, "the first step has the pages of the capture"
        assert waited.count(True) == 1


def test_steps_beside_graphs_are_seen():
    """A step that the model itself runs, and a crop, come between steps of graphs."""
    ids = torch.randint(3, 90, (2, 40))

    def found(model, handle):
        cache = handle.new_cache(2, 64)
        given = {"past_key_values": cache, "use_cache": True}
        out = [model(ids[:, :12], **given).logits[:, -1:]]
        out += [handle.step(ids[:, at : at + 1], cache).clone() for at in (12, 13)]
        out.append(model(ids[:, 14:15], **given, output_hidden_states=True).logits)
        cache.crop(-3)
        out += [handle.step(ids[:, at : at + 1], cache).clone() for at in range(12, 30)]
        return torch.cat(out, 1).float()

    with patched(llama(), "breakable") as pair, torch.no_grad():
        got = found(pair.model, pair.handle)
        with attnops.patch(
            pair.twin, cache="paged", kernel="reference", decode=how("breakable")
        ) as own:
            assert relative(got, found(pair.twin, own)) < LIMIT


def test_more_tokens_over_a_cache():
    """As a second turn of a chat, or a prompt in chunks."""
    for make in (llama, gemma3):
        with patched(make(), "breakable") as pair:
            pair.same(2, 30, 6, prefill_chunk_size=9)
            plans = {name for name in pair.ran if name.endswith("plan")}
            assert {"fa2.plan", "decode.plan"} <= plans


@pytest.mark.parametrize("mode", ["auto", "piecewise"])
def test_later_chunks_have_no_plan(mode):
    """The model's own layers run them, and first chunks are captured as before."""
    more = {"compile_after": 0} if mode == "piecewise" else {}
    with patched(llama(), mode, **more) as pair, torch.no_grad():
        given = asked(3, return_dict_in_generate=True)
        ids, took = torch.randint(3, 90, (1, 140)), []
        for _ in range(5):
            cache = pair.handle.new_cache(1, 200)
            first = pair.model.generate(ids[:, :70], **given, past_key_values=cache)
            prompts = pair.decoder.prompts
            took.append(prompts.took)
            pair.model.generate(
                torch.cat([first.sequences, ids], 1)[:, :140], **given, past_key_values=cache
            )
            assert "needs a plan of the host" in prompts.why
            del cache, first
        assert not prompts.failures.lasting
        assert took[-1]


def test_code_that_nobody_plans_for_has_no_plan():
    """A model that the caller compiles would read a plan of other lengths."""
    with patched(llama(), "hf") as pair, torch.no_grad():
        cache = pair.handle.new_cache(1, 64)
        given = {"past_key_values": cache, "use_cache": True}
        ids = torch.randint(3, 90, (1, 9))
        pair.model(ids[:, :8], **given)
        with pytest.raises(Exception, match="plan=none"):
            torch.compile(pair.model, backend="eager", fullgraph=True)(ids[:, 8:], **given)


def test_comparisons_with_the_eager_model():
    with patched(llama(), "breakable", check_every=2) as pair:
        pair.same(*CALLS[0])
        pair.same(*CALLS[2])
        assert pair.handle.graphs.report().compared


def test_a_capture_by_hand_takes_another_kernel():
    """Nobody plans again before its replays."""
    kernel = kernels_of("paged_attention")["flashinfer"]
    assert not fits_a_graph(kernel)
    with replanned(64):
        assert fits_a_graph(kernel)
        assert not fits_a_graph(kernels_of("plan_paged_attention")["flashinfer"])


@contextmanager
def stepped(model, kernel, mode="breakable"):
    """A patched model, the step after a prompt of 12 tokens of two rows, and the tokens."""
    ids = torch.randint(3, 90, (2, 160), generator=torch.Generator().manual_seed(0))
    with patched(model, mode, kernel=kernel) as pair, torch.no_grad():
        cache = pair.handle.new_cache(2, 200)
        with attnops.use(prefer=("flashinfer", "reference")):
            pair.model(ids[:, :12], past_key_values=cache, use_cache=True)

        def step(at, rows=2):
            return pair.handle.step(ids[:rows, at : at + 1], cache).clone()

        yield pair, cache, step


class OnGpu(torch.Tensor):
    """It says so."""

    is_cuda = True


PLANNED, UNPLANNED = {"prefer": ("flashinfer", "reference")}, {"kernel": "reference"}


def test_policies_in_turn():
    """Graphs without plans count tokens, too, and change no version of a counter."""
    found = []
    for first in (PLANNED, UNPLANNED):
        with stepped(llama(), None) as (pair, _, step):
            out = []
            for at in range(12, 84):
                with attnops.use(**(UNPLANNED if at // 6 % 2 else first)):
                    out.append(step(at))
            assert bool(pair.ran["decode.run"]) == (first is PLANNED)
            found.append(torch.cat(out, 1).float())
    assert max(relative(*each) for each in zip(*(x.unbind(1) for x in found), strict=True)) < LIMIT


def test_steps_captured_by_hand(monkeypatch):
    """A step in a graph of the caller's has no plan, and its replays are seen."""
    with stepped(llama(), None) as (pair, cache, step), attnops.use(**PLANNED):
        given = {"past_key_values": cache, "use_cache": True}
        ids = torch.randint(3, 90, (2, 40))
        step(12)
        plans = pair.ran["decode.plan"]
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            patch.setattr(cache.state.pages, "seen", cache.state.pages.seen.as_subclass(OnGpu))
            pair.model(ids[:, :1], **given)
        assert pair.ran["decode.plan"] == plans
        made, make = [], StepPlans.make

        def spy(self, *args):
            made.append(args[-1])
            make(self, *args)

        monkeypatch.setattr(StepPlans, "make", spy)
        pages = cache.state.pages
        for _ in range(3):
            version = pages.seen._version
            step(13)
            with torch.autograd._unsafe_preserve_version_counter(pages.seen):
                pages.seen.add_(1)  # as a replay does
            assert pages.seen._version == version
        assert made == [[15] * 2, [17] * 2, [19] * 2]


@pytest.mark.parametrize("mode", MODES)
def test_a_prompt_of_one_token(mode):
    ids = torch.tensor([[5], [6]])
    given = asked(8, output_logits=True, return_dict_in_generate=True)
    with patched(llama(), mode) as pair:
        got, want = (
            torch.stack(model.generate(ids, **given).logits).float()
            for model in (pair.model, pair.twin)
        )
        assert relative(got, want) < LIMIT


@pytest.mark.parametrize("mode", ["breakable", "piecewise"])
def test_rows_that_the_step_before_did_not_have(mode):
    with stepped(llama(), "flashinfer", mode) as (_, _, step):
        step(12)
        step(13, rows=1)
        with pytest.raises(InvalidInput, match="rows that the step before did not have"):
            step(14)
        step(14, rows=1)


def test_a_full_cache():
    with patched(llama(), "breakable") as pair, torch.no_grad():
        cache, ids = pair.handle.new_cache(2, 14), torch.randint(3, 90, (2, 16))
        pair.model(ids[:, :12], past_key_values=cache, use_cache=True)
        for at in (12, 13):
            pair.handle.step(ids[:, at : at + 1], cache)
        with pytest.raises(InvalidInput, match="a cache that is full, want fewer than 14 tokens"):
            pair.handle.step(ids[:, :1], cache)


@pytest.mark.parametrize(("us", "taken"), [(0.0, True), (1e9, False)])
def test_a_kernel_that_nobody_asks_for(monkeypatch, us, taken):
    """It wins more time than its plans take, and is planned for where no host waits for it."""
    monkeypatch.setattr(model_pages, "mean_plan_us", lambda *_: us)
    only = attnops.use(allow=("flashinfer", "reference"))
    with only, stepped(llama(), None) as (pair, cache, step):
        assert (cache.state.pages.plans() is not None) == taken
        ids = torch.randint(3, 90, (2, 1))
        for _ in range(2):
            pair.model(ids, past_key_values=cache, use_cache=True)
        assert not pair.ran["decode.plan"]
        step(14)
        assert bool(pair.ran["decode.run"]) == taken


def test_the_time_of_plans():
    """Measured on the machine, and taken where a row begins a page."""
    planning = kernels_of("plan_paged_attention")["flashinfer"]
    target = Target.parse("h200", assume=())
    layers = paged_layers(32, 8, 128, 64, torch.bfloat16)
    decode = altered(step_of(layers, target, 8, 8, 512, 1), plan="host")
    one, all_rows = (mean_plan_us(planning, decode, rows) for rows in (1, 10**5))
    assert 1000 < all_rows < 2000
    assert one == pytest.approx(all_rows / 64)


def test_pages_need_no_collector():
    with stepped(llama(), "flashinfer") as (_, cache, step):
        step(12)
        made = ModelPages(cache.state.pages.sizes)
        assert made.plans() is not None
        gone = weakref.ref(made)
        gc.collect()
        gc.disable()
        try:
            del made
            assert gone() is None
        finally:
            gc.enable()


def test_plans_of_the_last_few_policies_are_kept(monkeypatch):
    """Graphs have theirs as long as they live."""
    monkeypatch.setattr(model_pages, "POLICIES", 2)
    others = ("reference", "sdpa", "triton", "xqa")
    policies = [{"prefer": ("flashinfer", *some)} for some in permutations(others, 2)][:4]
    found = []
    for kernel in ("flashinfer", "reference"):
        with stepped(llama(), kernel) as (pair, cache, step):
            pages, out = cache.state.pages, []
            for at in range(12, 60):
                with attnops.use(**policies[at // 2 % 4]):
                    out.append(step(at))
                assert sum(plans is not None for plans in pages.known_plans.values()) <= 2
            found.append(torch.cat(out, 1).float())
            if kernel == "flashinfer":
                assert pair.ran["decode.run"]
    assert max(relative(*each) for each in zip(*(x.unbind(1) for x in found), strict=True)) < LIMIT


@pytest.mark.parametrize("kernel", ["flashmla", "triton", None])
def test_other_kernels_need_no_plan(kernel):
    """One of latents alone is no kernel of keys and values."""
    assert not needs_plan(kernel)
    assert needs_plan("flashinfer")


def test_pages_of_a_new_cache_were_captured_by_nobody():
    with stepped(llama(), "flashinfer") as (pair, cache, _):
        pages = cache.state.pages
        pages.captured = True
        cache.state.give_back()
        assert pair.handle.new_cache(*pages.sizes[:2]).state.pages is pages and not pages.captured


def test_bytes_of_plans():
    with stepped(llama(), "flashinfer") as (pair, cache, _):
        pages = cache.state.pages
        [planner] = {id(each): each for each in pages.plans().planners}.values()
        bare = sum(pool.nbytes for pool in pages.pools) + pages._room
        assert pages.nbytes == bare + planner.workspace.nbytes
        seen, most = [], pages.nbytes
        for tokens in (4, 4, 3, 4, 5, 3):
            ids = torch.randint(3, 90, (2, tokens))
            pair.model(ids, past_key_values=cache, use_cache=True)
            seen.append(pages.plans()._longer[tokens, 2][0].workspace)
            assert pages.nbytes > most
        assert seen[0] is seen[1] is seen[3], "a size that comes again has its memory"
        assert seen[2] is not seen[5], "and the last two sizes alone"
        assert len(pages.plans()._longer) == 2
        owned = pages.stream._tensors
        assert sum(each is old for each in owned for old in seen) == 2


def test_explain_of_more_tokens():
    with stepped(llama(), "flashinfer") as (pair, cache, _):
        ids = torch.randint(3, 90, (2, 3))
        for tokens in (1, 3):
            told = str(attnops.explain(pair.model, ids[:, :tokens], past_key_values=cache))
            assert "plan=host" in told.partition("paged_attention on")[2], tokens


@pytest.mark.parametrize("mode", MODES)
def test_padding_longer_than_a_chunk(mode):
    """Such a call has no pages of ours, and is warned before it begins."""
    ids = torch.randint(3, 90, (2, 30))
    mask = torch.ones_like(ids)
    mask[0, :14] = 0
    asks = {"output_logits": True, "return_dict_in_generate": True}
    given = asked(4, **asks, prefill_chunk_size=9)
    with patched(llama(), mode) as pair:
        with pytest.warns(UserWarning, match="padding of a row is longer than a chunk"):
            got = pair.model.generate(ids, attention_mask=mask, **given).logits
        want = pair.twin.generate(ids, attention_mask=mask, **given).logits
        assert relative(torch.stack(got).float(), torch.stack(want).float()) < LIMIT
        cache = pair.handle.new_cache(2, 64)
        with pytest.raises(InvalidInput, match="padding of a row is longer than a chunk"):
            pair.model.generate(ids, attention_mask=mask, **given, past_key_values=cache)
        mask[0, 9:] = 1
        pair.model.generate(ids, attention_mask=mask, **given, past_key_values=cache)
