"""`paged|attnops`: the tokens of transformers' own paged attention, in its continuous batching."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

if not hasattr(transformers, "ContinuousBatchingConfig"):
    pytest.skip("this transformers has no continuous batching", allow_module_level=True)

pytest.importorskip(
    "psutil",
    reason="without the package psutil transformers finds no memory for its pages on a CPU",
)

pytest.importorskip(
    "transformers.generation.continuous_batching.cache_manager",
    reason="from 5.18 on transformers shares blocks out in another way, and from 5.19 on it "
    "takes another name: see test_batches.py",
)

from transformers.generation.continuous_batching import PagedAttentionCache, cache as cache_module
from transformers.generation.continuous_batching.cache_manager import FullAttentionCacheAllocator

from attnops.core.errors import InvalidInput
from attnops.hf import batching_config, tiny
from attnops.hf.attention import blocks, continuous
from attnops.hf.attention.blocks import Asked
from attnops.hf.attention.continuous import continuous_function
from tests.hf.batches import (
    NEW,
    PADDED,
    PROMPTS,
    SIZES,
    batch,
    capture_steps,
    check_captured,
    settings,
    spied,
    spy_on_ops,
    stock,
)


def ours(name):
    """A model with our attention, and the tokens of its eager generate()."""
    model, want = stock(name)
    model.set_attn_implementation("paged|attnops")
    return model, want


@pytest.fixture
def calls(monkeypatch):
    """The calls of ops, of the cache's `update`, and the block tables of steps. Slots where nothing
    was written hold NaN."""
    found = {"update": [], "tables": [], **spy_on_ops(monkeypatch)}
    monkeypatch.setattr(
        PagedAttentionCache, "update", spied(found["update"], PagedAttentionCache.update)
    )
    real, made = PagedAttentionCache.__init__, blocks._made

    def poisoned(cache, *args, **kwargs):
        real(cache, *args, **kwargs)
        for pages in (*cache.key_cache, *cache.value_cache):
            pages[: cache.num_blocks * cache.block_size].fill_(float("nan"))

    def spy_made(cache, asked, group):
        found["tables"].append(asked.tables)
        return made(cache, asked, group)

    monkeypatch.setattr(PagedAttentionCache, "__init__", poisoned)
    monkeypatch.setattr(blocks, "_made", spy_made)
    return found


@pytest.mark.sweep(3)
@pytest.mark.parametrize("block_size", [8, 5])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gpt_oss"])
def test_tokens(name, block_size, calls):
    model, want = ours(name)
    layers = model.config.num_hidden_layers
    assert batch(model, settings(block_size=block_size)) == want
    paged, packed = calls["paged_attention"], calls["varlen_attention"]
    # Only the first step of all sees no key but its own.
    gathered = {"llama": 0, "qwen3": 0}.get(name, len(packed) - layers)
    assert len(calls["update"]) == gathered and len(packed) == gathered + layers
    assert any(call["max_seqlen_q"] == 1 for call in paged)
    assert all(call["max_seqlen_q"] > 1 for call in packed)
    assert {call["window"][0] for call in packed} == {"mistral": {7}, "gpt_oss": {-1, 7}}.get(
        name, {-1}
    )
    # A ring of pages holds its window and no more.
    assert {call["window"][0] for call in paged} == {-1}
    if name != "mistral":
        assert any(call["max_seqlen_q"] > 8 for call in paged)
    # One table a step and kind of layer.
    kinds = {"gpt_oss": 2}.get(name, 1)
    assert len(calls["tables"]) == kinds * (len(paged) + len(packed)) // layers


def test_requests_wait_and_share(monkeypatch):
    """The premises of `test_tokens`."""
    assert sum(map(len, PROMPTS)) + NEW * len(PROMPTS) > 192
    shared, real = [], PagedAttentionCache.search_prefix_match
    monkeypatch.setattr(
        PagedAttentionCache,
        "search_prefix_match",
        lambda *args: shared.append(real(*args)) or shared[-1],
    )
    batch(tiny.model("llama"), new=1)
    assert max(shared) >= 16


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_block_tables(name, calls):
    """With `batching_config`, most steps of a model without windows hand over block tables and no
    places."""
    model, want = ours(name)
    assert batch(model, batching_config(model, **SIZES)) == want
    by_table = sum(tables is not None for tables in calls["tables"])
    assert by_table > len(calls["tables"]) // 2 if name == "llama" else by_table == 0
    calls["tables"].clear()
    assert batch(model, batching_config(model, max_blocks_per_request=0, **SIZES)) == want
    assert all(tables is None for tables in calls["tables"])
    assert (
        type(batching_config(model, varlen_compile_config=transformers.CompileConfig()))
        is transformers.ContinuousBatchingConfig
    )


def test_block_tables_are_for_our_attention_alone(calls):
    """The attention is known when a batch begins, and not when its config is made."""
    model, want = ours("llama")
    how = batching_config(model, **SIZES)
    for name in ("paged|sdpa", "paged|attnops"):
        model.set_attn_implementation(name)
        assert batch(model, how) == want
    assert any(tables is not None for tables in calls["tables"])


def test_the_layers_of_a_text_model_inside_another_are_looked_at():
    config = SimpleNamespace(get_text_config=lambda: tiny.config("gemma3"))
    assert (
        type(batching_config(SimpleNamespace(config=config)))
        is transformers.ContinuousBatchingConfig
    )


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("name", "tables"), [("llama", False), ("llama", True), ("gemma3", False)])
def test_captured(name, tables, calls, monkeypatch):
    """Steps that transformers captures and replays, padded to few sizes."""
    model, want = ours(name)
    device = capture_steps(monkeypatch)
    how = batching_config(model, **SIZES, **PADDED) if tables else settings(**PADDED)
    assert batch(model, how) == want
    check_captured(device)
    assert bool(calls["update"]) == (name == "gemma3")
    assert any(given is not None for given in calls["tables"]) == tables


def test_a_capture_for_longer_requests_is_refused(monkeypatch):
    cu: Any = SimpleNamespace(is_cuda=True)
    asked = Asked([], [torch.arange(8)], cu, cu, 1, 1, 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    blocks._check_capture(asked)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    blocks._check_capture(asked._replace(longest_q=8))
    blocks._check_capture(asked._replace(tables=torch.zeros(1, 2, 1)))
    with pytest.raises(InvalidInput, match="use_cuda_graph"):
        blocks._check_capture(asked)


class Mirrored(FullAttentionCacheAllocator):
    """After its first token each block is filled from its end on."""

    def _mirror(self, places):
        return [place - place % self.block_size + -place % self.block_size for place in places]

    def get_read_indices(self, *args):
        return self._mirror(super().get_read_indices(*args))

    def get_write_indices(self, *args):
        return self._mirror(super().get_write_indices(*args))


@pytest.mark.parametrize("other", ["layout", "field", "kind", "dtype"])
def test_where_blocks_are_no_pages_the_keys_are_gathered(other, calls, monkeypatch):
    model, want = ours("llama")
    if other == "layout":
        monkeypatch.setattr(cache_module, "FullAttentionCacheAllocator", Mirrored)
    elif other == "field":
        monkeypatch.setattr(blocks.copy, "copy", lambda allocator: SimpleNamespace())
    elif other == "kind":
        monkeypatch.setattr(blocks, "_CACHE", None)
    else:
        real = blocks.blocks_of
        monkeypatch.setattr(
            continuous,
            "blocks_of",
            lambda cache, layer, key, *rest: real(cache, layer, key.double(), *rest),
        )
    assert batch(model) == want
    assert (
        len(calls["update"]) == len(calls["varlen_attention"]) > 20 and not calls["paged_attention"]
    )


@pytest.mark.parametrize(("window", "size"), [(8, 4), (8, 5), (7, 4), (4, 8), (9, 4), (8, 8)])
def test_the_pages_of_a_ring(window, size):
    """Against the allocator's own blocks, for requests that have filled their ring and for
    others."""
    many, generator = -(-window // size), torch.Generator().manual_seed(window * size)
    pasts = [
        1,
        2,
        3,
        window - 2,
        window - 1,
        window,
        window + 1,
        2 * window + 3,
        *torch.randint(1, 99, (8,), generator=generator).tolist(),
    ]
    order = torch.randperm(64, generator=generator).tolist()
    owned = [order[i * many : (i + 1) * many] for i in range(len(pasts))]
    read, write, starts, expected = [], [], [0], []
    for past, pages in zip(pasts, owned, strict=True):
        slots = [pages[p % window // size] * size + p % window % size for p in range(past + 1)]
        seen = slots[max(0, past - window + 1) :]
        read += [*seen[:-1], 64 * size + 1]
        write.append(seen[-1])
        starts.append(len(read))
        expected.append(sorted(seen))
    # Two requests and tokens of padding.
    cu, cu_q = (
        torch.tensor([*cu, cu[-1], cu[-1]], dtype=torch.int32)
        for cu in (starts, range(len(starts)))
    )
    asked = Asked(
        [torch.tensor(read)],
        [torch.tensor([*write, 65 * size, 65 * size])],
        cu_q,
        cu,
        1,
        window,
        window,
    )
    expected += [[], []]
    made = blocks._made(SimpleNamespace(block_size=size, num_blocks=64), asked, 0)
    assert made is not None and made.slots.tolist() == [*write, -1, -1]
    table, lengths = made.pages
    assert table.dtype == lengths.dtype == torch.int32
    for pages, length, seen in zip(table.tolist(), lengths.tolist(), expected, strict=True):
        assert sorted(pages[i // size] * size + i % size for i in range(length)) == seen
    assert (
        blocks._made(
            SimpleNamespace(block_size=size, num_blocks=64), asked._replace(longest_q=2), 0
        )
        is None
    )


def test_what_is_no_step_of_continuous_batching():
    model, call = tiny.model("llama"), continuous_function(None)
    module = model.model.layers[0].self_attn
    query, key, cu = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 3, 16), torch.tensor([0, 3])
    given = {"cache": object(), "cu_seq_lens_q": cu, "cu_seq_lens_k": cu}
    for more, text in (
        ({"cache": None}, "generate_batch"),
        ({}, "sliding_windows"),
        ({"attention_mask": torch.zeros(1, 1, 3, 3)}, "attention_mask"),
        (
            {"block_table": torch.zeros(1, 1, 1), "cache": SimpleNamespace(sliding_windows={0: 1})},
            "block_table",
        ),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"is_causal": False}, "causal"),
    ):
        with pytest.raises(InvalidInput, match=text):
            call(module, query, key, key, **given | more)


def test_layers_that_change_cached_keys_are_refused_by_name():
    """The cache of continuous batching would be handed keys that it has no room for."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Attention
    from transformers.models.jetmoe.modeling_jetmoe import JetMoeAttention

    x, cu = torch.zeros(1, 2, 3, 4), torch.tensor([0, 3], dtype=torch.int32)
    for cls in (JetMoeAttention, DeepseekV4Attention):
        with pytest.raises(InvalidInput, match=cls.__name__):
            continuous_function(None)(
                cls.__new__(cls), x, x, x, cache=object(), cu_seq_lens_q=cu, cu_seq_lens_k=cu
            )
