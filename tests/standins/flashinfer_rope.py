"""A stand-in for FlashInfer 0.7.2's `flashinfer.rope.mla_rope_quantize_fp8`: not the kernel.

Its signature, the checks of rope.py and csrc/rope.cu, the shape of its launch, and a plain body on
the CPU. Kept from the real one: it multiplies by the scales it is given; a thread turns 16 numbers,
from 16 cosines and sines that it loads at once, and reads the other half of its pairs 16 at a time;
a position that leads nowhere, and rows that do not start at multiples of 16 bytes, are what the GPU
calls an illegal address. That a tensor is on CUDA is the one thing it does not check.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from attnops.kernels.flashinfer import modules
from tests.standins.checks import ALL, LAST, check, laid_out

CALLS: list[dict[str, Any]] = []
"""What each call was given, in order."""


@contextmanager
def installed() -> Iterator[list[dict[str, Any]]]:
    """Put the stand-in where the wrapper looks within the block; gives the record of calls."""
    CALLS.clear()
    with patch.object(modules, "module", {"rope": sys.modules[__name__]}.__getitem__):
        yield CALLS


HALVES = (torch.float16, torch.bfloat16)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
VECTOR = 16


def rows_aligned(x: Tensor) -> None:
    """CUDA's vector loads and stores: 16 bytes at a time."""
    steps = [n * x.dtype.itemsize for n in (x.storage_offset(), *x.stride()[:-1])]
    check(not any(n % 16 for n in steps), "CUDA error: misaligned address")


def mla_rope_quantize_fp8(
    q_rope,
    k_rope,
    q_nope,
    k_nope,
    cos_sin_cache,
    pos_ids,
    is_neox=True,
    quantize_dtype=None,
    quant_scale_q=1.0,
    quant_scale_kv=1.0,
    q_rope_out=None,
    k_rope_out=None,
    q_nope_out=None,
    k_nope_out=None,
    enable_pdl=False,
):
    CALLS.append(dict(locals()))
    given = [x for x in (q_rope_out, k_rope_out, q_nope_out, k_nope_out) if x is not None]
    stored = quantize_dtype or (given[0].dtype if given else torch.float8_e4m3fn)
    outs = [
        out if out is not None else torch.empty_like(x, dtype=stored)
        for out, x in (
            (q_rope_out, q_rope),
            (k_rope_out, k_rope),
            (q_nope_out, q_nope),
            (k_nope_out, k_nope),
        )
    ]
    ins = [q_rope, k_rope, q_nope, k_nope]
    q_r, k_r, q_n, k_n = "nnz, heads, rope", "nnz, rope", "nnz, heads, nope", "nnz, nope"
    s = laid_out(
        q_rope=(q_rope, q_r, HALVES, LAST),
        k_rope=(k_rope, k_r, q_rope.dtype, LAST),
        q_nope=(q_nope, q_n, q_rope.dtype, LAST),
        k_nope=(k_nope, k_n, q_rope.dtype, LAST),
        q_rope_out=(outs[0], q_r, FLOAT8, LAST),
        k_rope_out=(outs[1], k_r, outs[0].dtype, LAST),
        q_nope_out=(outs[2], q_n, outs[0].dtype, LAST),
        k_nope_out=(outs[3], k_n, outs[0].dtype, LAST),
        cos_sin_cache=(cos_sin_cache, "positions, rope", torch.float32, ALL),
        pos_ids=(pos_ids, "nnz", (torch.int32, torch.int64), ALL),
    )
    check(
        s.nnz > 0 and (s.heads + 1) * (1 + -(-s.nope // s.rope)) <= 65535,
        "kernel launch failed: invalid configuration argument",
    )
    for x in (*ins, *outs, cos_sin_cache):
        rows_aligned(x)
    check(
        bool(((pos_ids >= 0) & (pos_ids < cos_sin_cache.shape[0])).all()),
        "CUDA error: an illegal memory access was encountered",
    )
    _turn(q_rope, cos_sin_cache, pos_ids, quant_scale_q, outs[0], not is_neox)
    _turn(k_rope[:, None], cos_sin_cache, pos_ids, quant_scale_kv, outs[1][:, None], not is_neox)
    for x, scale, out in ((q_nope, quant_scale_q, outs[2]), (k_nope, quant_scale_kv, outs[3])):
        _store(out, x.float() * torch.tensor(scale, dtype=torch.float32))
    return outs[0], outs[1], outs[2], outs[3]


def _turn(
    x: Tensor, table: Tensor, positions: Tensor, scale: float, out: Tensor, interleave: bool
) -> None:
    """Thread by thread, as vec_apply_llama_rope_cos_sin and its interleaved fellow do."""
    rope = x.shape[2]
    half = rope // 2
    row = table[positions.long()]
    wide = x.float()
    for start in range(0, rope, VECTOR):
        mine = torch.arange(start, start + VECTOR)
        assert start + VECTOR <= rope, "a thread writes past the row"
        if interleave:
            at, other, minus = mine // 2, mine ^ 1, mine % 2 == 0
        else:
            first = start % half
            assert first + VECTOR <= half, "a thread takes cosines for sines"
            at = torch.arange(first, first + VECTOR)
            other, minus = (
                (mine + half, torch.tensor(True))
                if start < half
                else (mine - half, torch.tensor(False))
            )
        pair = torch.where(minus, -wide[..., other], wide[..., other])
        turned = wide[..., mine] * row[:, None, at] + pair * row[:, None, half + at]
        _store(out[..., mine[0] : mine[-1] + 1], turned * torch.tensor(scale, dtype=torch.float32))


def _store(out: Tensor, x: Tensor) -> None:
    top = torch.finfo(out.dtype).max
    out.copy_(x.clamp(-top, top).to(out.dtype))
