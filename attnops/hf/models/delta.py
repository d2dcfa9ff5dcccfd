"""The gated delta rule through `attnops.ops.gated_delta_rule`: what takes the place of the two
functions that modules of transformers call by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from attnops.hf.models.chosen import Sizes
from attnops.hf.models.functions import is_served, numbers, starts_of
from attnops.ops.recurrent.record import gated_delta_rule

Function = Callable[..., Any]
ATTRIBUTES = ("num_v_heads", "num_k_heads", "head_v_dim", "head_k_dim", "conv1d")


def sizes_of(module: Any) -> Sizes:
    """Those of the op of a module."""
    heads = (("q_heads", module.num_v_heads), ("kv_heads", module.num_k_heads))
    return *heads, ("head_dim", module.head_k_dim), ("v_head_dim", module.head_v_dim)


def _rule(own: Function) -> Function:
    """In place of `chunk_gated_delta_rule` and `recurrent_gated_delta_rule`."""

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
        (rows, tokens, heads, dv), (groups, dk) = value.shape, key.shape[2:]
        sizes = (("q_heads", heads), ("kv_heads", groups), ("head_dim", dk), ("v_head_dim", dv))
        like = query.dtype == key.dtype == value.dtype
        if cu_seqlens is not None or not (like and is_served("gated_delta_rule", query, sizes)):
            given = (initial_state, output_final_state, use_qk_l2norm_in_kernel)
            names = ("initial_state", "output_final_state", "use_qk_l2norm_in_kernel")
            more |= dict(zip(names, given, strict=True)) | {"cu_seqlens": cu_seqlens}
            result: tuple[Tensor, Tensor | None] = own(query, key, value, g=g, beta=beta, **more)
            return result
        if initial_state is None:
            state = value.new_zeros((rows, heads, dk, dv), dtype=torch.float32)
        else:
            state = initial_state.to(torch.float32, copy=True)
        q, k, v, decay, b = (x.flatten(0, 1) for x in (query, key, value, g.float(), beta))
        output = gated_delta_rule(
            q,
            k,
            v,
            decay,
            b,
            state,
            starts_of(value, rows, tokens),
            max_seqlen_q=tokens,
            normalize=use_qk_l2norm_in_kernel,
            padded=False,
        )
        return output.view(value.shape), state if output_final_state else None

    return run


def over(view: Any) -> dict[str, Function]:
    """The two functions of a step in a graph, whose requests are those of `view`. They write its
    states."""

    def rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        state = view.states.state
        output = gated_delta_rule(
            query.flatten(0, 1),
            key.flatten(0, 1),
            value.flatten(0, 1),
            g.float().flatten(0, 1),
            beta.flatten(0, 1),
            state,
            view.batch.cu_seqlens_q,
            max_seqlen_q=view.batch.max_seqlen_q,
            normalize=use_qk_l2norm_in_kernel,
            fresh=view.fresh,
            padded=False,
        )
        return output.view(value.shape), state

    return dict.fromkeys(OURS, rule)


OURS: Mapping[str, Callable[[Function], Function]] = dict.fromkeys(
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
