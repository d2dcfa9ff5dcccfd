"""`triton`, of the ops that move data: attnops' own kernels, for any GPU that Triton compiles for. docs/triton.md tells of them.

One launch each (a copy between more than 256 slots takes two and a scratch), no synchronisation, any strides.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.kernel import Invariant, Kernel, Need, one_of, register
from attnops.kernels.triton.attention import PACKAGE
from attnops.problem import Problem, Refusal


def write_kv(
    key: Tensor,
    value: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    policy: str = "",
) -> None:
    """See `attnops.write_kv`."""
    from attnops.kernels.triton.launch.data import write

    write(slots, ((key, k_pages, k_scale), (value, v_pages, v_scale)))


def write_latent(
    latent: Tensor, k_pe: Tensor, latent_pages: Tensor, slots: Tensor, kv_scale: Tensor | None = None, *, policy: str = ""
) -> None:
    """See `attnops.ops.write_latent`. The two parts of a latent are a key and a value with one head; they are never put together."""
    from attnops.kernels.triton.launch.data import write

    first, rest = latent_pages[:, :, None].split([latent.shape[1], k_pe.shape[1]], -1)
    write(slots, ((latent[:, None], first, kv_scale), (k_pe[:, None], rest, kv_scale)))


def write_latent_packed(latent: Tensor, k_pe: Tensor, latent_pages: Tensor, slots: Tensor, *, policy: str = "") -> None:
    """See `attnops.ops.write_latent_packed`."""
    from attnops.kernels.triton.launch.data import write_packed

    write_packed(latent, k_pe, latent_pages, slots)


def copy_kv(k_pages: Tensor, v_pages: Tensor | None, source: Tensor, target: Tensor, *, policy: str = "") -> None:
    """See `attnops.ops.copy_kv`."""
    from attnops.kernels.triton.launch.data import copy_slots

    given = (k_pages,) if v_pages is None else (k_pages, v_pages)
    copy_slots(tuple(p if p.dim() == 5 else p[:, :, :, None] for p in given), source, target)


def kv_indices(page_table: Tensor, seq_lens: Tensor, *, page_size: int, policy: str = "") -> tuple[Tensor, Tensor, Tensor]:
    """See `attnops.ops.kv_indices`."""
    from attnops.kernels.triton.launch.data import make_kv_indices

    batch, width = page_table.shape
    indptr, indices, last = (page_table.new_empty(n) for n in (batch + 1, batch * width, batch))
    make_kv_indices(page_table, seq_lens, page_size, indptr, indices, last)
    return indptr, indices, last


def decode_rows(
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    num_tokens: int,
    causal: bool = True,
    q_heads: int = 0,
    float8: bool = False,
    policy: str = "",
) -> Tensor:
    """See `attnops.ops.decode_rows`. Without a schedule."""
    from attnops.kernels.triton.launch.data import make_rows

    batch, width = page_table.shape
    if batch == 0:
        return seq_lens.new_zeros(num_tokens * (1 + width))
    out = seq_lens.new_empty(num_tokens * (1 + width))
    make_rows(page_table, seq_lens, cu_seqlens_q, num_tokens, causal, out)
    return out


def named_pages(
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    num_pages: int,
    page_size: int,
    squeeze: bool = True,
    window_left: int = -1,
    policy: str = "",
) -> tuple[Tensor, Tensor]:
    """See `attnops.ops.named_pages`."""
    from attnops.kernels.triton.launch.data import make_named_pages

    table, lengths = page_table.new_empty(page_table.shape), seq_lens.new_empty(seq_lens.shape)
    make_named_pages(page_table, seq_lens, cu_seqlens_q, (num_pages, page_size, window_left), squeeze, table, lengths)
    return table, lengths


def _gpu(p: Problem) -> Refusal | None:
    ok = p.target.device == "cuda" and p.target.arch >= 80
    return None if ok else Refusal("target", p.target, "CUDA, sm80 or newer")


def _cost_us(p: Problem) -> float:
    """A launch, then bytes over a bandwidth. Tables that Inductor makes as fast, amid what stands around them, are left to it."""
    if p.op in ("named_pages",):
        return 5.0
    numbers = p.head_dim if p.rope_dim else max(p.kv_heads, p.q_heads, 1) * (p.head_dim + p.v_head_dim)
    return 3.0 + max(p.tokens.hint, 1) * numbers * (p.dtype.itemsize + p.kv_dtype.itemsize) / 3.4e6


FLOATS = (torch.float16, torch.bfloat16, torch.float32)
WRITES: tuple[Need, ...] = (_gpu, one_of("dtype", *FLOATS))
STORED = (torch.float8_e4m3fn, torch.int8)
for _op, _run, _needs, _about in (
    ("write_kv", write_kv, WRITES, "one launch, whatever is stored"),
    ("write_latent", write_latent, (_gpu, one_of("dtype", *FLOATS, *STORED)), "one launch, both parts"),
    ("write_latent_packed", write_latent_packed, WRITES, "one launch, scales and all"),
    ("copy_kv", copy_kv, (_gpu,), "one launch up to 256 slots, then two through a scratch"),
    ("kv_indices", kv_indices, (_gpu,), "one launch"),
    ("decode_rows", decode_rows, (_gpu, one_of("q_heads", 0)), "one launch, without a schedule"),
    ("named_pages", named_pages, (_gpu,), "one launch"),
):
    register(Kernel("triton", _op, _run, needs=_needs, packages=(PACKAGE,), cost_us=_cost_us, invariant=Invariant(), about=_about))
