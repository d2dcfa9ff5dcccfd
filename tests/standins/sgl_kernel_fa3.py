"""A stand-in for `sgl_kernel::fwd` of sglang-kernel 0.4.3: its schema, its refusals in its words, a
float32 body on CPU. Not the kernel.

Kept from the real one because the wrapper must cope with it: rows of no request are left unwritten
(NaN here), lse comes heads first and is -inf for a query without keys whatever the sinks, and +inf
when there is no key at all; TMA loads whole tiles, so that NaN in a value past a request's end
spoils its queries, while the paged path without TMA zeroes what lies past the end. A float8 query's
weights are rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tests.standins.body import INF, attend, capped, visible, wide
from tests.standins.checks import ALL, LAST, architecture, check, laid_out
from tests.standins.libraries import registered
from tests.standins.schemas import FWD as SCHEMA

SCHEMA_37 = SCHEMA.replace(
    "Tensor? sinks)", "Tensor? sinks, Tensor? sparse_mask_fine, bool only_qv)"
)
"""0.4.4 and later: two more arguments."""


TILE = 128
FLOAT8, I32 = torch.float8_e4m3fn, torch.int32
Called = list[dict[str, Any]]


@contextmanager
def installed(schema: str = SCHEMA) -> Iterator[Called]:
    """Register the stand-in within the block; yields the arguments of every call by name."""
    from attnops.kernels.sgl import fa3

    calls: Called = []
    names = [a.name for a in torch._C.parse_schema(f"sgl_kernel::{schema}").arguments]

    def fwd(*args: Any) -> tuple[Tensor, ...]:
        calls.append(dict(zip(names, args, strict=True)))
        return _fwd(**calls[-1])

    fa3.raw_op.cache_clear()
    try:
        with registered({schema: fwd}):
            yield calls
    finally:
        fa3.raw_op.cache_clear()


def _fwd(**a: Any) -> tuple[Tensor, ...]:
    q, k, v, table, cu_q, cu_k = (
        a[n] for n in ("q", "k", "v", "page_table", "cu_seqlens_q", "cu_seqlens_k")
    )
    for name in ("k_new", "v_new", "cu_seqlens_k_new", "kv_batch_idx", "rotary_cos"):
        assert a[name] is None, f"the stand-in has no {name}"
    check(
        table is None or cu_k is None,
        "If cu_seqlens_k is passed in, then page table is not supported",
    )
    out_dtype = torch.bfloat16 if q.dtype == FLOAT8 else q.dtype
    rows = "total_q" if cu_q is not None else "batch_size, seqlen_q"
    keys = (
        "num_pages, page_size"
        if table is not None
        else "total_k"
        if cu_k is not None
        else "batch_size, seqlen_k"
    )
    s = laid_out(
        q=(q, f"{rows}, num_heads, head_size", (torch.float16, torch.bfloat16, FLOAT8), LAST),
        k=(k, f"{keys}, num_heads_k, head_size", q.dtype, LAST),
        v=(v, f"{keys}, num_heads_k, head_size_v", q.dtype, LAST),
        sizes={"batch_size": q.shape[0] if cu_q is None else cu_q.shape[0] - 1},
        page_table=(table, "batch_size, pages", I32, LAST),
        cu_seqlens_q=(cu_q, "batch_size + 1", I32, ALL),
        cu_seqlens_k=(cu_k, "batch_size + 1", I32, ALL),
        seqused_q=(a["seqused_q"], "batch_size", I32, ALL),
        seqused_k=(a["seqused_k"], "batch_size", I32, ALL),
        leftpad_k=(a["leftpad_k"], "batch_size", I32, ALL),
        out=(a["out"], f"{rows}, num_heads, head_size_v", out_dtype, LAST),
        q_v=(a["q_v"], f"{rows}, num_heads, head_size_v", q.dtype, LAST),
        sinks=(a["sinks"], "num_heads", torch.bfloat16, ALL),
        **{
            n: (a[n], "batch_size, num_heads_k", torch.float32, "")
            for n in ("q_descale", "k_descale", "v_descale")
        },
    )
    batch, hq, d, hkv, dv = s.batch_size, s.num_heads, s.head_size, s.num_heads_k, s.head_size_v
    for cu, longest in ((cu_q, "max_seqlen_q"), (cu_k, "max_seqlen_k")):
        check(
            cu is None or a[longest] is not None,
            f"{longest} must be provided if cu_seqlens is provided",
        )
    check(d <= 256, "FlashAttention forward only supports head dimension at most 256")
    check(hq % hkv == 0, "Number of heads in key/value must divide number of heads in query")
    check(
        dv == d or (128 < d <= 192 and 96 < dv <= 128) or (d <= 64 and dv <= 512),
        "If V headdim is different from Q/K dim, we only support Q/K headdim in (128, 192] and V "
        "headdim in (96, 128], "
        "or (Q/K <= 64 and V <= 512).",
    )
    unit = 16 if q.dtype == FLOAT8 else 8
    check(d % unit == 0, f"head_size should be a multiple of {unit}")
    check(dv % unit == 0, f"head_size_v should be a multiple of {unit}")
    assert q.dtype == FLOAT8 or all(
        a[n] is None for n in ("q_descale", "k_descale", "v_descale")
    ), "read as float32, without a look"
    out = (
        torch.full((*q.shape[:-1], dv), float("nan"), dtype=out_dtype)
        if a["out"] is None
        else a["out"]
    )
    if (q_v := a["q_v"]) is not None:
        check(d <= 64, "q_v is only supported for head_size <= 64")
        check(dv >= 256, "q_v is only supported for hdim_v >= 256.")
        check(architecture() == 90, "q_v is only supported for Hopper GPUs")
        check(q_v.dtype != FLOAT8, "q_v must have the same dtype as query")
    check(
        a["sinks"] is None or hq <= 64,
        "the real kernel writes past its shared memory for more sinks than 64",
    )
    check(a["num_splits"] <= 256, "num_splits > 256 not supported")
    lse = torch.full((batch, hq, q.shape[1]) if cu_q is None else (hq, q.shape[0]), float("nan"))
    if q.numel() and not k.numel():
        out.zero_()
        lse.fill_(float("inf"))
    elif q.numel():
        _body(a, batch, out, lse)
    return out, lse, torch.empty(0), torch.empty(0)


def _body(a: dict[str, Any], batch: int, out: Tensor, lse: Tensor) -> None:
    q, k, v, table, cu_q, cu_k = (
        a[n] for n in ("q", "k", "v", "page_table", "cu_seqlens_q", "cu_seqlens_k")
    )
    group = q.shape[-2] // k.shape[-2]
    longest = q.shape[1] if cu_q is None else a["max_seqlen_q"]
    for b in range(batch):
        own = slice(0) if cu_q is None else slice(int(cu_q[b]), int(cu_q[b + 1]))
        if a["seqused_q"] is not None:
            assert cu_q is not None, "the stand-in has seqused_q of packed queries only"
            own = slice(own.start, own.start + int(a["seqused_q"][b]))
            if own.start == own.stop:
                continue
        rows = q[b] if cu_q is None else q[own]
        rows_v = None if a["q_v"] is None else a["q_v"][b] if cu_q is None else a["q_v"][own]
        to = (out[b], lse[b]) if cu_q is None else (out[own], lse[:, own])
        start = int(a["leftpad_k"][b]) if a["leftpad_k"] is not None else 0
        if table is not None:
            end, page = int(a["seqused_k"][b]), k.shape[1]
            tma = page % 64 == 0 and longest * group > 64 and a["leftpad_k"] is None
            pages = table[b, : -(-end // page)].long()
            keys, values = k[pages].flatten(0, 1), v[pages].flatten(0, 1)
            keys, values = (keys, values) if tma else (keys[:end], values[:end])
        elif cu_k is not None:
            keys, values, end = k[cu_k[b] :], v[cu_k[b] :], int(cu_k[b + 1] - cu_k[b])
        else:
            keys = k[b]
            values = v[b]
            end = k.shape[1] if a["seqused_k"] is None else int(a["seqused_k"][b])
        count = max(end - start, 0)
        loaded = slice(start, start + -(-count // TILE) * TILE)
        _request(rows, rows_v, keys[loaded], values[loaded], count, a, *to, b=b)


def _request(q, q_v, k, v, count, a, out, lse, b):
    """One request: q `[n, Hq, D]`, q_v `[n, Hq, Dv]` or None, k and v `[>= count, Hkv, ...]`:
    `count` keys are seen, the rest weigh 0."""
    group = q.shape[1] // k.shape[1]
    scales = [
        torch.ones(k.shape[1]) if a[x] is None else a[x][b]
        for x in ("q_descale", "k_descale", "v_descale")
    ]
    q_scale, k_scale, v_scale = (x.repeat_interleave(group)[:, None] for x in scales)
    logits = torch.einsum("nhd,khd->hnk", q.float() * q_scale, wide(k, q) * k_scale)
    if q_v is not None:
        logits = logits + torch.einsum("nhd,khd->hnk", q_v.float(), wide(v, q))
    logits = capped(
        logits * (q.shape[-1] ** -0.5 if a["softmax_scale"] is None else a["softmax_scale"]),
        a["softcap"],
    )
    right = 0 if a["is_causal"] else a["window_size_right"]
    see = visible(q.shape[0], k.shape[0], count, a["window_size_left"], right, a["attention_chunk"])
    rounded = FLOAT8 if q.dtype == FLOAT8 else None
    found, alone, total = attend(q, v, torch.where(see, logits, -INF), a["sinks"], rounded)
    # A query block that sees no key at all is never multiplied.
    out.copy_(found * v_scale if count else torch.zeros(out.shape))
    lse.copy_(torch.where(alone == -INF, alone, total))
