"""`reference`: the plain torch implementation of every op. Always there, always right, never fast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attnops.kernel import Kernel, register
from attnops.problem import Problem
from attnops.reference import attention, data, mla, packed


def _cost_us(p: Problem) -> float:
    # Materialises the logits in float32 and reads them several times: always the last choice.
    logits = max(p.q_heads, 1) * max(p.tokens.hint, 1) * max(p.context.hint, 1)
    return 1000.0 + logits * 32 / 1e6


def _reference(op: str, run: Callable[..., Any], inline: bool = False) -> None:
    # A matrix product's order of summation may depend on the batch; what is pointwise or counts in integers does not.
    invariant = op not in MATRIX_PRODUCTS
    about = "plain torch, float32 accumulation"
    register(Kernel("reference", op, run, cost_us=_cost_us, inline=inline, batch_invariant=invariant, about=about))


MATRIX_PRODUCTS = (
    "attention", "attention_backward", "varlen_attention", "varlen_attention_backward", "paged_attention", "mla_attention",
)  # fmt: skip


_reference("attention", attention.attention)
_reference("attention_backward", attention.attention_backward)
_reference("varlen_attention", packed.varlen_attention)
_reference("varlen_attention_backward", packed.varlen_attention_backward)
_reference("paged_attention", packed.paged_attention)
_reference("write_kv", data.write_kv)
_reference("mla_attention", mla.mla_attention)
_reference("write_latent", mla.write_latent)
# Pointwise on small tensors: the compiler fuses these better than any call could.
_reference("merge_state", data.merge_state, inline=True)
_reference("cu_seqlens", data.cu_seqlens, inline=True)
_reference("token_rows", data.token_rows, inline=True)
_reference("slot_mapping", data.slot_mapping, inline=True)
_reference("page_table", data.page_table, inline=True)
_reference("kv_indices", data.kv_indices, inline=True)
_reference("decode_rows", data.decode_rows, inline=True)
_reference("num_kv_splits", data.num_kv_splits, inline=True)
_reference("plan_paged_attention", data.no_plan)
_reference("plan_mla_attention", data.no_plan)
