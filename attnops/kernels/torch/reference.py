"""`reference`: the plain torch implementation of every op. Always there, always right, never fast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attnops.kernel import Capture, Inline, Invariant, Kernel, device, register
from attnops.kernels.torch.by_request import LOOPS, by_request
from attnops.problem import Problem
from attnops.reference import attention, data, holes, mla, moves, packed, rope_quantize, sparse, vertical_slash


def _cost_us(p: Problem) -> float:
    # Materialises the logits in float32 and reads them several times: always the last choice.
    logits = max(p.q_heads, 1) * max(p.tokens.hint, 1) * max(p.context.hint, 1)
    return 1000.0 + logits * 32 / 1e6


def _fused_us(p: Problem) -> float:
    # What is pointwise and lowered in place costs the compiler's one launch and its bytes.
    parts = max(p.batch.hint, 1) if p.op == "merge_states" else 2
    return 4.0 + (parts + 1) * max(p.tokens.hint, 1) * p.q_heads * p.v_head_dim * p.dtype.itemsize / 3.1e6


def _reference(op: str, run: Callable[..., Any], inline: bool = False, capture: Capture = Capture.WHOLE) -> None:
    about = "plain torch, float32 accumulation"
    cost_us = _fused_us if inline else _cost_us
    multiplies = op in LOOPS
    register(
        Kernel(
            "reference",
            op,
            by_request(op, run) if multiplies else run,
            cost_us=cost_us,
            capture=capture,
            invariant=Invariant((device("cpu"),) if multiplies else ()),
            judge=not inline,  # what the compiler fuses in place is a kernel like any other
            inline=Inline() if inline else None,
            about=about,
        )
    )


_reference("attention", attention.attention)
_reference("attention_backward", attention.attention_backward)
_reference("varlen_attention", packed.varlen_attention)
_reference("varlen_attention_backward", packed.varlen_attention_backward)
_reference("paged_attention", packed.paged_attention)
_reference("write_kv", data.write_kv)
_reference("mla_attention", mla.mla_attention)
_reference("write_latent", mla.write_latent)
_reference("sparse_mla_attention", sparse.sparse_mla_attention)
_reference("write_latent_packed", sparse.write_latent_packed)
_reference("rope_quantize_latent", rope_quantize.rope_quantize_latent)
_reference("copy_kv", moves.copy_kv)
_reference("vertical_slash_indexes", vertical_slash.vertical_slash_indexes)
_reference("vertical_slash_attention", vertical_slash.vertical_slash_attention)
# Pointwise on small tensors: the compiler fuses these better than any call could.
_reference("merge_state", data.merge_state, inline=True)
_reference("merge_states", data.merge_states, inline=True)
_reference("cu_seqlens", data.cu_seqlens, inline=True)
_reference("token_rows", data.token_rows, inline=True)
_reference("slot_mapping", data.slot_mapping, inline=True)
_reference("named_pages", holes.named_pages, inline=True)
_reference("kv_indices", data.kv_indices, inline=True)
# The host writes: a graph that held it would write once, at its capture.
_reference("plan_paged_attention", data.no_plan, capture=Capture.NEVER)
_reference("plan_mla_attention", data.no_plan, capture=Capture.NEVER)
