"""`attnops_flash`: attention for transformers' continuous batching (`generate_batch`) from 5.19 on.

These versions take an implementation for continuous batching only if its name holds "flash", and
hand its function what FlashAttention takes: the new queries of all requests in one row, and the
keys that each request sees, gathered one request after the other. From 5.24 on the layer itself
asks the cache for these keys; before, the function does. In a step of one token a request there
may be a table of blocks instead: then the function writes the new keys into the cache's pages and
reads them there.

Any other forward under this name is one of the name without the ending. Up to 5.23 it is an error:
there transformers leaves out the masks of continuous batching only for a name without a mask
function, and such a name loses the padding of other forwards.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from attnops.core.errors import InvalidInput, fail
from attnops.core.kernel import own_kernel
from attnops.hf.attention.blocks import _CACHE
from attnops.hf.attention.continuous import (
    PREFIX,
    check_step,
    continuous_function,
    rules_of,
    window_of,
)
from attnops.hf.attention.function import AttentionFunction
from attnops.ops import paged_attention, slot_mapping, write_kv
from attnops.ops.attention.varlen import varlen_attention

ENDING = "_flash"
FILLS = _CACHE is not None and "kwargs" in inspect.signature(_CACHE.update).parameters
"""Does transformers' cache fill the arguments of the attention function, as from 5.19 on?"""

MASKED = hasattr(masking_utils, "PagedAttentionCache")
"""May the name have a mask function? From 5.24 on transformers knows the steps of continuous
batching, which take no masks, by their cache."""

_KEPT = "_attnops_step"
_FILLED = {
    "cu_seq_lens_k": None,
    "max_length_k": 0,
    **dict.fromkeys(("read_index", "write_index", "block_table", "k_cache", "v_cache")),
}
"""What the cache fills in, and what stands there before."""


def name_for_batches(name: str) -> str:
    """The name under which `generate_batch` of this transformers runs the implementation `name`."""
    return name + ENDING if FILLS else PREFIX + name


def function_for_batches(
    ordinary: AttentionFunction,
    kernel: str | None,
    proven: bool = False,
) -> Callable[..., Any]:
    """A function for `AttentionInterface.register`, under `name_for_batches`.

    Args:
        ordinary: the function of the name without prefix or ending.
        kernel, proven: as of `attention_function`.
    """
    if not FILLS:
        return continuous_function(kernel, proven)
    return batched_function(ordinary, kernel, proven)


def batched_function(
    ordinary: AttentionFunction,
    kernel: str | None,
    proven: bool = False,
) -> AttentionFunction:
    """A function for a name with `ENDING`. Arguments: as of `function_for_batches`."""
    packed = own_kernel("varlen_attention", kernel)
    paged = own_kernel("paged_attention", kernel)

    def step(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        layer: dict[str, Any],
    ) -> Tensor:
        """`[1, T, Hq, Dv]`. layer: all other arguments."""
        seen = {name: layer.pop(name, default) for name, default in _FILLED.items()}
        cache = layer.pop("cache", None)
        starts_q, longest_q = layer.pop("cu_seq_lens_q", None), layer.pop("max_length_q", 0)
        check_step(module, attention_mask, layer, proven)
        number = module.layer_idx
        if cache is not None:
            given = {"key_states": key, "value_states": value, "layer_idx": number, "kwargs": seen}
            key, value = cache.update(**given)
        if isinstance(seen["cu_seq_lens_k"], dict):
            want = f"{type(module).__name__} to pass its arguments on to the cache's update()"
            fail(InvalidInput, "cu_seq_lens_k", "a tensor for each type of layer", want)
        queries, rules = rules_of(query, layer, window_of(module))
        tokens = queries, key[0].transpose(0, 1), value[0].transpose(0, 1)
        starts_q, starts_k = starts_q.to(torch.int32), seen["cu_seq_lens_k"].to(torch.int32)
        if seen["block_table"] is not None:
            pages = seen["k_cache"], seen["v_cache"], seen["block_table"]
            output: Tensor = _over_blocks(number, tokens, pages, (starts_q, starts_k), paged, rules)
            return output[None]
        rules |= {"max_seqlen_q": int(longest_q), "max_seqlen_k": int(seen["max_length_k"])}
        output = varlen_attention(*tokens, starts_q, starts_k, kernel=packed, **rules)
        return output[None]

    def attention(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **given: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of a step of continuous batching, or of any other forward.

        Args:
            query, key, value: `[1, Hq, T, D]`, `[1, Hkv, K, D]`, `[1, Hkv, K, Dv]`. K: the new
                tokens, where `block_table` or `cache` is given, else the keys that all requests
                see.
            attention_mask: None in a step.
            given: arguments of `attnops.hf.attention.function`, and those of a step:
                cu_seq_lens_q, cu_seq_lens_k int32 `[B + 1]`;
                max_length_q, max_length_k upper bounds in tokens;
                read_index, write_index lists, by which a step is known;
                block_table int32 `[B, M]`, negative past a request's end, with
                k_cache, v_cache `[P, page, Hkv, D]`;
                cache, of transformers before 5.24, which fills these.

        Returns:
            output `[1, T, Hq, Dv]`; None in place of attention weights.

        Raises:
            InvalidInput: an argument that would change the result and is not known here, a model
                that continuous batching cannot serve, or, with transformers before 5.24, another
                forward.
        """
        if given.get("write_index") is not None:
            return step(module, query, key, value, attention_mask, given), None
        if not MASKED:
            want = "a step of generate_batch(), or manager.stop() before other calls"
            got = f"a name that ends in {ENDING}, in another forward"
            fail(InvalidInput, "attn_implementation", got, want)
        return ordinary(module, query, key, value, attention_mask, **given)

    return attention


@dataclass(eq=False)
class _Step:
    """What the layers of one kind share in a step over blocks.

    It is kept on the cumulative lengths, which are a tensor of this step alone.

    slots: int64 `[B]`. lengths: int32 `[B]`. served: layers that have attended.
    """

    slots: Tensor
    lengths: Tensor
    served: set[int] = field(default_factory=set)


# Keys and values are overlapping views of one tensor, which the compiler would take apart by
# copies of all of it.
@torch.compiler.disable()  # type: ignore[untyped-decorator]
def _over_blocks(
    layer: int,
    new: tuple[Tensor, Tensor, Tensor],
    pages: tuple[Tensor, Tensor, Tensor],
    starts: tuple[Tensor, Tensor],
    kernel: str | None,
    rules: dict[str, Any],
) -> Tensor:
    """Attention of one token a request over the cache's pages, which get the new keys first."""
    queries, keys, values = new
    k_pages, v_pages, table = pages
    starts_q, starts_k = starts
    step: _Step | None = vars(starts_k).get(_KEPT)
    # The capture of a graph gets the tensors of the eager step before it: a layer that comes
    # again begins a step.
    if step is None or layer in step.served:
        step = _step(starts_k, table, k_pages.shape[1])
        setattr(starts_k, _KEPT, step)
    step.served.add(layer)
    requests = step.lengths.shape[0]  # tokens past these are padding
    write_kv(keys[:requests], values[:requests], k_pages, v_pages, step.slots)
    return paged_attention(
        queries,
        k_pages,
        v_pages,
        table,
        step.lengths,
        starts_q,
        max_seqlen_q=1,
        holes=False,
        kernel=kernel,
        **rules,
    )


def _step(starts_k: Tensor, table: Tensor, page_size: int) -> _Step:
    lengths = starts_k.diff()
    rows = torch.arange(lengths.shape[0], device=lengths.device)
    return _Step(slot_mapping(lengths - 1, rows, table, page_size=page_size), lengths)
