"""Attention of a decode step: norm, rotation, the write of the new key and value, and attention
over the pages, as one op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.core import eager_cache
from attnops.core.eager_cache import key_for
from attnops.core.errors import InvalidInput, fail
from attnops.core.op import Op, define
from attnops.core.record import FLOATS, INDEX, INT32, KW_ONLY, Call, Sizes, arg, need, place, record
from attnops.ops import rules, typical
from attnops.ops.pages import decode_reference

LEAST = {"page": ">= 1 token a page", "Hkv": ">= 1 head", "D": ">= 1"}
SIZES = {
    "kv_dtype": "k_pages",
    "tokens": "B",
    "batch": "B",
    "queries": "1",
    "context": "max_pages * page",
    "v_head_dim": "D",
}
ANGLES = "B, D | D // 2"


def angle_rules(call: Any, sizes: Sizes) -> None:
    """Query heads that key heads divide, and angles for pairs of numbers."""
    rules.heads_divide(call, sizes)
    if (call.cos is None) != (call.sin is None):
        fail(
            InvalidInput, "cos, sin", "one of them", "both, or neither for a model without rotation"
        )
    if call.cos is not None:
        need(
            sizes["D"] % 2 == 0,
            place(call.spec, "D"),
            sizes["D"],
            "an even number, because cos and sin are given",
        )
        need(
            call.sin.shape[1] == call.cos.shape[1],
            "sin.shape[1]",
            call.sin.shape[1],
            f"{call.cos.shape[1]}, as cos.shape[1]",
        )


def _rules(call: Any, sizes: Sizes) -> None:
    angle_rules(call, sizes)
    rules.contiguous("workspace", call.workspace)


@record("decode_attention", least=LEAST, rules=_rules, problem=SIZES, sums=True)
class DecodeAttention(Call):
    """Attention of one new token a request, which is normed, rotated and stored first. It sees
    itself, whatever the page table says."""

    query: Tensor = arg("B, Hq, D", FLOATS, unit_stride=True, holds="queries")
    key: Tensor = arg("B, Hkv, D", "query", unit_stride=True, holds="new_keys")
    value: Tensor = arg("B, Hkv, D", "query", unit_stride=True, holds="new_keys")
    k_pages: Tensor = arg("P, page, Hkv, D", "query", written=True, unit_stride=True, holds="pages")
    v_pages: Tensor = arg(
        "P, page, Hkv, D", "k_pages", written=True, unit_stride=True, holds="pages"
    )
    page_table: Tensor = arg("B, max_pages", INT32, holds="page_ids")
    seq_lens: Tensor = arg("B", INT32, holds="lengths_of_keys")
    slots: Tensor = arg("B", INDEX, holds="slots_of_tokens")
    cos: Tensor | None = arg(ANGLES, FLOATS, default=None)
    sin: Tensor | None = arg(ANGLES, "cos", default=None)
    q_norm: Tensor | None = arg("D", FLOATS, default=None)
    k_norm: Tensor | None = arg("D", FLOATS, default=None)
    sinks: Tensor | None = rules.SINK_LOGITS
    _: KW_ONLY
    scale: float = arg(holds="scale_of_logits")
    window_left: int = rules.LEFT
    softcap: float = rules.CAP
    eps: float = arg(default=1e-6, least=0, always=True)
    holes: bool = arg(default=True, off=False, facts=rules.HOLES)
    output: Tensor = arg("B, Hq, D", "query", written=True)
    workspace: Tensor | None = rules.WORKSPACE


DECODE = define(
    Op(
        DecodeAttention,
        decode_reference.decode_attention,
        flops="4 * B * Hq * max_pages * page * D",
        about="norm, rotation, write and attention of a decode step",
        shown=("float32",),
        typical=(
            {
                **typical.HEADS,
                **typical.SIZES,
                **typical.DECODE,
                **typical.WORKSPACE,
                "page_size": 64,
            },
        ),
        per_layer=True,
    )
)


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    slots: Tensor,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    scale: float | None = None,
    window_left: int = -1,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    holes: bool = True,
    output: Tensor | None = None,
    workspace: Tensor | None = None,
    kernel: str | None = None,
) -> Tensor:
    """Attention of one new token a request over pages, which the op writes the token's key and
    value into first. No gradient.

    The same as RMS norm and rotation of query and key, `write_kv` and `paged_attention`, without
    the roundings between them.

    Args:
        query: `[B, Hq, D]`, before norm and rotation. key, value: `[B, Hkv, D]`, of the new tokens,
            in the query's dtype.
        k_pages, v_pages: `[P, page, Hkv, D]`, the query's dtype, written.
        page_table: int32 `[B, max_pages]`, as in `paged_attention`. Keys of an id outside `[0, P)`
            are not seen, but for the new one.
        seq_lens: int32 `[B]`, keys of each request, its new token included; at most max_pages *
            page.
        slots: int32 or int64 `[B]`, `page_id * page_size + offset` of the new tokens: the slot of
            position `seq_lens[b] - 1` by the page table. Where the table has a hole there, a slot
            of no other token. Its token sees itself in either case. A row with a negative slot, or
            with length 0, is padding: nothing is written and its output is 0.
        cos, sin: `[B, D]`, any float dtype: number i of a head pairs with number i + D / 2.
            `[B, D / 2]` serves both halves. None: no rotation.
        q_norm, k_norm: `[D]`, weights of an RMS norm of each head before the rotation. None: no
            norm.
        eps: of the norms.
        scale, softcap, sinks, kernel: as in `paged_attention`.
        window_left: keys further back than this are not seen; -1: unbounded, and so is 2**30 or
            more.
        holes: False promises that every entry of the table within a request's length is a page of
            the pool.
        output: `[B, Hq, D]` to write into, the query's dtype; allocated when None.
        workspace: uint8 `[bytes]`, zeroed once by the caller, as in `paged_attention`. Kernels
            count in it and leave zeros behind. After an error of the device that ended a launch
            early it must be zeroed again.

    Returns:
        `output`.

    Raises:
        InvalidInput: a shape, dtype, device or number breaks this contract. NoGradient: an input
            requires grad. UnknownKernel, NoKernel.
    """
    if output is None:
        eager_cache.tensors(query=query)
        output = torch.empty((*query.shape,), dtype=query.dtype, device=query.device)
    DECODE(
        DecodeAttention(
            query,
            key,
            value,
            k_pages,
            v_pages,
            page_table,
            seq_lens,
            slots,
            cos,
            sin,
            q_norm,
            k_norm,
            sinks,
            scale=eager_cache.default_scale(query, scale),
            window_left=eager_cache.side(window_left),
            softcap=softcap,
            eps=eps,
            holes=holes,
            policy=key_for("decode_attention", kernel),
            output=output,
            workspace=workspace,
        )
    )
    return output
