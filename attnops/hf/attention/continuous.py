"""`paged|attnops`: attention for transformers' continuous batching (`generate_batch`), which keeps
its own cache of pages.

That cache packs the requests of a step into one row. Its blocks are pages: new keys are written
into them, and attention reads them where they are (see `attnops.hf.attention.blocks`). Where a step
cannot do without copies, the cache's `update` writes the new keys and returns those that each
request sees, gathered one request after the other, as `attnops.varlen_attention` takes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnops.core.errors import InvalidInput, fail
from attnops.core.kernel import own_kernel
from attnops.hf.attention.blocks import Asked, blocks_of, pages_of
from attnops.hf.attention.request import check_others, flat_sinks, scaled
from attnops.hf.models.attention_modules import routed, usage_of
from attnops.ops import paged_attention, write_kv
from attnops.ops.attention.varlen import varlen_attention

# transformers' prefix of an implementation for continuous batching.
PREFIX = "paged|"
_ASKS = ("scaling", "dropout", "is_causal", "sliding_window", "softcap", "s_aux", "sinks")
"""What layers ask for, by the names of their arguments."""

# The last two say which tokens' logits are wanted, and what is done with them.
_KNOWN = (*_ASKS, "logits_indices", "logits_processor_args")

Continuous = Callable[..., tuple[Tensor, None]]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _keeps_what_it_is_given(cls: Any) -> bool:
    usage = usage_of(cls)
    return usage is None or not usage.edits_cached


def check_step(
    module: Any, attention_mask: Tensor | None, layer: dict[str, Any], proven: bool
) -> None:
    """Raise InvalidInput where a layer asks for what a step of continuous batching does not give.

    layer: the arguments of its call that are not the step's. proven: as of `attention_function`.
    """
    if attention_mask is not None:
        want = "None: continuous batching passes lengths"
        fail(InvalidInput, "attention_mask", list(attention_mask.shape), want)
    is_causal, dropout = layer.get("is_causal"), layer.get("dropout", 0.0)
    if is_causal is False or (dropout > 0.0 and module.training):
        want = "causal, and no dropout, in continuous batching"
        fail(InvalidInput, "is_causal, dropout", (is_causal, dropout), want)
    if (why := refusal(type(module), proven)) is not None:
        got = f"attnops in continuous batching, for {type(module).__name__}"
        fail(InvalidInput, "attn_implementation", got, why)
    check_others({name: given for name, given in layer.items() if name not in _KNOWN})


def refusal(cls: Any, proven: bool) -> str | None:
    """What is wanted in place of layers of this class; None where continuous batching serves
    them."""
    if (proven or routed(cls)) and _keeps_what_it_is_given(cls):
        return None
    known = "a model whose masks and cached keys transformers' own kernels know"
    return f"{known}; generate() for this one"


def window_of(module: Any, cache: Any = None) -> int:
    """The tokens that the cache keeps of each request for this layer; 0: all of them.

    cache: of transformers up to 5.17, which tells it.
    """
    if hasattr(cache, "sliding_windows"):
        kept: int = cache.sliding_windows[module.layer_idx]
        return kept if kept > 1 else 0
    # As transformers' `group_layers_by_attn_type` shares the layers out.
    config = module.config
    kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    if window is None or (kinds is not None and kinds[module.layer_idx] != "sliding_attention"):
        return 0
    return int(window)


def rules_of(query: Tensor, layer: dict[str, Any], ring: int) -> tuple[Tensor, dict[str, Any]]:
    """(queries `[T, Hq, D]`, the rules of a step as the ops take them).

    layer: as of `check_step`. ring: tokens that a query sees, its own included, where the layer
    does not say so; 0: all before it.
    """
    query, scale = scaled(query, layer.get("scaling"))
    window = layer.get("sliding_window") or ring
    return query[0].transpose(0, 1), {
        "scale": scale,
        "causal": True,
        "window": (window - 1 if window else -1, -1),
        "softcap": float(layer.get("softcap") or 0.0),
        "sinks": flat_sinks(layer.get("s_aux"), layer.get("sinks")),
    }


def continuous_function(kernel: str | None, proven: bool = False) -> Continuous:
    """A function for `AttentionInterface.register`, under a name with `PREFIX`. Arguments: as of
    `attention_function`."""
    packed, paged = own_kernel("varlen_attention", kernel), own_kernel("paged_attention", kernel)

    def attention(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        cache: Any = None,
        cu_seq_lens_q: Any = None,
        cu_seq_lens_k: Any = None,
        max_seqlen_q: int = 0,
        max_seqlen_k: int | dict[str, int] = 0,
        read_index: Any = None,
        write_index: Any = None,
        block_table: Tensor | None = None,
        **layer: Any,
    ) -> tuple[Tensor, None]:
        """Attention of a step of continuous batching.

        Args:
            query, key, value: `[1, Hq, T, D]`, `[1, Hkv, T, D]`, `[1, Hkv, T, Dv]`, the new tokens
                of all requests.
            cache: transformers' PagedAttentionCache. read_index, write_index: arguments of its
                `update`.
            block_table: int32 `[groups, B, M]`, in place of both in a step of one token a request;
                negative past a request's end.
            cu_seq_lens_q, cu_seq_lens_k: int32 `[B + 1]`; those of the keys by layer type where
                there are several.
            max_seqlen_q, max_seqlen_k: tokens of the longest request, as above.
            layer: arguments of `attnops.hf.attention.function`.

        Returns:
            output `[1, T, Hq, Dv]`; None in place of attention weights.

        Raises:
            InvalidInput: there is no such cache, or an argument that would change the result and is
                not known here.
        """
        if any(given is None for given in (cache, cu_seq_lens_q, cu_seq_lens_k)):
            want = 'the arguments of generate_batch(). Use "attnops" for an ordinary forward'
            fail(InvalidInput, "cache, cu_seq_lens_q, cu_seq_lens_k", None, want)
        check_step(module, attention_mask, layer, proven)
        _check_cache(cache)
        number, ring = module.layer_idx, window_of(module, cache)
        kind = "sliding_attention" if ring else "full_attention"
        starts_k: Any
        starts_k, longest_k = (
            x[kind] if isinstance(x, dict) else x for x in (cu_seq_lens_k, max_seqlen_k)
        )
        tokens, rules = rules_of(query, layer, ring)
        rules["max_seqlen_q"] = longest_q = int(max_seqlen_q)
        starts_q = cu_seq_lens_q.to(torch.int32)
        asked = Asked(
            read_index,
            write_index,
            cu_seq_lens_q,
            starts_k,
            longest_q,
            int(longest_k),
            ring,
            block_table,
        )
        fits = not ring or rules["window"][0] == ring - 1
        blocks = blocks_of(cache, number, key, value, asked) if fits else None
        if blocks is not None:
            keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
            pages = pages_of(cache, number)
            write_kv(keys, values, *pages, blocks.slots)
            if blocks.pages is not None:
                if ring:
                    rules["window"] = (-1, -1)
                table, lengths = blocks.pages
                return paged_attention(
                    tokens, *pages, table, lengths, starts_q, holes=False, kernel=paged, **rules
                )[None], None
        elif block_table is not None:
            want = (
                "None in a compiled step, or for a cache of another layout: pass "
                "max_blocks_per_request=0 to batching_config"
            )
            fail(InvalidInput, "block_table", list(block_table.shape), want)
        else:
            keys, values = cache.update(
                key_states=key,
                value_states=value,
                layer_idx=number,
                read_index=read_index,
                write_index=write_index,
            )
        starts_k = starts_k.to(torch.int32)
        output = varlen_attention(
            tokens,
            keys,
            values,
            starts_q,
            starts_k,
            max_seqlen_k=int(longest_k),
            kernel=packed,
            **rules,
        )
        return output[None], None

    return attention


def _check_cache(cache: Any) -> None:
    if not (hasattr(cache, "sliding_windows") or hasattr(cache, "layer_to_allocator")):
        known = "`sliding_windows` (up to 5.17) or `layer_to_allocator` (5.18)"
        want = f"transformers' PagedAttentionCache, with {known}"
        fail(InvalidInput, "cache", type(cache).__name__, want)
