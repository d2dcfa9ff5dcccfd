"""`paged|attnops`: attention for transformers' continuous batching (`generate_batch`), which keeps its own cache of pages.

That cache packs the requests of a step into one row. Its `update` writes the new keys and values, and returns those that each request
sees, gathered one request after the other, as `attnops.varlen_attention` takes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnops.errors import InvalidInput, fail
from attnops.hf.attention.function import check_others
from attnops.hf.matching.match import routed, usage_of
from attnops.kernel import own_kernel
from attnops.ops.varlen import varlen_attention

# transformers' prefix of an implementation for continuous batching.
PREFIX = "paged|"
# Of the step as a whole, or of which tokens' logits are wanted.
_OF_THE_STEP = ("logits_indices", "logits_processor_args")

Continuous = Callable[..., tuple[Tensor, None]]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _keeps_what_it_is_given(cls: Any) -> bool:
    usage = usage_of(cls)
    return usage is None or not usage.edits_cached


def continuous_function(kernel: str | None, proven: bool = False) -> Continuous:
    """A function for `AttentionInterface.register`, under a name with `PREFIX`. Arguments: as of `attention_function`."""
    forced = own_kernel("varlen_attention", kernel)

    def attention(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        scaling: float | Tensor | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        sinks: Tensor | None = None,
        cache: Any = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | dict[str, Tensor] | None = None,
        max_seqlen_q: int = 0,
        max_seqlen_k: int | dict[str, int] = 0,
        read_index: Any = None,
        write_index: Any = None,
        block_table: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Attention of a step of continuous batching. Arguments that are not listed are those of `attnops.hf.attention.function`.

        Args:
            query, key, value: `[1, Hq, T, D]`, `[1, Hkv, T, D]`, `[1, Hkv, T, Dv]`, the new tokens of all requests.
            cache: transformers' PagedAttentionCache. read_index, write_index: arguments of its `update`.
            cu_seq_lens_q, cu_seq_lens_k: int32 `[B + 1]`; those of the keys by layer type where there are several.
            max_seqlen_q, max_seqlen_k: tokens of the longest request, as above.

        Returns:
            output `[1, T, Hq, Dv]`; None in place of attention weights.

        Raises:
            InvalidInput: there is no such cache, or an argument that would change the result and is not known here.
        """
        if cache is None or cu_seq_lens_q is None or cu_seq_lens_k is None:
            want = 'the arguments of generate_batch(). Use "attnops" for an ordinary forward'
            fail(InvalidInput, "cache, cu_seq_lens_q, cu_seq_lens_k", None, want)
        for name, given in (("attention_mask", attention_mask), ("block_table", block_table)):
            if given is not None:
                fail(InvalidInput, name, list(given.shape), "None: continuous batching passes lengths")
        if is_causal is False or (dropout > 0.0 and module.training):
            fail(InvalidInput, "is_causal, dropout", (is_causal, dropout), "causal, and no dropout, in continuous batching")
        if not ((proven or routed(type(module))) and _keeps_what_it_is_given(type(module))):
            want = "a model whose masks and cached keys transformers' own kernels know; generate() for this one"
            fail(InvalidInput, "attn_implementation", f"{PREFIX}attnops for {type(module).__name__}", want)
        check_others({name: given for name, given in others.items() if name not in _OF_THE_STEP})
        keys, values = cache.update(
            key_states=key, value_states=value, layer_idx=module.layer_idx, read_index=read_index, write_index=write_index
        )
        kept = cache.sliding_windows[module.layer_idx]  # 1 for a layer without a window
        kind = "sliding_attention" if kept > 1 else "full_attention"
        window = sliding_window or (kept if kept > 1 else 0)
        cu_k: Any = cu_seq_lens_k[kind] if isinstance(cu_seq_lens_k, dict) else cu_seq_lens_k
        most: Any = max_seqlen_k[kind] if isinstance(max_seqlen_k, dict) else max_seqlen_k
        if isinstance(scaling, Tensor):
            query, scaling = query * scaling, 1.0
        sinks = s_aux if sinks is None else sinks
        output = varlen_attention(
            query[0].transpose(0, 1), keys, values, cu_seq_lens_q.to(torch.int32), cu_k.to(torch.int32), max_seqlen_q=int(max_seqlen_q),
            max_seqlen_k=int(most), scale=scaling, causal=True, window=(window - 1 if window else -1, -1), softcap=float(softcap or 0.0),
            sinks=None if sinks is None else sinks.reshape(-1), kernel=forced,
        )  # fmt: skip
        return output[None], None

    return attention
