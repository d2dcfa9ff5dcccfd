"""`Attention`: query, key and value in, heads out; dense, packed, jagged or paged."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attnops.cache.batch import PagedBatch
from attnops.core import eager_cache
from attnops.core.record import need
from attnops.nn import arguments as check
from attnops.nn.dropout import dropped, refuse
from attnops.nn.jagged import rows_of
from attnops.ops import attention, paged_attention, varlen_attention, write_kv


class Attention(nn.Module):
    """Attention without projections. Dense, packed, jagged or paged: the arguments of the call say
    which.

    Args:
        num_heads: query heads, Hq.
        num_kv_heads: Hkv, a divisor of Hq; default Hq.
        head_dim: D of query and key.
        v_head_dim: Dv of the value and the result; default D.
        scale: factor on q.k; default `1 / sqrt(D)`.
        causal: query i sees keys up to its own position.
        window: (left, right) keys visible besides the query's own position; -1 is unbounded, and so
            is 2**30 or more.
        softcap: logits become `softcap * tanh(logits / softcap)`; 0 is off.
        attention_chunk: query and key see each other only if their positions are in one chunk of so
            many; 0 is off, and so is 2**30 or more.
        sinks: learn one logit a query head that joins the softmax denominator: a parameter `sinks`
            `[Hq]`, zero at first.
        dropout: share of the weights that a training step drops, 0 <= p < 1. In training mode with
            p > 0 the call is torch's own scaled_dot_product_attention, which draws from torch's
            generator. It refuses packed, jagged and paged calls, windows, soft caps, sinks, chunks,
            kv_start, kv_end and kernel, because no kernel has dropout with them. A mask may say
            where a window is.
        kernel: force a kernel by name; None lets attnops choose.
        device, dtype: of the sinks.

    Raises:
        InvalidInput: an argument is out of its range.
    """

    sinks: nn.Parameter | None

    __prepare_scriptable__ = check.not_scripted

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        head_dim: int,
        v_head_dim: int | None = None,
        scale: float | None = None,
        causal: bool = True,
        window: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        attention_chunk: int = 0,
        sinks: bool = False,
        dropout: float = 0.0,
        kernel: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = check.size("num_heads", num_heads)
        self.num_kv_heads = (
            self.num_heads if num_kv_heads is None else check.size("num_kv_heads", num_kv_heads)
        )
        need(
            self.num_heads % self.num_kv_heads == 0,
            "num_kv_heads",
            num_kv_heads,
            f"a divisor of num_heads = {num_heads}",
        )
        self.head_dim = check.size("head_dim", head_dim)
        self.v_head_dim = (
            self.head_dim if v_head_dim is None else check.size("v_head_dim", v_head_dim)
        )
        self.scale = (
            self.head_dim**-0.5 if scale is None else check.number("scale", scale, -3e38, 3e38)
        )
        self.causal = causal
        pair = (
            isinstance(window, (tuple, list))
            and len(window) == 2
            and all(type(side) is int and side >= -1 for side in window)
        )
        need(pair, "window", repr(window), "(left, right), two ints >= -1 (-1: unbounded)")
        self.window = eager_cache.window(window)
        self.softcap = check.number("softcap", softcap, 0.0)
        self.attention_chunk = (
            0
            if attention_chunk == 0
            else eager_cache.chunk(check.size("attention_chunk", attention_chunk))
        )
        self.dropout = check.number("dropout", dropout, 0.0, 1.0)
        self.kernel = kernel
        self.register_parameter(
            "sinks",
            nn.Parameter(torch.zeros(num_heads, device=device, dtype=dtype)) if sinks else None,
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Tensor | None = None,
        kv_start: Tensor | None = None,
        kv_end: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        batch: PagedBatch | None = None,
        k_pages: Tensor | None = None,
        v_pages: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend.

        Dense: query `[B, S, Hq, D]`, key `[B, K, Hkv, D]`, value `[B, K, Hkv, Dv]`; optional
        kv_start, kv_end: int `[B]`, keys outside are invisible. Differentiable.

        Packed: query `[T, Hq, D]`, key `[N, Hkv, D]`, value `[N, Hkv, Dv]` and cu_seqlens_q int32
        `[B + 1]`, max_seqlen_q in tokens; cu_seqlens_k, max_seqlen_k default to the queries'.
        Differentiable.

        Jagged: nested tensors of layout torch.jagged, `[B, j, Hq, D]`, `[B, k, Hkv, D]`,
        `[B, k, Hkv, Dv]`, as a packed call. max_seqlen_q and max_seqlen_k are optional: without
        them the host reads the longest length, which waits for a GPU, and where compiled code has a
        graph break. mask: as the packed call takes it, `[T, K]`. Differentiable.

        Paged: query `[T, Hq, D]`, key `[T, Hkv, D]`, value `[T, Hkv, Dv]` of the new tokens,
        `batch` as the cache made it, and this layer's k_pages `[P, page, Hkv, D]`, v_pages
        `[P, page, Hkv, Dv]`, into which the new keys and values are written first.
        k_scale, v_scale: float32 `[1]` or `[Hkv]`, for quantised pages. No gradient: to be called
        under torch.no_grad().

        mask: as the op takes it (`attnops.attention`, `varlen_attention`, `paged_attention`); a
        bool True is visible.

        Returns:
            `[B, S, Hq, Dv]` or `[T, Hq, Dv]`, or jagged `[B, j, Hq, Dv]` with the query's offsets;
            the query's dtype.

        Raises:
            InvalidInput: the arguments are those of no kind of call, or of two, or break the op's
                contract; a nested tensor is strided, has holes, or is ragged in another dim than 1;
                dropout in training meets an argument that has no kernel with it.
            NoGradient: paged, in grad mode with inputs (or sinks) that require grad.
            UnknownKernel, NoKernel: `kernel` cannot run.
        """
        drops = self.training and self.dropout > 0
        pages = {"k_pages": k_pages, "v_pages": v_pages, "k_scale": k_scale, "v_scale": v_scale}
        if check.nested(query, key, value):
            check.absent(
                "with nested tensors, which say it",
                cu_seqlens_q=cu_seqlens_q,
                cu_seqlens_k=cu_seqlens_k,
                batch=batch,
                kv_start=kv_start,
                kv_end=kv_end,
            )
            return self._jagged(query, key, value, mask, max_seqlen_q, max_seqlen_k, pages)
        dense = check.kind_of_call(
            "cu_seqlens_q",
            cu_seqlens_q,
            batch,
            dense={"kv_start": kv_start, "kv_end": kv_end},
            packed={
                "cu_seqlens_k": cu_seqlens_k,
                "max_seqlen_q": max_seqlen_q,
                "max_seqlen_k": max_seqlen_k,
            },
            paged=pages,
        )
        layout, dims = ("[B, S, H, D]", 4) if dense else ("[T, H, D] (packed or paged)", 3)
        query = check.last(
            "query", check.tensor("query", query, layout, dims), self.num_heads, self.head_dim
        )
        key = check.last(
            "key", check.tensor("key", key, layout, dims), self.num_kv_heads, self.head_dim
        )
        value = check.last(
            "value", check.tensor("value", value, layout, dims), self.num_kv_heads, self.v_head_dim
        )
        if drops:
            refuse(
                self.dropout,
                batch=(batch and "a batch", None),
                cu_seqlens_q=(cu_seqlens_q, None),
                kv_start=(kv_start, None),
                kv_end=(kv_end, None),
                window=(self.window, (-1, -1)),
                softcap=(self.softcap, 0.0),
                sinks=(self.sinks, None),
                attention_chunk=(self.attention_chunk, 0),
                kernel=(self.kernel, None),
            )
            return dropped(
                query, key, value, self.dropout, scale=self.scale, causal=self.causal, mask=mask
            )
        if batch is not None:
            assert k_pages is not None and v_pages is not None
            write_kv(key, value, k_pages, v_pages, batch.slots, k_scale=k_scale, v_scale=v_scale)
            return self.over_pages(query, batch, k_pages, v_pages, mask, k_scale, v_scale)
        if cu_seqlens_q is not None:
            most = check.longest("max_seqlen_q", max_seqlen_q, "cu_seqlens_q")
            both = (cu_seqlens_k is None) == (max_seqlen_k is None)
            need(
                both,
                "cu_seqlens_k, max_seqlen_k",
                "one of them",
                "both, or neither (then the queries')",
            )
            packed: Tensor = varlen_attention(
                query,
                key,
                value,
                cu_seqlens_q,
                cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k,
                max_seqlen_q=most,
                max_seqlen_k=most if max_seqlen_k is None else max_seqlen_k,
                mask=mask,
                **self._rules(),
            )
            return packed
        out: Tensor = attention(
            query,
            key,
            value,
            mask=mask,
            kv_start=kv_start,
            kv_end=kv_end,
            **self._rules(),
        )
        return out

    def _rules(self) -> dict[str, Any]:
        """What the layer was made with, as arguments that all of its ops take."""
        return {
            "scale": self.scale,
            "causal": self.causal,
            "window": self.window,
            "softcap": self.softcap,
            "sinks": self.sinks,
            "attention_chunk": self.attention_chunk,
            "kernel": self.kernel,
        }

    def over_pages(
        self,
        query: Tensor,
        batch: PagedBatch,
        k_pages: Tensor,
        v_pages: Tensor,
        mask: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> Tensor:
        """As `forward` with a batch, where the pages hold the new tokens already."""
        return paged_attention(
            query,
            k_pages,
            v_pages,
            batch.page_table,
            batch.seq_lens,
            batch.cu_seqlens_q,
            max_seqlen_q=batch.max_seqlen_q,
            mask=mask,
            k_scale=k_scale,
            v_scale=v_scale,
            padded=batch.padded,
            plan=batch.plan,
            workspace=batch.workspace,
            holes=batch.holes,
            **self._rules(),
        )

    def _jagged(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        max_seqlen_q: int | None,
        max_seqlen_k: int | None,
        pages: dict[str, Any],
    ) -> Tensor:
        if self.training and self.dropout > 0:
            refuse(self.dropout, query=("a nested tensor", "a plain tensor"))
        q, k, v = rows_of(query, key, value)
        alike = q.ragged == k.ragged and max_seqlen_k is None
        return q.like(
            self.forward(
                q.values,
                k.values,
                v.values,
                mask=mask,
                cu_seqlens_q=q.cu(),
                max_seqlen_q=q.longest(max_seqlen_q),
                cu_seqlens_k=None if alike else k.cu(),
                max_seqlen_k=None if alike else k.longest(max_seqlen_k),
                **pages,
            )
        )

    def extra_repr(self) -> str:
        return check.shown(
            f"{self.num_heads}",
            f"{self.num_kv_heads}",
            f"head_dim={self.head_dim}",
            v_head_dim=(self.v_head_dim, self.head_dim),
            causal=(self.causal, True),
            window=(self.window, (-1, -1)),
            softcap=(self.softcap, 0.0),
            attention_chunk=(self.attention_chunk, 0),
            sinks=(self.sinks is not None, False),
            dropout=(self.dropout, 0.0),
            kernel=(self.kernel, None),
        )
