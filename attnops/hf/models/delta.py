"""The gated delta rule through `attnops.ops.gated_delta_rule`: what takes the place of the two
functions that modules of transformers call by name."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from attnops.hf.models.chosen import Sizes
from attnops.hf.models.functions import (
    Function,
    Make,
    Texts,
    count_of,
    is_served,
    kept_of,
    last_of_rows,
    numbers,
    requests_of,
    state_of,
    texts_of,
)
from attnops.ops.recurrent.record import gated_delta_rule

ATTRIBUTES = ("num_v_heads", "num_k_heads", "head_v_dim", "head_k_dim", "conv1d")


def sizes_of(module: Any) -> Sizes:
    """Those of the op of a module."""
    heads = (("q_heads", module.num_v_heads), ("kv_heads", module.num_k_heads))
    return *heads, ("head_dim", module.head_k_dim), ("v_head_dim", module.head_v_dim)


def _rule(own: Function, view: Any = None) -> Function:
    """In place of `chunk_gated_delta_rule` and `recurrent_gated_delta_rule`, see `Make`."""

    @functools.wraps(own)
    def run(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
        **more: Any,
    ) -> tuple[Tensor, Tensor | None]:
        (rows, tokens, heads, dv), dk = value.shape, key.shape[3]
        given = more if cu_seqlens is None else {**more, "cu_seqlens": cu_seqlens}
        texts = None if view is not None else texts_of(given, rows, tokens)
        if view is None and not _serves(query, key, value, texts):
            more |= {"initial_state": initial_state, "output_final_state": output_final_state}
            more |= {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "cu_seqlens": cu_seqlens}
            result: tuple[Tensor, Tensor | None] = own(query, key, value, g=g, beta=beta, **more)
            return result
        state = state_of(view, initial_state, value, count_of(rows, texts), heads, dk, dv)
        kept = kept_of(view)
        if kept:
            # transformers repeats a key for each of its value heads. One of them is kept.
            group = key.shape[2] // kept["kept_key"].shape[2]
            query, key = query[:, :, ::group], key[:, :, ::group]
        output = gated_delta_rule(
            query.flatten(0, 1),
            key.flatten(0, 1),
            value.flatten(0, 1),
            g.float().flatten(0, 1),
            beta.flatten(0, 1),
            state,
            normalize=use_qk_l2norm_in_kernel,
            **kept,
            **requests_of(view, value, rows, tokens, initial_state is None, texts),
        )
        last = last_of_rows(state, rows, tokens, texts) if output_final_state else None
        return output.view(value.shape), last

    return run


def _serves(query: Tensor, key: Tensor, value: Tensor, texts: Texts | None) -> bool:
    heads = (("q_heads", value.shape[2]), ("kv_heads", key.shape[2]))
    sizes = (*heads, ("head_dim", key.shape[3]), ("v_head_dim", value.shape[3]))
    alike = query.dtype == key.dtype == value.dtype
    return alike and is_served("gated_delta_rule", query, sizes, texts=texts)


OURS: Mapping[str, Make] = dict.fromkeys(
    ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"), _rule
)
"""By the name in transformers' files."""


def inputs(_: str) -> dict[str, Any]:
    """What a trial gives the functions: more tokens than a chunk has, and a state."""
    rows, tokens, heads = 2, 70, 2
    return {
        "query": numbers(rows, tokens, heads, 8),
        "key": numbers(rows, tokens, heads, 8).cos(),
        "value": numbers(rows, tokens, heads, 6),
        "g": -numbers(rows, tokens, heads).abs(),
        "beta": numbers(rows, tokens, heads).sigmoid(),
        "initial_state": numbers(rows, heads, 8, 6),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }
