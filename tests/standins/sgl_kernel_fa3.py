"""A stand-in for `sgl_kernel::fwd` of sglang-kernel 0.4.3: its schema, its refusals in its words, a float32 body on CPU. Not the kernel.

Kept from the real one because the wrapper must cope with it: rows of no request are left unwritten (NaN here), lse comes heads first
and is -inf for a query without keys whatever the sinks, and +inf when there is no key at all; TMA loads whole tiles, so that NaN
in a value past a request's end spoils its queries, while the paged path without TMA zeroes what lies past the end. A float8
query's weights are rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tests.standins.checks import architecture, check
from tests.standins.schemas import FWD as SCHEMA

SCHEMA_37 = SCHEMA.replace("Tensor? sinks)", "Tensor? sinks, Tensor? sparse_mask_fine, bool only_qv)")
"""0.4.4 and later: two more arguments."""


TILE = 128
FLOAT8 = torch.float8_e4m3fn
Called = list[dict[str, Any]]


@contextmanager
def installed(schema: str = SCHEMA) -> Iterator[Called]:
    """Register the stand-in within the block; yields the arguments of every call by name."""
    from attnops.kernels.sgl import fa3

    calls: Called = []
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    library.define(schema)
    names = [a.name for a in torch.ops.sgl_kernel.fwd.default._schema.arguments]

    def fwd(*args: Any) -> tuple[Tensor, ...]:
        calls.append(dict(zip(names, args, strict=True)))
        return _fwd(**calls[-1])

    library.impl("fwd", fwd, "CPU")
    fa3.raw_op.cache_clear()
    try:
        yield calls
    finally:
        library._destroy()
        vars(torch.ops.sgl_kernel).pop("fwd", None)
        fa3.raw_op.cache_clear()


def _check_ints(name: str, x: Tensor | None, size: int, want: str, dtype: str = "int32") -> None:
    if x is not None:
        check(x.dtype == torch.int32, f"{name} must have dtype {dtype}")
        check(x.is_contiguous(), f"{name} must be contiguous")
        check(tuple(x.shape) == (size,), f"{name} must have shape ({want})")


def _fwd(**a: Any) -> tuple[Tensor, ...]:
    q, k, v, table, cu_q, cu_k = (a[n] for n in ("q", "k", "v", "page_table", "cu_seqlens_q", "cu_seqlens_k"))
    for name in ("k_new", "v_new", "cu_seqlens_k_new", "kv_batch_idx", "rotary_cos"):
        assert a[name] is None, f"the stand-in has no {name}"
    check(q.dtype in (torch.float16, torch.bfloat16, FLOAT8), "FlashAttention only supports fp16, bf16, and fp8_e4m3 data type")
    check(k.dtype == q.dtype, "query and key must have the same dtype")
    check(v.dtype == q.dtype, "query and value must have the same dtype")
    check(all(x.stride(-1) == 1 for x in (q, k, v)), "Input tensor must have contiguous last dimension")
    if table is not None:
        check(table.dtype == torch.int32, "page_table must have dtype torch.int32")
        check(table.stride(-1) == 1, "page_table must have contiguous last dimension")
        check(cu_k is None, "If cu_seqlens_k is passed in, then page table is not supported")
    batch = q.shape[0] if cu_q is None else cu_q.shape[0] - 1
    batch_k = table.shape[0] if table is not None else k.shape[0] if cu_k is None else cu_k.shape[0] - 1
    for name, cu, longest in (("cu_seqlens_q", cu_q, "max_seqlen_q"), ("cu_seqlens_k", cu_k, "max_seqlen_k")):
        _check_ints(name, cu, batch + 1, "batch_size + 1", "torch.int32")
        check(cu is None or a[longest] is not None, f"{longest} must be provided if {name} is provided")
    check(batch == batch_k, "batch_size must be equal to batch_size_k")
    (hq, d), (hkv, dv) = q.shape[-2:], v.shape[-2:]
    check(d <= 256, "FlashAttention forward only supports head dimension at most 256")
    check(hq % hkv == 0, "Number of heads in key/value must divide number of heads in query")
    check(
        dv == d or (128 < d <= 192 and 96 < dv <= 128) or (d <= 64 and dv <= 512),
        "If V headdim is different from Q/K dim, we only support Q/K headdim in (128, 192] and V headdim in (96, 128], "
        "or (Q/K <= 64 and V <= 512).",
    )
    check(tuple(k.shape) == (*v.shape[:-1], d), "k must have shape of v")
    _check_ints("seqused_q", a["seqused_q"], batch, "batch_size")
    _check_ints("seqused_k", a["seqused_k"], batch, "batch_size")
    _check_ints("leftpad_k", a["leftpad_k"], batch, "batch_size")
    unit = 16 if q.dtype == FLOAT8 else 8
    check(d % unit == 0, f"head_size should be a multiple of {unit}")
    check(dv % unit == 0, f"head_size_v should be a multiple of {unit}")
    for name in ("q_descale", "k_descale", "v_descale"):
        scale = a[name]
        assert scale is None or (q.dtype == FLOAT8 and scale.dtype == torch.float32), "read as float32, without a look"
        check(scale is None or tuple(scale.shape) == (batch, hkv), f"{name} must have shape (batch_size, num_heads_k)")
    shape, out, out_dtype = (*q.shape[:-1], dv), a["out"], torch.bfloat16 if q.dtype == FLOAT8 else q.dtype
    if out is not None:
        check(out.dtype == out_dtype, "For FP16/BF16 input, output must have the same dtype as inputs. For FP8 input, BF16")
        check(out.stride(-1) == 1, "Output tensor must have contiguous last dimension")
        check(tuple(out.shape) == shape, "out must have shape (total_q, num_heads, head_size_v)")
    else:
        out = torch.full(shape, float("nan"), dtype=out_dtype)
    if (q_v := a["q_v"]) is not None:
        check(d <= 64, "q_v is only supported for head_size <= 64")
        check(dv >= 256, "q_v is only supported for hdim_v >= 256.")
        check(architecture() == 90, "q_v is only supported for Hopper GPUs")
        check(q_v.dtype == q.dtype and q.dtype != FLOAT8, "q_v must have the same dtype as query")
        check(q_v.stride(-1) == 1, "q_v tensor must have contiguous last dimension")
        check(tuple(q_v.shape) == shape, "q_v must have shape (total_q, num_heads, head_size_v)")
    if (sinks := a["sinks"]) is not None:
        check(hq <= 64, "the real kernel writes past its shared memory for more sinks than 64")
        check(sinks.dtype == torch.bfloat16, "sinks must have dtype bfloat16")
        check(sinks.is_contiguous(), "sinks must be contiguous")
        check(tuple(sinks.shape) == (hq,), "sinks must have shape (num_heads)")
    check(a["num_splits"] <= 256, "num_splits > 256 not supported")
    lse = torch.full((batch, hq, q.shape[1]) if cu_q is None else (hq, q.shape[0]), float("nan"))
    if q.numel() and not k.numel():
        out.zero_()
        lse.fill_(float("inf"))
    elif q.numel():
        _body(a, batch, out, lse)
    return out, lse, torch.empty(0), torch.empty(0)


def _body(a: dict[str, Any], batch: int, out: Tensor, lse: Tensor) -> None:
    q, k, v, table, cu_q, cu_k = (a[n] for n in ("q", "k", "v", "page_table", "cu_seqlens_q", "cu_seqlens_k"))
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
            keys, values, end = k[b], v[b], k.shape[1] if a["seqused_k"] is None else int(a["seqused_k"][b])
        count = max(end - start, 0)
        loaded = slice(start, start + -(-count // TILE) * TILE)
        _request(rows, rows_v, keys[loaded], values[loaded], count, a, *to, b=b)


def _request(q: Tensor, q_v: Tensor | None, k: Tensor, v: Tensor, count: int, a: dict[str, Any], out: Tensor, lse: Tensor, b: int) -> None:
    """One request: q `[n, Hq, D]`, q_v `[n, Hq, Dv]` or None, k and v `[>= count, Hkv, ...]`: `count` keys are seen, the rest weigh 0."""
    n, group = q.shape[0], q.shape[1] // k.shape[1]
    scales = [torch.ones(k.shape[1]) if a[x] is None else a[x][b] for x in ("q_descale", "k_descale", "v_descale")]
    width = torch.float32 if q.dtype != FLOAT8 else FLOAT8
    q_scale, k_scale, v_scale = (x.repeat_interleave(group)[:, None] for x in scales)
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    q, k = q.float() * q_scale, k * k_scale
    scale = q.shape[-1] ** -0.5 if a["softmax_scale"] is None else a["softmax_scale"]
    logits = torch.einsum("nhd,khd->hnk", q.float(), k)
    if q_v is not None:
        logits = logits + torch.einsum("nhd,khd->hnk", q_v.float(), v)
    logits = logits * scale
    if a["softcap"] > 0:
        logits = a["softcap"] * torch.tanh(logits / a["softcap"])
    i, j = torch.arange(n)[:, None] + count - n, torch.arange(k.shape[0])[None]
    left, right = a["window_size_left"], 0 if a["is_causal"] else a["window_size_right"]
    see = (j < count) & (j >= i - left if left >= 0 else True) & (j <= i + right if right >= 0 else True)
    if chunk := a["attention_chunk"]:
        see = see & (j // chunk == i // chunk)
    logits = torch.where(see, logits, float("-inf"))
    total = torch.logsumexp(logits, -1) if k.shape[0] else torch.full(logits.shape[:2], float("-inf"))
    blind = total == float("-inf")
    if a["sinks"] is not None:
        total = torch.where(blind, total, torch.logaddexp(total, a["sinks"].float()[:, None].expand_as(total)))
    weights = torch.exp(logits - torch.where(blind, 0.0, total)[..., None])
    # A query block that sees no key at all is never multiplied.
    weights = weights.to(width).float()
    found = torch.einsum("hnk,khd->nhd", weights, v) * v_scale if count else torch.zeros(out.shape)
    out.copy_(found)
    lse.copy_(total)
