"""MLA models over pages of latents: eager's tokens and logits, one graph, nothing recompiled, nothing left behind, nothing silent."""

import copy
import functools
import gc
import io
import json
import threading
import warnings
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import CompileConfig, DynamicCache

import attnops
from attnops.errors import InvalidInput, NoGradient, PatchError, UnknownKernel
from attnops.hf import PagedLatentCache, latent, tiny
from attnops.hf import mask as masks
from tests.hf.helpers import LIMIT, Counter, generated, left_padded, logits, positions, relative, tokens
from tests.hf.test_robust import lora

FAMILIES = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "axk1", "minicpm3", "youtu", "mistral4", "longcat_flash", "kimi_linear")
STEPS = ((0, 14), (14, 15), (15, 16), (16, 18), (18, 19), (19, 20))


@functools.cache
def eager_tokens(name):
    return generated(tiny.model(name))


@functools.cache
def eager_logits(name):
    return logits(tiny.model(name), "dynamic", tokens(), left_padded())


@contextmanager
def counted():
    """Within the block: how often a patched layer attended in each form."""
    calls = {"absorbed": 0, "expanded": 0}
    absorbed, expands = latent.absorbed, latent.expands

    def attend(*args, **kwargs):
        calls["absorbed"] += 1
        return absorbed(*args, **kwargs)

    def decide(step):
        calls["expanded"] += expands(step)
        return expands(step)

    latent.absorbed, latent.expands = attend, decide
    try:
        yield calls
    finally:
        latent.absorbed, latent.expands = absorbed, expands


@torch.no_grad()
def by_hand(call, cache, ids, mask, steps=STEPS):
    """Logits of every position that is not padding, with this cache."""
    where, out = positions(mask), []
    for begin, end in steps:
        # Contiguous, as generate() makes them: a stride that happens to equal a length would be guarded.
        ids_now, mask_now, where_now = (x.contiguous() for x in (ids[:, begin:end], mask[:, :end], where[:, begin:end]))
        result = call(ids_now, attention_mask=mask_now, position_ids=where_now, past_key_values=cache, use_cache=True).logits
        assert torch.isfinite(result).all(), "padding rows too shall stay finite"
        out.append(result[mask[:, begin:end].bool()])
    return torch.cat(out)


# Numbers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens(name):
    model = tiny.model(name)
    with attnops.patch(model, cache="paged") as handle, counted() as calls:
        assert torch.equal(generated(model), eager_tokens(name))
        layers = len(handle.report().patched)
        assert calls == {"absorbed": 13 * layers, "expanded": layers}
        assert torch.equal(generated(model), eager_tokens(name)), "with the pages of the call before"


@pytest.mark.parametrize("name", FAMILIES)
def test_logits(name):
    """Prefill, single tokens and two tokens at once; in pages, then in transformers' own cache, of a model that is patched for pages."""
    model = tiny.model(name)
    with attnops.patch(model, cache="paged") as handle:
        assert relative(by_hand(model, handle.new_cache(3, 20), tokens(), left_padded()), eager_logits(name)) < LIMIT
        with counted() as calls:
            assert relative(logits(model, "dynamic", tokens(), left_padded()), eager_logits(name)) < LIMIT
        assert calls == {"absorbed": 0, "expanded": 0}


@pytest.mark.parametrize("steps", [((0, 1), (1, 20)), ((0, 2), (2, 9), (9, 20)), ((0, 20),)])
def test_absorbed_and_expanded_agree(steps):
    """However the text is cut: a first step of one token, one that is padding for some rows, a long one over a filled cache."""
    model, ids, mask = tiny.model("deepseek_v3"), tokens(), left_padded()
    want = logits(model, None, ids, mask, steps=((0, 20),))
    with attnops.patch(model, cache="paged") as handle:
        assert relative(torch.cat([by_hand(model, handle.new_cache(3, 20), ids, mask, steps)]), sorted_as(want, mask, steps)) < LIMIT


def sorted_as(whole, mask, steps):
    """Rows of logits of one forward in the order in which several steps give them."""
    order = torch.full(mask.shape, -1)
    order[mask.bool()] = torch.arange(len(whole))
    return whole[torch.cat([order[:, a:b][mask[:, a:b].bool()] for a, b in steps])]


def test_pages_of_others_do_not_matter():
    """Whatever lies in pages of rows the batch has not, or past a row's end: here NaN."""
    model = tiny.model("deepseek_v3")
    with attnops.patch(model, cache="paged") as handle:
        cache = handle.new_cache(5, 40, page_size=4)
        for pages in cache.state.pages.latent_pages:
            pages.fill_(float("nan"))
        assert torch.equal(generated(model, past_key_values=cache), eager_tokens("deepseek_v3"))
        for pages in cache.state.pages.latent_pages:
            lengths = (cache.get_seq_length() - cache.state.pages.pad[:3]).tolist()
            stored = torch.isfinite(pages).all(-1).sum()
            assert stored == sum(lengths), "padding is not stored"


def test_a_request_without_any_token():
    model, ids, mask = tiny.model("deepseek_v3"), tokens(), left_padded()
    mask[2] = 0
    want = logits(model, "dynamic", ids, mask, steps=STEPS[:3])
    with attnops.patch(model, cache="paged") as handle:
        assert relative(by_hand(model, handle.new_cache(3, 20), ids, mask, STEPS[:3]), want) < LIMIT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """Of a model without experts, which rounding would swap."""
    model = tiny.model("minicpm3").to(dtype)
    want = logits(model, "dynamic", tokens(), left_padded()).float()
    with attnops.patch(model, cache="paged") as handle:
        cache = handle.new_cache(3, 20)
        assert cache.pages_of(0).dtype == dtype
        assert relative(by_hand(model, cache, tokens(), left_padded()).float(), want) < 0.1


def test_autocast():
    model = tiny.model("minicpm3")
    with torch.autocast("cpu", torch.bfloat16), attnops.patch(model, cache="paged") as handle:
        ours = by_hand(model, handle.new_cache(3, 20), tokens(), left_padded())
    assert relative(ours.float(), eager_logits("minicpm3")) < 0.1


# Ways to generate -----------------------------------------------------------------------------------------------------

WAYS: list[dict[str, Any]] = [
    {"prefill_chunk_size": 4},
    {"num_return_sequences": 2, "do_sample": True, "max_new_tokens": 5},
    {"repetition_penalty": 1.3},
    {"prompt_lookup_num_tokens": 3, "rows": 1},
    {"use_cache": False},
    {"cache_implementation": "static"},
]


@pytest.mark.parametrize("options", WAYS, ids=lambda options: next(iter(options)))
def test_ways_to_generate(options):
    options = dict(options)
    rows = options.pop("rows", 3)
    model = tiny.model("deepseek_v3")

    def run():
        torch.manual_seed(0)
        more = {"max_new_tokens": 8, "do_sample": False, "attention_mask": left_padded(rows)[:, :14], **options}
        return model.generate(tokens(rows)[:, :14], **more)

    want = run()
    with attnops.patch(model, cache="paged"), counted() as calls:
        assert torch.equal(run(), want)
    assert bool(calls["absorbed"]) == ("use_cache" not in options and "cache_implementation" not in options)


def test_assisted_generation():
    """The drafts that are rejected are taken back. The helper, patched too, keeps transformers' cache."""
    model, helper = tiny.model("deepseek_v3"), tiny.model("deepseek_v3", seed=1)
    one: dict[str, Any] = {"attention_mask": left_padded()[:1, :14], "max_new_tokens": 8, "do_sample": False}
    want = model.generate(tokens()[:1, :14], **one)
    with attnops.patch(model, cache="paged"), attnops.patch(helper, cache="paged"), counted() as calls:
        assert torch.equal(model.generate(tokens()[:1, :14], assistant_model=helper, **one), want)
    assert calls["absorbed"]


def test_beam_search_keeps_transformers_cache():
    model = tiny.model("deepseek_v3")
    want = generated(model, new=6, num_beams=2)
    with attnops.patch(model, cache="paged") as handle, counted() as calls:
        with pytest.warns(UserWarning, match="beam search"):
            assert torch.equal(generated(model, new=6, num_beams=2), want)
        assert not calls["absorbed"]
        with pytest.raises(InvalidInput, match="num_beams"):
            generated(model, new=6, num_beams=2, past_key_values=handle.new_cache(6, 40))


def test_turns():
    """A second turn over the same cache, with the whole text given again; then the cache is emptied and used for another batch."""
    model, options = tiny.model("deepseek_v3"), {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    mask = left_padded()[:, :14]
    first = model.generate(tokens()[:, :14], attention_mask=mask, **options)
    text = torch.cat([first, tokens(3, 4, seed=7)], 1)
    longer = torch.cat([mask, mask.new_ones(3, 9)], 1)
    second = model.generate(text, attention_mask=longer, **options)
    with attnops.patch(model, cache="paged") as handle:
        cache = handle.new_cache(4, 40)
        assert torch.equal(model.generate(tokens()[:, :14], attention_mask=mask, past_key_values=cache, **options), first)
        with counted() as calls:
            assert torch.equal(model.generate(text, attention_mask=longer, past_key_values=cache, **options), second)
        assert not calls["expanded"], "the cache was not empty"
        cache.reset()
        assert int(cache.get_seq_length()) == 0
        assert torch.equal(generated(model, past_key_values=cache), eager_tokens("deepseek_v3"))


def test_another_batch_after_a_reset():
    """The states of linear attention have the shape of a batch."""
    model = tiny.model("kimi_linear")
    with attnops.patch(model, cache="paged") as handle:
        cache = handle.new_cache(4, 40)
        by_hand(model, cache, tokens(1), left_padded(1), STEPS[:2])
        cache.reset()
        assert torch.equal(generated(model, past_key_values=cache), eager_tokens("kimi_linear"))


def test_rollback():
    model, ids, mask = tiny.model("deepseek_v3"), tokens(), left_padded()
    with attnops.patch(model, cache="paged") as handle:
        cache = handle.new_cache(3, 20)
        by_hand(model, cache, tokens(seed=9), mask, ((0, 3),))
        cache.crop(-3)
        by_hand(model, cache, ids, mask, ((0, 14),))
        by_hand(model, cache, tokens(seed=9), mask, ((14, 18),))
        cache.crop(torch.tensor(-3))
        by_hand(model, cache, tokens(seed=8), mask, ((15, 18),))
        cache.crop(14)
        assert int(cache.get_seq_length()) == 14
        ours = by_hand(model, cache, ids, mask, STEPS[1:])
        assert relative(ours, eager_logits("deepseek_v3")[-len(ours) :]) < LIMIT


def test_a_cache_that_is_handed_out_stays_whole():
    """What generate() returns belongs to the caller: the next call takes other pages."""
    model = tiny.model("deepseek_v3")
    with attnops.patch(model, cache="paged"):
        result = generated(model, return_dict_in_generate=True)
        cache = result.past_key_values
        assert isinstance(cache, PagedLatentCache)
        before = cache.pages_of(0).clone()
        again = generated(model, return_dict_in_generate=True).past_key_values
        assert again.pages_of(0).data_ptr() != cache.pages_of(0).data_ptr() and torch.equal(cache.pages_of(0), before)
        freed = again.pages_of(0).data_ptr()
        del again
        gc.collect()
        assert generated(model, return_dict_in_generate=True).past_key_values.pages_of(0).data_ptr() == freed


def test_a_cache_that_is_kept_in_secret_is_an_error():
    model, kept = tiny.model("deepseek_v3"), []

    def keep(module, args, kwargs):
        kept.append(kwargs["past_key_values"])

    model.register_forward_pre_hook(keep, with_kwargs=True)
    with attnops.patch(model, cache="paged"):
        generated(model, new=2)
        with pytest.raises(InvalidInput, match="has ended"):
            generated(model, new=2, past_key_values=kept[0])


def test_threads():
    model = tiny.model("deepseek_v3")
    got: list[Any] = [None, None]

    def work(i):
        got[i] = [generated(model) for _ in range(3)]

    with attnops.patch(model, cache="paged"):
        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(torch.equal(one, eager_tokens("deepseek_v3")) for some in got for one in some)


# Compiled -------------------------------------------------------------------------------------------------------------


def in_generate(model, batch, counter, **more):
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "attention_mask": left_padded(batch, 9, (0, 3, 1)), **more}
    if counter is not None:
        how: Any = CompileConfig(fullgraph=True, backend=counter)
        how.mode, how._compile_all_devices = None, True
        options["compile_config"] = how
    return model.generate(tokens(batch, 9), **options)


def test_generate_does_not_recompile():
    model = tiny.model("deepseek_v3")
    want = {batch: in_generate(model, batch, None) for batch in (1, 2, 3)}
    counter = Counter()
    with attnops.patch(model, cache="paged") as handle:
        for batch in (3, 2, 1):
            assert torch.equal(in_generate(model, batch, counter), want[batch])
        warm = len(counter)
        assert 0 < warm <= 3
        for batch in (3, 2, 3, 1, 3):
            assert torch.equal(in_generate(model, batch, counter), want[batch])
        assert len(counter) == warm
        assert torch.equal(in_generate(model, 3, counter, past_key_values=handle.new_cache(3, 14)), want[3])
        assert len(counter) == warm, "another cache of the same size"
    for graph in counter.graphs:
        called = [str(node.target) for node in graph.graph.nodes]
        layers = sum("mla_attention" in target for target in called)
        assert layers == len(handle.report().patched) and sum("write_latent" in target for target in called) == layers
        assert sum("slot_mapping" in target for target in called) == 1, "metadata are made once a step"


def test_a_loop_by_hand_does_not_recompile():
    """The whole model compiled, 2-D masks and prefill included."""
    model, steps = tiny.model("minicpm3"), ((0, 9), (9, 10), (10, 11))
    masks = {batch: left_padded(batch, 11, (3, 5, 0)) for batch in (2, 3)}
    want = {batch: logits(model, "dynamic", tokens(batch, 11), mask, steps) for batch, mask in masks.items()}
    counter, graphs = Counter(), []
    with attnops.patch(model, cache="paged") as handle:
        compiled = torch.compile(model, fullgraph=True, backend=counter)
        cache = handle.new_cache(3, 16)
        for batch in (3, 2, 3, 2):
            cache.reset()
            assert relative(by_hand(compiled, cache, tokens(batch, 11), masks[batch], steps), want[batch]) < LIMIT
            graphs.append(len(counter))
        assert graphs[0] > 0 and graphs[1] == graphs[3], "no more once it has seen two batch sizes"
        # Where the host cannot look the device asserts: nothing wrong comes back.
        ids, mask = tokens(2, 18), torch.cat([masks[2], masks[2].new_ones(2, 7)], 1)
        holed = mask.clone()
        holed[0, 6] = 0
        for wrong, wrongly in ((holed, ((11, 12),)), (torch.ones_like(mask), ((11, 12),)), (mask, tuple((i, i + 1) for i in range(11, 18)))):
            cache.reset()
            by_hand(compiled, cache, ids, mask, steps)
            with pytest.raises(RuntimeError, match="pages cannot follow"):
                by_hand(compiled, cache, ids, wrong, wrongly)


# What pages cannot hold -----------------------------------------------------------------------------------------------


def holes(mask):
    mask[0, 6] = 0


def right(mask):
    mask[0, 13] = 0


@pytest.mark.parametrize("spoil", [holes, right])
@pytest.mark.parametrize("mode", ["auto", "dense", "compact"])
def test_masks_that_are_no_left_padding(spoil, mode):
    model, mask = tiny.model("deepseek_v3"), left_padded()[:, :14]
    spoil(mask)
    want = logits(model, "dynamic", tokens(), mask, steps=((0, 14),))
    with attnops.patch(model, cache="paged", mask=mode) as handle:
        with pytest.raises(InvalidInput, match="attention_mask"):
            generated(model, attention_mask=mask)
        with pytest.raises(InvalidInput, match="attention_mask"):
            by_hand(model, handle.new_cache(3, 14), tokens(), mask, ((0, 14),))
        assert relative(logits(model, "dynamic", tokens(), mask, steps=((0, 14),)), want) < LIMIT, "with transformers' cache"


def test_masks_that_change():
    model, ids, mask = tiny.model("deepseek_v3"), tokens(), left_padded()
    with attnops.patch(model, cache="paged") as handle, torch.no_grad():
        cache = handle.new_cache(3, 20)
        by_hand(model, cache, ids, mask, ((0, 14),))
        with pytest.raises(InvalidInput, match="another padding"):
            model(ids[:, 14:15], attention_mask=torch.ones_like(mask[:, :15]), past_key_values=cache)
        with pytest.raises(InvalidInput, match="another padding"):
            model(ids[:, 14:15], past_key_values=cache)
        with pytest.raises(InvalidInput, match="too few columns"):
            model(ids[:, 14:15], attention_mask=mask[:, :14], past_key_values=cache)
        cache.reset()
        model(ids[:, :14], past_key_values=cache)
        model(ids[:, 14:15], past_key_values=cache)


def test_where_the_host_must_not_wait(monkeypatch):
    """As on CUDA: in generate() the prompt's mask is looked at, elsewhere the device asserts at one-token steps."""
    monkeypatch.setattr(masks, "_FAR", ("cpu",))
    model, ids, mask = tiny.model("deepseek_v3"), tokens(), left_padded()
    with attnops.patch(model, cache="paged") as handle:
        assert torch.equal(generated(model), eager_tokens("deepseek_v3"))
        spoilt = mask[:, :14].clone()
        holes(spoilt)
        with pytest.raises(InvalidInput, match="holes"):
            generated(model, attention_mask=spoilt)
        cache = handle.new_cache(3, 16)
        by_hand(model, cache, ids, mask, STEPS[:3])
        with pytest.raises(RuntimeError, match="cache that is full"):
            by_hand(model, cache, ids, mask, ((16, 17),))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_masks_of_the_users_own(dtype):
    model, see = tiny.model("deepseek_v3"), torch.ones(3, 1, 9, 9, dtype=torch.bool).tril()
    given = see if dtype == torch.bool else torch.where(see, 0.0, -1e9)
    with attnops.patch(model, cache="paged") as handle, torch.no_grad(), pytest.raises(InvalidInput, match=r"attention_mask.*2-D"):
        model(tokens()[:, :9], attention_mask=given, past_key_values=handle.new_cache(3, 9))


def test_room():
    model = tiny.model("deepseek_v3")
    with attnops.patch(model, cache="paged") as handle:
        with pytest.raises(InvalidInput, match="rows"):
            generated(model, past_key_values=handle.new_cache(2, 40))
        with pytest.raises(InvalidInput, match="length"):
            generated(model, past_key_values=handle.new_cache(3, 20))
        with pytest.raises(InvalidInput, match="at most 16 positions"):
            by_hand(model, handle.new_cache(3, 16), tokens(), left_padded())
        with pytest.raises(InvalidInput, match="at most 2"):
            by_hand(model, handle.new_cache(2, 20), tokens(), left_padded())
        with pytest.raises(InvalidInput):
            handle.new_cache(0, 20)


def test_training():
    """Gradients and dropout need transformers' cache, or none. With pages they are an error."""
    model, ids = tiny.model("deepseek_v3", attention_dropout=0.3), tokens(3, 9)
    with attnops.patch(model, cache="paged") as handle:
        model.train()
        model(ids, labels=ids, use_cache=False).loss.backward()
        with pytest.raises(InvalidInput, match="dropout"):
            model(ids, past_key_values=handle.new_cache(3, 9))
        model.eval()
        with pytest.raises(NoGradient):
            model(ids, past_key_values=handle.new_cache(3, 9))


@pytest.mark.parametrize("rows", [1, 3])
def test_a_consumer_that_does_not_know_pages_fails(rows):
    """Be it the mask function or the layer: never with numbers."""
    model = tiny.model("deepseek_v3")
    handle = attnops.patch(model, cache="paged")
    cache = handle.new_cache(rows, 20)
    handle.unpatch()
    with pytest.raises((RuntimeError, ValueError)), torch.no_grad():
        model(tokens(rows), past_key_values=cache)
    with pytest.raises(PatchError, match="not patched"):
        handle.new_cache(3, 20)


# Which models ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma3", "llava"])
def test_models_without_latents(name):
    model = tiny.model(name)
    with pytest.raises(PatchError, match=r"Multi-head Latent Attention.*\n.*self_attn \("):
        attnops.patch(model, cache="paged")
    assert model.config._attn_implementation == "eager"


def test_indexed_models():
    with pytest.raises(PatchError, match="indices"):
        attnops.patch(tiny.model("deepseek_v32"), cache="paged")


def test_a_projection_that_does_more(monkeypatch):
    model = tiny.model("deepseek_v3")
    module = model.model.layers[1].self_attn
    own = type(module).expand_kv
    monkeypatch.setattr(type(module), "expand_kv", lambda self, c, k: tuple(2 * x for x in own(self, c, k)))
    with pytest.raises(PatchError, match=r"layers.0.self_attn.*does more"):
        attnops.patch(model, cache="paged")
    monkeypatch.undo()
    module.kv_b_proj.bias = torch.nn.Parameter(torch.ones(module.kv_b_proj.out_features))
    with pytest.raises(PatchError, match=r"layers.1.self_attn.*bias"):
        attnops.patch(model, cache="paged")
    assert "expand_kv" not in vars(module) and not module._forward_pre_hooks


def test_options():
    model = tiny.model("deepseek_v3")
    wrong: Any = "elsewhere"
    with pytest.raises(InvalidInput, match="cache"):
        attnops.patch(model, cache=wrong)
    with pytest.raises(UnknownKernel):
        attnops.patch(model, cache="paged", kernel="varlen")
    with attnops.patch(model, cache="paged", kernel="reference") as handle:
        assert attnops.patch(model, cache="paged", kernel="reference") is handle
        with pytest.raises(PatchError, match="unpatch"):
            attnops.patch(model)
        assert torch.equal(generated(model), eager_tokens("deepseek_v3"))
    with attnops.patch(model) as handle, pytest.raises(PatchError, match="without pages"):
        handle.new_cache(3, 20)


def test_report():
    model = tiny.model("kimi_linear")
    with attnops.patch(model, cache="paged") as handle:
        report = handle.report()
        assert len(report.patched) == 2 and len(report.skipped) == 2, "states of linear attention stay as they are"
        assert all("decode and every later token absorbed" in row.form for row in report.patched)
        assert json.loads(json.dumps(report.to_dict()))["cache"] == "paged"
        assert "patched: prefill into an empty cache" in str(report) and "cache=paged" in str(report)
    with attnops.patch(model) as handle:
        assert {row.form for row in handle.report().patched} == {"expanded in prefill and decode"}


def test_explain():
    model = tiny.model("minicpm3")
    with attnops.patch(model, cache="paged") as handle:
        cache = handle.new_cache(3, 20)
        prefill = attnops.explain(model, tokens(), past_key_values=cache, quiet=True)
        decode = attnops.explain(model, tokens()[:, :1], past_key_values=cache, target="sm90", quiet=True)
        assert {site.decision.problem.op for site in prefill.sites} >= {"attention", "write_latent"}
        assert {site.decision.problem.op for site in decode.sites} >= {"mla_attention", "write_latent"}
        assert int(cache.get_seq_length()) == 0, "nothing has run"


# Other people's changes to a model ------------------------------------------------------------------------------------


def everything(model):
    return {path: (set(vars(m)), len(m._forward_pre_hooks), len(m._forward_hooks)) for path, m in model.named_modules()}


@pytest.mark.parametrize("name", ["deepseek_v2", "kimi_linear"])
def test_unpatch_leaves_nothing(name):
    model = tiny.model(name)
    before, weights = everything(model), {k: v.clone() for k, v in model.state_dict().items()}
    want = generated(model, new=3)  # which makes transformers note something on the model
    before = everything(model)
    handle = attnops.patch(model, cache="paged")
    assert set(model.state_dict()) == set(weights)
    generated(model, new=3)
    handle.unpatch()
    handle.unpatch()
    assert everything(model) == before and model.config._attn_implementation == "eager"
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    assert torch.equal(generated(model, new=3), want)


def by_name(model):
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    return model.generate(input_ids=tokens()[:, :14], attention_mask=left_padded()[:, :14], **options)


@pytest.mark.parametrize("order", ["outside", "inside"])
def test_adapters(order):
    """LoRA on kv_b_proj: the absorbed weights are the adapted ones, and follow when the adapter is switched off."""
    want, plain = by_name(lora(tiny.model("deepseek_v3"))), by_name(tiny.model("deepseek_v3"))
    assert not torch.equal(want, plain)
    model = lora(tiny.model("deepseek_v3")) if order == "outside" else tiny.model("deepseek_v3")
    handle = attnops.patch(model, cache="paged")
    wrapped = model if order == "outside" else lora(model)
    with counted() as calls:
        assert torch.equal(by_name(wrapped), want)
        with wrapped.disable_adapter():
            assert torch.equal(by_name(wrapped), plain)
        assert torch.equal(by_name(wrapped), want)
    assert calls["absorbed"]
    handle.unpatch()
    assert torch.equal(by_name(wrapped), want)
    assert not any("_attnops" in name for m in wrapped.modules() for name in vars(m))


def test_a_shard_of_the_heads():
    """As tensor parallelism leaves a layer: half the heads in its weights, all of them in its config."""
    model = tiny.model("deepseek_v3")
    for layer in model.model.layers:
        attention = layer.self_attn
        for part, dim in (("q_b_proj", 0), ("kv_b_proj", 0), ("o_proj", 1)):
            linear = getattr(attention, part)
            linear.weight = torch.nn.Parameter(linear.weight.detach().chunk(2, dim)[0].contiguous())
    want = generated(model)
    with attnops.patch(model, cache="paged"), counted() as calls:
        assert torch.equal(generated(model), want)
    assert calls["absorbed"]


@pytest.mark.parametrize("order", ["before", "after"])
def test_offloading(order):
    accelerate = pytest.importorskip("accelerate", reason="the package accelerate (extra dev) is not installed")
    model = tiny.model("deepseek_v3")
    if order == "before":
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    handle = attnops.patch(model, cache="paged")
    if order == "after":
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.model.layers[0].self_attn.kv_b_proj.weight.device.type == "meta"
    with counted() as calls:
        assert torch.equal(generated(model), eager_tokens("deepseek_v3"))
    assert calls["absorbed"]
    accelerate.hooks.remove_hook_from_submodules(model)
    assert torch.equal(generated(model), eager_tokens("deepseek_v3"))
    handle.unpatch()
    assert torch.equal(generated(model), eager_tokens("deepseek_v3"))


def test_quantised_weights():
    quantization = pytest.importorskip("torchao.quantization", reason="the package torchao (extra dev) is not installed")
    model = tiny.model("deepseek_v3")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    want = generated(model)
    with attnops.patch(model, cache="paged"), counted() as calls:
        assert torch.equal(generated(model), want)
    assert calls["absorbed"]


def test_copies_and_pickles():
    model = tiny.model("deepseek_v3")
    handle = attnops.patch(model, cache="paged")
    generated(model, new=2)
    twin = copy.deepcopy(model)
    written = io.BytesIO()
    torch.save(model, written)
    written.seek(0)
    loaded = torch.load(written, weights_only=False)
    handle.unpatch()
    for other in (twin, loaded):
        attention = other.model.layers[0].self_attn
        assert attention.expand_kv.args == (attention,)
        with counted() as calls:
            assert torch.equal(generated(other), eager_tokens("deepseek_v3"))
        assert calls["absorbed"]
        attnops.patch(other, cache="paged").unpatch()
        assert "expand_kv" not in vars(attention) and not attention._forward_pre_hooks
        assert other.config._attn_implementation == "eager"
        assert torch.equal(generated(other), eager_tokens("deepseek_v3"))


def test_switched_to_another_implementation_while_patched():
    """Whoever takes the model elsewhere in between gets what it gives, with transformers' caches."""
    model = tiny.model("deepseek_v3")
    with attnops.patch(model, cache="paged") as handle:
        assert handle.verify(tokens(), attention_mask=left_padded()).passed
        model.set_attn_implementation("sdpa")
        with torch.no_grad():
            result = model(tokens(), attention_mask=left_padded(), past_key_values=DynamicCache(config=model.config)).logits
        assert torch.isfinite(result).all()


def test_a_bare_model():
    """Without generate() there is nothing to hook into: the cache is made by hand."""
    model = tiny.model("deepseek_v3")
    bare = model.model
    with torch.no_grad():
        want = bare(tokens(), attention_mask=left_padded()).last_hidden_state[left_padded().bool()]
        with attnops.patch(bare, cache="paged") as handle, warnings.catch_warnings():
            warnings.simplefilter("error")
            ours = bare(tokens(), attention_mask=left_padded(), past_key_values=handle.new_cache(3, 20)).last_hidden_state
    assert relative(ours[left_padded().bool()], want) < LIMIT
