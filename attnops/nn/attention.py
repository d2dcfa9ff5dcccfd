"""`Attention`: query, key and value in, heads out; dense, packed or paged."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attnops.cache.batch import PagedBatch
from attnops.call import need
from attnops.nn import arguments as check
from attnops.ops import attention, paged_attention, varlen_attention, write_kv


class Attention(nn.Module):
    """Attention without projections. Dense, packed or paged: the arguments of the call say which.

    Args:
        num_heads: query heads, Hq.
        num_kv_heads: Hkv, a divisor of Hq; default Hq.
        head_dim: D of query and key.
        v_head_dim: Dv of the value and the result; default D.
        scale: factor on q.k; default `1 / sqrt(D)`.
        causal: query i sees keys up to its own position.
        window: (left, right) keys visible besides the query's own position; -1 is unbounded.
        softcap: logits become `softcap * tanh(logits / softcap)`; 0 is off.
        attention_chunk: query and key see each other only if their positions are in one chunk of so many; 0 is off.
        sinks: learn one logit a query head that joins the softmax denominator: a parameter `sinks` `[Hq]`, zero at first.
        kernel: force a kernel by name; None lets attnops choose.
        device, dtype: of the sinks.

    Raises:
        InvalidInput: an argument is out of its range.
    """

    sinks: nn.Parameter | None

    def __init__(
        self, num_heads: int, num_kv_heads: int | None = None,
        *, head_dim: int, v_head_dim: int | None = None, scale: float | None = None, causal: bool = True,
        window: tuple[int, int] = (-1, -1), softcap: float = 0.0, attention_chunk: int = 0, sinks: bool = False, kernel: str | None = None,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_heads = check.size("num_heads", num_heads)
        self.num_kv_heads = self.num_heads if num_kv_heads is None else check.size("num_kv_heads", num_kv_heads)
        need(self.num_heads % self.num_kv_heads == 0, "num_kv_heads", num_kv_heads, f"a divisor of num_heads = {num_heads}")
        self.head_dim = check.size("head_dim", head_dim)
        self.v_head_dim = self.head_dim if v_head_dim is None else check.size("v_head_dim", v_head_dim)
        self.scale = self.head_dim**-0.5 if scale is None else check.number("scale", scale, -3e38, 3e38)
        self.causal = causal
        pair = isinstance(window, (tuple, list)) and len(window) == 2 and all(type(side) is int and side >= -1 for side in window)
        need(pair, "window", repr(window), "(left, right), two ints >= -1 (-1: unbounded)")
        self.window = (window[0], window[1])
        self.softcap = check.number("softcap", softcap, 0.0)
        self.attention_chunk = 0 if attention_chunk == 0 else check.size("attention_chunk", attention_chunk)
        self.kernel = kernel
        self.register_parameter("sinks", nn.Parameter(torch.zeros(num_heads, device=device, dtype=dtype)) if sinks else None)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor,
        *, mask: Tensor | None = None, kv_start: Tensor | None = None, kv_end: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
        batch: PagedBatch | None = None, k_pages: Tensor | None = None, v_pages: Tensor | None = None, k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attend.

        Dense: query `[B, S, Hq, D]`, key `[B, K, Hkv, D]`, value `[B, K, Hkv, Dv]`; optional kv_start, kv_end: int `[B]`, keys outside
        are invisible. Differentiable.

        Packed: query `[T, Hq, D]`, key `[N, Hkv, D]`, value `[N, Hkv, Dv]` and cu_seqlens_q int32 `[B + 1]`, max_seqlen_q in tokens;
        cu_seqlens_k, max_seqlen_k default to the queries'. Differentiable.

        Paged: query `[T, Hq, D]`, key `[T, Hkv, D]`, value `[T, Hkv, Dv]` of the new tokens, `batch` as the cache made it, and this
        layer's k_pages `[P, page, Hkv, D]`, v_pages `[P, page, Hkv, Dv]`, into which the new keys and values are written first.
        k_scale, v_scale: float32 `[1]` or `[Hkv]`, for quantised pages. No gradient: to be called under torch.no_grad().

        mask: as the op takes it (`attnops.attention`, `varlen_attention`, `paged_attention`); a bool True is visible.

        Returns:
            `[B, S, Hq, Dv]` or `[T, Hq, Dv]`, the query's dtype.

        Raises:
            InvalidInput: the arguments are those of no kind of call, or of two, or break the op's contract.
            NoGradient: paged, in grad mode with inputs (or sinks) that require grad.
            UnknownKernel, NoKernel: `kernel` cannot run.
        """
        dense = check.kind_of_call(
            "cu_seqlens_q", cu_seqlens_q, batch, dense={"kv_start": kv_start, "kv_end": kv_end},
            packed={"cu_seqlens_k": cu_seqlens_k, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k},
            paged={"k_pages": k_pages, "v_pages": v_pages, "k_scale": k_scale, "v_scale": v_scale},
        )  # fmt: skip
        layout, dims = ("[B, S, H, D]", 4) if dense else ("[T, H, D] (packed or paged)", 3)
        query = check.last("query", check.tensor("query", query, layout, dims), self.num_heads, self.head_dim)
        key = check.last("key", check.tensor("key", key, layout, dims), self.num_kv_heads, self.head_dim)
        value = check.last("value", check.tensor("value", value, layout, dims), self.num_kv_heads, self.v_head_dim)
        if batch is not None:
            assert k_pages is not None and v_pages is not None
            write_kv(key, value, k_pages, v_pages, batch.slots, k_scale=k_scale, v_scale=v_scale)
            return paged_attention(
                query, k_pages, v_pages, batch.page_table, batch.seq_lens, batch.cu_seqlens_q, max_seqlen_q=batch.max_seqlen_q,
                scale=self.scale, causal=self.causal, window=self.window, softcap=self.softcap, mask=mask, sinks=self.sinks,
                k_scale=k_scale, v_scale=v_scale, attention_chunk=self.attention_chunk, padded=batch.padded, plan=batch.plan,
                workspace=batch.workspace, holes=batch.holes, kernel=self.kernel,
            )  # fmt: skip
        if cu_seqlens_q is not None:
            most = check.longest("max_seqlen_q", max_seqlen_q, "cu_seqlens_q")
            both = (cu_seqlens_k is None) == (max_seqlen_k is None)
            need(both, "cu_seqlens_k, max_seqlen_k", "one of them", "both, or neither (then the queries')")
            return varlen_attention(
                query, key, value, cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k, max_seqlen_q=most,
                max_seqlen_k=most if max_seqlen_k is None else max_seqlen_k, scale=self.scale, causal=self.causal,
                window=self.window, softcap=self.softcap, mask=mask, sinks=self.sinks, attention_chunk=self.attention_chunk,
                kernel=self.kernel,
            )  # fmt: skip
        return attention(
            query, key, value, scale=self.scale, causal=self.causal, window=self.window, softcap=self.softcap, mask=mask,
            sinks=self.sinks, kv_start=kv_start, kv_end=kv_end, attention_chunk=self.attention_chunk, kernel=self.kernel,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return check.shown(
            f"{self.num_heads}", f"{self.num_kv_heads}", f"head_dim={self.head_dim}", v_head_dim=(self.v_head_dim, self.head_dim),
            causal=(self.causal, True), window=(self.window, (-1, -1)), softcap=(self.softcap, 0.0),
            attention_chunk=(self.attention_chunk, 0), sinks=(self.sinks is not None, False), kernel=(self.kernel, None),
        )  # fmt: skip
