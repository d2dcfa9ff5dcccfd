"""What holds of models over pages, whether the pages hold keys and values or latents."""

import gc
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import attnops
from attnops.core.errors import InvalidInput, NoGradient, PatchError
from attnops.hf import PagedKeyCache, PagedLatentCache, tiny
from attnops.hf.cache_names import cache_of, named
from tests.hf.helpers import (
    LIMIT,
    STEPS,
    allocated,
    by_hand,
    copies,
    counted,
    eager_logits,
    eager_tokens,
    generated,
    left_padded,
    logits,
    over_pages,
    poison,
    relative,
    tokens,
)
from tests.lowering.models import compiled_code, kernel_calls


@dataclass(frozen=True)
class Kind:
    """A model and what its pages hold.

    counts: counts calls of the layers. later, first: the names of its counts of calls over pages,
    and of those to a prompt's own tokens.
    """

    name: str
    cache: type
    counts: Callable[[], Any]
    later: str
    first: str


def keys(name: str) -> Kind:
    return Kind(name, PagedKeyCache, over_pages, "paged", "alone")


def latents(name: str = "deepseek_v3") -> Kind:
    return Kind(name, PagedLatentCache, counted, "absorbed", "expanded")


def kind_id(given: object) -> str | None:
    return given.name if isinstance(given, Kind) else None


def each(*kinds: Kind) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kind", kinds, ids=kind_id)


def both(name: str) -> pytest.MarkDecorator:
    return each(keys(name), latents())


def pages_of(cache: Any, layer: int = 0) -> tuple[torch.Tensor, ...]:
    """The pages of a layer: of keys and values, or of latents alone."""
    pages = cache.pages_of(layer)
    return pages if isinstance(pages, tuple) else (pages,)


# Numbers ------------------------------------------------------------------------------------------


@both("gpt_oss")
def test_what_is_stored(kind):
    """Padding is not. What is in pages of rows that the batch has not, here NaN, is not read."""
    model = tiny.model(kind.name)
    with attnops.patch(model, cache="paged") as handle:
        cache = handle.new_cache(5, 60, page_size=4)
        poison(cache)
        assert torch.equal(generated(model, **named(cache)), eager_tokens(kind.name))
        lengths = (cache.get_seq_length() - cache.state.pages.pad[:3]).tolist()
        for layer in range(2):
            for pages in pages_of(cache, layer):
                assert torch.isfinite(pages).flatten(2).all(-1).sum() == sum(lengths)


@both("mistral")
def test_a_request_without_any_token(kind):
    model, ids, mask = tiny.model(kind.name), tokens(), left_padded()
    mask[2] = 0
    want = logits(model, "dynamic", ids, mask, steps=STEPS[:3])
    with attnops.patch(model, cache="paged") as handle:
        cache = handle.new_cache(3, 60, page_size=4)
        poison(cache)
        assert relative(by_hand(model, cache, ids, mask, STEPS[:3]), want) < LIMIT


# Models without experts, which rounding would swap.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama", torch.bfloat16), ("minicpm3", torch.bfloat16), ("minicpm3", torch.float16)],
)
def test_half_precision(name, dtype):
    model = tiny.model(name).to(dtype)
    want = logits(model, "dynamic", tokens(), left_padded()).float()
    with attnops.patch(model, cache="paged") as handle:
        cache = handle.new_cache(3, 20)
        assert pages_of(cache)[0].dtype == dtype
        assert relative(by_hand(model, cache, tokens(), left_padded()).float(), want) < 0.1


@pytest.mark.parametrize("name", ["llama", "minicpm3"])
def test_autocast(name):
    model = tiny.model(name)
    with torch.autocast("cpu", torch.bfloat16), attnops.patch(model, cache="paged") as handle:
        ours = by_hand(model, handle.new_cache(3, 20), tokens(), left_padded())
    assert relative(ours.float(), eager_logits(name)) < 0.1


# Ways to generate ---------------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "chunks": {"prefill_chunk_size": 4},
    "long chunks": {"prefill_chunk_size": 40},
    "samples": {"num_return_sequences": 2, "do_sample": True, "max_new_tokens": 5},
    "penalty": {"repetition_penalty": 1.3},
    "lookup": {"prompt_lookup_num_tokens": 3, "rows": 1},
    "long lookup": {"prompt_lookup_num_tokens": 50, "rows": 1},
    "no cache": {"use_cache": False},
    "static": {"cache_implementation": "static"},
}
OF_KEYS_IN_FULL = ("long chunks", "samples", "long lookup", "no cache")
OF_LATENTS = ("chunks", "samples", "penalty", "lookup", "no cache", "static")


@pytest.mark.parametrize(
    ("kind", "way", "length"),
    [
        *((latents(), way, 14) for way in OF_LATENTS),
        *((keys("gpt_oss"), way, 60) for way in ("chunks", "lookup", "static")),
        *(pytest.param(keys("gpt_oss"), way, 60, marks=pytest.mark.full) for way in OF_KEYS_IN_FULL),
    ],
    ids=kind_id,
)
def test_ways_to_generate(kind, way, length, small_pages):
    options = dict(WAYS[way])
    rows = options.pop("rows", 3)
    model = tiny.model(kind.name)

    def run():
        torch.manual_seed(0)
        mask = left_padded(rows, length)
        more = {"max_new_tokens": 12, "do_sample": False, "attention_mask": mask, **options}
        return model.generate(tokens(rows, length), **more)

    want = run()
    with attnops.patch(model, cache="paged"), kind.counts() as calls:
        assert torch.equal(run(), want)
    assert bool(calls[kind.later]) == bool(small_pages) == (way not in ("no cache", "static"))
    assert all(pages.windows == ((8, 0) if length == 60 else (0,)) for pages in small_pages)


@both("mistral")
def test_assisted_generation(kind, small_pages):
    """Rejected drafts are taken back. The helper, patched too, keeps transformers' cache."""
    model, helper = tiny.model(kind.name), tiny.model(kind.name, seed=1)
    one = {"attention_mask": left_padded(1, 60), "max_new_tokens": 12, "do_sample": False}
    want = model.generate(tokens(1, 60), assistant_model=helper, **one)
    with (
        attnops.patch(model, cache="paged"),
        attnops.patch(helper, cache="paged"),
        kind.counts() as calls,
    ):
        assert torch.equal(model.generate(tokens(1, 60), assistant_model=helper, **one), want)
    assert calls[kind.later] and len(small_pages) == 1


@both("gemma2")
def test_beam_search_keeps_transformers_cache(kind):
    model = tiny.model(kind.name)
    want = generated(model, new=6, num_beams=2)
    with attnops.patch(model, cache="paged") as handle, kind.counts() as calls:
        with pytest.warns(UserWarning, match="beam search"):
            assert torch.equal(generated(model, new=6, num_beams=2), want)
        assert not any(calls.values())
        assert any("but in beam search, as an assistant" in note for note in handle.report().notes)
        with pytest.raises(InvalidInput, match="num_beams"):
            generated(model, new=6, num_beams=2, **named(handle.new_cache(6, 40)))


@both("gpt_oss")
def test_turns(kind):
    """A second turn over the same cache, with the whole text given again.

    Then the cache is emptied and used for another batch.
    """
    model = tiny.model(kind.name)
    options = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}
    mask = left_padded(3, 40)
    first = model.generate(tokens(3, 40), attention_mask=mask, **options)
    text = torch.cat([first, tokens(3, 4, seed=7)], 1)
    longer = torch.cat([mask, mask.new_ones(3, 24)], 1)
    second = model.generate(text, attention_mask=longer, **options)
    with attnops.patch(model, cache="paged") as handle:
        cache = handle.new_cache(4, 100, page_size=4)
        poison(cache)
        ours = model.generate(tokens(3, 40), attention_mask=mask, **named(cache), **options)
        assert torch.equal(ours, first)
        with kind.counts() as calls:
            ours = model.generate(text, attention_mask=longer, **named(cache), **options)
        assert torch.equal(ours, second)
        assert not calls[kind.first], "the cache was not empty"
        cache.reset()
        assert int(cache.get_seq_length()) == 0
        assert torch.equal(generated(model, **named(cache)), eager_tokens(kind.name))


@both("gemma2")
def test_a_step_that_ended_in_an_error(kind):
    """Half of the layers have its tokens: nothing goes on from there until they are taken back."""
    model, ids, mask = tiny.model(kind.name), tokens(), left_padded()

    def fails(*_):
        raise OSError

    with attnops.patch(model, cache="paged") as handle:
        cache = handle.new_cache(3, 60, page_size=4)
        with pytest.raises(NoGradient):
            model(ids, **named(cache))
        cache.crop(-20)
        by_hand(model, cache, ids, mask, ((0, 14),))
        hook = model.model.layers[0].mlp.register_forward_pre_hook(fails)
        with pytest.raises(OSError):
            by_hand(model, cache, ids, mask, ((14, 16),))
        hook.remove()
        longer = torch.cat([mask, mask.new_ones(3, 9)], 1)
        for begin in (16, 15):  # as it stands, and with one of the two positions taken back
            with pytest.raises(InvalidInput, match="did not reach every layer"):
                by_hand(model, cache, ids, longer, ((begin, begin + 1),))
            cache.crop(-1)
        ours = by_hand(model, cache, ids, mask, STEPS[1:])
    assert relative(ours, eager_logits(kind.name)[-len(ours) :]) < LIMIT


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "kimi_linear"])
def test_layers_of_other_kinds_keep_their_own_states(name):
    """Whose shape is that of a batch, so that a reset makes them anew."""
    model = tiny.model(name)
    with attnops.patch(model, cache="paged") as handle:
        over_pages = sum(bool(row.phases) for row in handle.report().rows)
        assert over_pages < model.config.num_hidden_layers
        cache = handle.new_cache(4, 40)
        by_hand(model, cache, tokens(1), left_padded(1), STEPS[:2])
        cache.reset()
        assert torch.equal(generated(model, **named(cache)), eager_tokens(name))


@both("mistral")
def test_a_cache_that_is_handed_out_stays_whole(kind):
    """What generate() returns belongs to the caller: the next call takes other pages."""
    model = tiny.model(kind.name)

    def handed_out():
        return cache_of(generated(model, return_dict_in_generate=True))

    with attnops.patch(model, cache="paged"):
        cache = handed_out()
        assert isinstance(cache, kind.cache)
        pages = pages_of(cache)[0]
        before, again = pages.clone(), handed_out()
        freed = pages_of(again)[0].data_ptr()
        assert freed != pages.data_ptr() and torch.equal(pages, before)
        del again
        gc.collect()
        assert pages_of(handed_out())[0].data_ptr() == freed


# Compiled -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "prompt", "page_size", "among", "kernels"),
    [
        ("minicpm3", 14, 8, "", ("reference",)),
        pytest.param("mistral", 60, 4, "paged", ("sdpa", "reference"), marks=pytest.mark.full),
    ],
)
def test_generated_code(name, prompt, page_size, among, kernels):
    """A layer's decode step names its kernel and allocates nothing as large as the pages.

    among: a word in the calls of kernels that are compared.
    """
    model = tiny.model(name, num_hidden_layers=1)
    ids, mask = tokens(2, prompt + 2), left_padded(2, prompt + 2)
    steps = ((0, prompt), (prompt, prompt + 1))
    want = logits(model, "dynamic", ids, mask, steps)[-2:]
    with attnops.patch(model, cache="paged") as handle:
        cache = handle.new_cache(3, 90, page_size=page_size)
        by_hand(model, cache, ids, mask, steps[:1])
        model.model.layers[0].self_attn.compile(fullgraph=True)
        ours, code = compiled_code(lambda: by_hand(model, cache, ids, mask, steps[1:]))
        pages = tuple(pages_of(cache)[0].shape)
    assert relative(ours, want) < LIMIT
    op = "mla_attention" if name == "minicpm3" else "paged_attention"
    called = [call for call in kernel_calls(code) if among in call]
    assert called in [[f"{op}.{kernel}"] for kernel in kernels]
    assert pages not in allocated(code)


# What pages cannot hold ---------------------------------------------------------------------------


@both("llama")
def test_training(kind):
    """Gradients and dropout need transformers' cache, or none. With pages they are an error."""
    model, ids = tiny.model(kind.name, attention_dropout=0.3), tokens(3, 9)
    with attnops.patch(model, cache="paged") as handle:
        model.train()
        model(ids, labels=ids, use_cache=False).loss.backward()
        cache = handle.new_cache(3, 9)
        assert model.training, "a look at what the layers keep leaves the mode as it was"
        with pytest.raises(InvalidInput, match="dropout"):
            model(ids, **named(cache))
        model.eval()
        with pytest.raises(NoGradient):
            model(ids, **named(handle.new_cache(3, 9)))


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("llama", 1),
        ("gpt_neox", 1),
        ("gpt_bigcode", 1),
        ("gemma2", 1),
        ("deepseek_v3", 1),
        ("deepseek_v3", 3),
    ],
)
def test_a_consumer_that_does_not_know_pages_fails(name, rows):
    """Be it the mask function or the layer: never with numbers."""
    model = tiny.model(name)
    handle = attnops.patch(model, cache="paged")
    cache = handle.new_cache(rows, 20)
    handle.unpatch()
    of_keys = (IndexError,) if name != "deepseek_v3" else ()
    with pytest.raises((RuntimeError, ValueError, *of_keys)), torch.no_grad():
        model(tokens(rows), **named(cache))
    with pytest.raises(PatchError, match="not patched"):
        handle.new_cache(3, 20)


# Other people's changes to a model ----------------------------------------------------------------

SHARDED = {
    "llama": {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1},
    "deepseek_v3": {"q_b_proj": 0, "kv_b_proj": 0, "o_proj": 1},
}


@both("llama")
def test_a_shard_of_the_heads(kind):
    """As tensor parallelism leaves a layer: half the heads in its weights, all in its config."""
    model = tiny.model(kind.name)
    for layer in model.model.layers:
        for part, dim in SHARDED[kind.name].items():
            linear = getattr(layer.self_attn, part)
            half = linear.weight.detach().chunk(2, dim)[0].contiguous()
            linear.weight = torch.nn.Parameter(half)
    want = generated(model)
    with attnops.patch(model, cache="paged") as handle, kind.counts() as calls:
        assert torch.equal(generated(model), want)
        if kind.cache is PagedKeyCache:
            assert handle.new_cache(1, 9).pages_of(0)[0].shape[2] == 1
    assert calls[kind.later]


@pytest.mark.parametrize(
    ("kind", "order"),
    [(keys("gpt_oss"), "before"), (latents(), "before"), (latents(), "after")],
    ids=kind_id,
)
def test_offloading(kind, order):
    why = "the package accelerate (extra dev) is not installed"
    accelerate = pytest.importorskip("accelerate", reason=why)
    model = tiny.model(kind.name)
    if order == "before":
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    handle = attnops.patch(model, cache="paged")
    if order == "after":
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.model.layers[0].self_attn.o_proj.weight.device.type == "meta"
    with kind.counts() as calls:
        assert torch.equal(generated(model), eager_tokens(kind.name))
    assert calls[kind.later]
    accelerate.hooks.remove_hook_from_submodules(model)
    assert torch.equal(generated(model), eager_tokens(kind.name))
    handle.unpatch()
    assert torch.equal(generated(model), eager_tokens(kind.name))


@both("mistral")
def test_copies_and_pickles(kind):
    model = tiny.model(kind.name)
    handle = attnops.patch(model, cache="paged")
    generated(model, new=2)
    others = copies(model)
    handle.unpatch()
    for other in others:
        attention = other.model.layers[0].self_attn
        if kind.cache is PagedLatentCache:
            assert attention.expand_kv.args == (attention,)
        with kind.counts() as calls:
            assert torch.equal(generated(other), eager_tokens(kind.name))
        assert calls[kind.later]
        attnops.patch(other, cache="paged").unpatch()
        assert "expand_kv" not in vars(attention) and not attention._forward_pre_hooks
        assert other.config._attn_implementation == "eager"
        assert torch.equal(generated(other), eager_tokens(kind.name))


@both("mistral")
def test_switched_to_another_implementation_while_patched(kind):
    """Whoever takes the model elsewhere meanwhile gets what it gives, with transformers' caches."""
    model = tiny.model(kind.name)
    with attnops.patch(model, cache="paged") as handle:
        assert handle.verify(tokens(), attention_mask=left_padded()).passed
        model.set_attn_implementation("sdpa")
        with torch.no_grad():
            stock = named(DynamicCache(config=model.config))
            result = model(tokens(), attention_mask=left_padded(), **stock).logits
        assert torch.isfinite(result).all()
        assert torch.equal(generated(model), eager_tokens(kind.name))
        with pytest.raises(InvalidInput, match="with attention 'sdpa'"):
            generated(model, **named(handle.new_cache(3, 40)))


@both("gemma2")
def test_a_bare_model(kind):
    """Without generate() there is nothing to hook into: the cache is made by hand."""
    bare, mask = tiny.model(kind.name).model, left_padded()
    with torch.no_grad():
        want = bare(tokens(), attention_mask=mask).last_hidden_state[mask.bool()]
        with attnops.patch(bare, cache="paged") as handle, warnings.catch_warnings():
            warnings.simplefilter("error")
            cache = handle.new_cache(3, 20)
            assert isinstance(cache, kind.cache)
            ours = bare(tokens(), attention_mask=mask, **named(cache)).last_hidden_state
    assert relative(ours[mask.bool()], want) < LIMIT
