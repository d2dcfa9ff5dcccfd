"""`reference`: the plain torch implementation of every op. It takes every call of its op, and is
never the fast one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from attnops.core.kernel import Capture, Inline, Invariant, Kernel, device, register
from attnops.core.problem import Problem
from attnops.core.record import RECORDS
from attnops.kernels.torch.by_request import by_request
from attnops.measured.cost import products_us, written_us
from attnops.ops.attention import reference as attention
from attnops.ops.latent import reference as latent, rope_reference as rope
from attnops.ops.metadata import reference as metadata
from attnops.ops.pages import decode_reference as decode, reference as pages
from attnops.ops.sparse import reference as sparse, vertical_slash_reference as vertical_slash
from attnops.ops.speculation import reference as speculation

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FLOAT8 = (torch.float8_e4m3fn,)
QUANTISED = (*FLOAT8, torch.float8_e5m2, torch.int8)
QUERY, STORED, BYTES = (*FLOATS, *FLOAT8), (*FLOATS, *QUANTISED), (torch.uint8,)
INT32 = (torch.int32,)
IDS = (torch.int64,)
INDEX = (*INT32, *IDS)


Dtypes = tuple[torch.dtype, ...]
Row = tuple[str, Callable[[Any], Any], Dtypes, Dtypes | None, str]
"""Fields of a Kernel: op, run, dtypes, kv_dtypes, and the names that it takes, separated by
spaces."""

VISIBLE = "mask sinks causal window_left window_right softcap attention_chunk"
SCALED = "q_scale k_scale v_scale"
CALLED: tuple[Row, ...] = (
    (
        "attention",
        attention.attention,
        QUERY,
        STORED,
        f"{VISIBLE} {SCALED} kv_start kv_end return_lse",
    ),
    (
        "attention_backward",
        attention.attention_backward,
        FLOATS,
        None,
        f"{VISIBLE} kv_start kv_end mask_grad",
    ),
    (
        "varlen_attention",
        attention.varlen_attention,
        QUERY,
        STORED,
        f"{VISIBLE} {SCALED} return_lse",
    ),
    ("varlen_attention_backward", attention.varlen_attention_backward, FLOATS, None, VISIBLE),
    (
        "paged_attention",
        pages.paged_attention,
        QUERY,
        STORED,
        f"{VISIBLE} {SCALED} lse temperature holes",
    ),
    ("write_kv", pages.write_kv, FLOATS, STORED, "k_scale v_scale"),
    (
        "decode_attention",
        decode.decode_attention,
        FLOATS,
        None,
        "cos sin q_norm k_norm sinks window_left softcap holes",
    ),
    (
        "rotate_and_write_kv",
        decode.rotate_and_write_kv,
        FLOATS,
        None,
        "q_norm k_norm",
    ),
    (
        "mla_attention",
        latent.mla_attention,
        QUERY,
        STORED,
        "mask sinks causal window_left softcap q_scale kv_scale lse holes",
    ),
    ("write_latent", latent.write_latent, STORED, STORED, "kv_scale"),
    (
        "sparse_mla_attention",
        sparse.sparse_mla_attention,
        QUERY,
        STORED + BYTES,
        "topk_length sinks q_scale kv_scale lse holes",
    ),
    ("write_latent_packed", sparse.write_latent_packed, FLOATS, BYTES, ""),
    ("rope_quantize_latent", rope.rope_quantize_latent, FLOATS, FLOAT8, "interleaved"),
    ("copy_kv", pages.copy_kv, STORED + BYTES, None, ""),
    (
        "vertical_slash_indexes",
        vertical_slash.vertical_slash_indexes,
        INT32,
        None,
        "vertical_counts slash_counts",
    ),
    ("vertical_slash_attention", vertical_slash.vertical_slash_attention, FLOATS, None, "lse"),
    ("lookup_drafts", speculation.lookup_drafts, IDS, None, ""),
    ("accept", speculation.accept, IDS, None, ""),
    ("advance_rows", speculation.advance_rows, IDS, None, ""),
    ("next_inputs", speculation.next_inputs, IDS, None, ""),
    ("accept_sampled", speculation.accept_sampled, IDS, None, ""),
    ("build_tree", speculation.build_tree, IDS, None, ""),
    ("tree_mask", speculation.tree_mask, INT32, None, ""),
)
# Pointwise on small tensors: the compiler fuses these better than any call could.
INLINE: tuple[Row, ...] = (
    ("merge_state", attention.merge_state, FLOATS, None, ""),
    ("merge_states", attention.merge_states, FLOATS, None, ""),
    ("cu_seqlens", metadata.cu_seqlens, INDEX, None, ""),
    ("token_rows", metadata.token_rows, INT32, None, ""),
    ("slot_mapping", metadata.slot_mapping, INDEX, None, ""),
    ("named_pages", metadata.named_pages, INT32, None, ""),
    ("kv_indices", metadata.kv_indices, INT32, None, ""),
)
# The host reads or writes: a graph that held it would do so once, at its capture.
BY_HOST: tuple[Row, ...] = (
    ("request_starts", metadata.request_starts, (torch.bool,), None, ""),
    ("plan_paged_attention", pages.no_plan, QUERY, STORED, ""),
    ("plan_mla_attention", pages.no_plan, QUERY, STORED, ""),
)


LAUNCHES = 20
"""Torch ops of a fused body, about: tests/ops/test_fused_costs.py counts them."""


def _fused_us(p: Problem) -> float:
    """The compiler's one launch and its bytes. An eager call launches every torch op, each of which
    passes over the numbers."""
    parts = max(p.sizes.batch.hint, 1) if p.op == "merge_states" else 2
    numbers = (parts + 1) * max(p.sizes.tokens.hint, 1) * p.q_heads * p.v_head_dim
    return (4.0 + numbers * p.dtype.itemsize / 3.1e6) * (1 if p.step.compiled else LAUNCHES)


for _table, _inline in ((CALLED, None), (INLINE, Inline()), (BY_HOST, None)):
    for _op, _run, _dtypes, _kv_dtypes, _takes in _table:
        _multiplies = RECORDS[_op].sums
        register(
            Kernel(
                "reference",
                _op,
                by_request(_run) if _multiplies else _run,
                takes=frozenset(_takes.split()),
                dtypes=_dtypes,
                kv_dtypes=_kv_dtypes,
                cost_us=_fused_us if _inline else products_us if _multiplies else written_us,
                capture=Capture.NEVER if _table is BY_HOST else Capture.WHOLE,
                invariant=Invariant(
                    (device("cpu"),) if _multiplies else (),
                    any_page=_op in ("paged_attention", "mla_attention", "decode_attention"),
                ),
                judge=not _inline,  # a kernel that the compiler fuses in place is like any other
                inline=_inline,
                about="plain torch, float32 accumulation",
            )
        )
