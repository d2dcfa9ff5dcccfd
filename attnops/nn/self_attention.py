"""`SelfAttention`: a decoder layer's attention with its projections, as Llama, Qwen 3, Gemma 2 and
gpt-oss have it."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from attnops.cache.batch import PagedBatch
from attnops.core.record import need
from attnops.nn import arguments as check
from attnops.nn.attention import Attention
from attnops.nn.dropout import refuse
from attnops.nn.jagged import rows
from attnops.nn.rotary import RotaryEmbedding, rope_of
from attnops.ops import rotate_and_write_kv

Module = TypeVar("Module", bound=nn.Module)


class SelfAttention(nn.Module):
    """Projections, optional norm of query and key, optional RoPE, attention, projection back.
    Dense, packed, jagged or paged.

    Args:
        hidden_size: E of input and output.
        num_heads: Hq.
        num_kv_heads: Hkv; default Hq.
        head_dim: D; default E / Hq.
        qk_norm: RMS norm of every query and key head before RoPE, epsilon `norm_eps`.
        rope: a RotaryEmbedding of this head_dim, or None.
        bias: do the query, key and value projections have one?
        out_bias: does the output projection?
        scale, causal, window, softcap, sinks, dropout, kernel: as in `Attention`.
        device, dtype: of the parameters, which start as torch.nn.Linear's and torch.nn.RMSNorm's
            do.

    Raises:
        InvalidInput: an argument is out of its range.
    """

    __prepare_scriptable__ = check.not_scripted

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        rope: RotaryEmbedding | None = None,
        bias: bool = False,
        out_bias: bool = False,
        scale: float | None = None,
        causal: bool = True,
        window: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        sinks: bool = False,
        dropout: float = 0.0,
        kernel: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = check.size("hidden_size", hidden_size)
        check.size("num_heads", num_heads)
        if head_dim is None:
            want = f"an int, because hidden_size {hidden_size} is no multiple of {num_heads} heads"
            need(hidden_size % num_heads == 0, "head_dim", None, want)
            head_dim = hidden_size // num_heads
        self.attention = Attention(
            num_heads,
            num_kv_heads,
            head_dim=head_dim,
            scale=scale,
            causal=causal,
            window=window,
            softcap=softcap,
            sinks=sinks,
            dropout=dropout,
            kernel=kernel,
            device=device,
            dtype=dtype,
        )
        self.rope = rope_of(rope, "head_dim", head_dim)
        heads, kv_heads = self.attention.num_heads, self.attention.num_kv_heads
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(hidden_size, heads * head_dim, bias=bias, **made)
        self.k_proj, self.v_proj = (
            nn.Linear(hidden_size, kv_heads * head_dim, bias=bias, **made) for _ in range(2)
        )
        self.o_proj = nn.Linear(heads * head_dim, hidden_size, bias=out_bias, **made)
        eps = check.number("norm_eps", norm_eps, 0.0)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(head_dim, eps=eps, **made) if qk_norm else None for _ in range(2)
        )

    def forward(
        self,
        hidden: Tensor,
        *,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        kv_start: Tensor | None = None,
        kv_end: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        batch: PagedBatch | None = None,
        k_pages: Tensor | None = None,
        v_pages: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend. Arguments that are not listed here are those of `Attention.forward`.

        Args:
            hidden: `[B, S, E]` dense, or `[T, E]` packed (with cu_seqlens int32 `[B + 1]` and
                max_seqlen in tokens) or paged (with batch, k_pages and v_pages), or a jagged nested
                tensor `[B, j, E]` (max_seqlen is then optional, as in `Attention.forward`).
            positions: int `[S]` or `[B, S]`, or `[T]`, for RoPE. Default: from 0 in each request,
                or the batch's.

        Returns:
            As hidden.

        Raises:
            InvalidInput, NoGradient, UnknownKernel, NoKernel: as in `Attention.forward`.
        """
        if check.nested(hidden):
            check.absent("with a nested tensor, which says it", cu_seqlens=cu_seqlens, batch=batch)
            if self.attention.training and self.attention.dropout > 0:
                refuse(self.attention.dropout, hidden=("a nested tensor", "a plain tensor"))
            packed = rows("hidden", hidden)
            return packed.like(
                self.forward(
                    packed.values,
                    positions=positions,
                    mask=mask,
                    kv_start=kv_start,
                    kv_end=kv_end,
                    cu_seqlens=packed.cu(),
                    max_seqlen=packed.longest(max_seqlen),
                    k_pages=k_pages,
                    v_pages=v_pages,
                    k_scale=k_scale,
                    v_scale=v_scale,
                )
            )
        dense = cu_seqlens is None and batch is None
        hidden, core = check.hidden_states(hidden, self.hidden_size, dense), self.attention
        lead = hidden.shape[:-1]
        query = self.q_proj(hidden).view(*lead, core.num_heads, core.head_dim)
        key = self.k_proj(hidden).view(*lead, core.num_kv_heads, core.head_dim)
        value = self.v_proj(hidden).view(*lead, core.num_kv_heads, core.head_dim)
        # With a batch `core` refuses the first four, and dropout. It uses the scales.
        for_core = kv_start, kv_end, cu_seqlens, max_seqlen, k_scale, v_scale
        drops = core.training and core.dropout > 0
        if batch is not None and not drops and all(each is None for each in for_core):
            at = check.positions_of(hidden, positions, None, batch)
            turned = self._written(query, key, value, at, batch, k_pages, v_pages)
            if turned is not None:
                assert k_pages is not None and v_pages is not None
                return self._projected(core.over_pages(turned, batch, k_pages, v_pages, mask))
        if self.q_norm is not None and self.k_norm is not None:
            # Autocast norms in float32 and the ops take one dtype.
            query, key = self.q_norm(query).to(value.dtype), self.k_norm(key).to(value.dtype)
        if self.rope is not None:
            query, key = self.rope(
                query, key, check.positions_of(hidden, positions, cu_seqlens, batch)
            )
        attended = core(
            query,
            key,
            value,
            mask=mask,
            kv_start=kv_start,
            kv_end=kv_end,
            cu_seqlens_q=cu_seqlens,
            max_seqlen_q=max_seqlen,
            batch=batch,
            k_pages=k_pages,
            v_pages=v_pages,
            k_scale=k_scale,
            v_scale=v_scale,
        )
        return self._projected(attended)

    def _projected(self, attended: Tensor) -> Tensor:
        out: Tensor = self.o_proj(attended.flatten(-2))
        return out

    def _written(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        batch: PagedBatch,
        k_pages: Tensor | None,
        v_pages: Tensor | None,
    ) -> Tensor | None:
        """The turned queries of new tokens, whose keys and values are in the pages now: one launch
        in place of some thirty. None, and nothing is written, where the op does not compute what
        the parts of this layer do."""
        rope = self.rope
        if k_pages is None or v_pages is None:  # `attention` refuses that
            return None
        if not _is_plain(self.attention, Attention) or not _is_plain(rope, RotaryEmbedding):
            return None
        dtypes = {x.dtype for x in (query, key, value, k_pages, v_pages)}
        if rope.interleaved or len(dtypes) > 1 or torch.float64 in dtypes:
            return None
        norms = _weights(self.q_norm, self.k_norm)
        if norms is None:
            return None
        cos, sin = rope.cos_sin(positions, query)
        turned, _ = rotate_and_write_kv(
            query,
            key,
            value,
            k_pages,
            v_pages,
            batch.slots,
            cos,
            sin,
            q_norm=norms.query,
            k_norm=norms.key,
            eps=norms.eps,
        )
        return turned


class _Norms(NamedTuple):
    """The weights `[D]` of the norms of query and key, None without one, and their epsilon."""

    query: Tensor | None = None
    key: Tensor | None = None
    eps: float = 0.0


def _weights(query: nn.Module | None, key: nn.Module | None) -> _Norms | None:
    """Those of two norms, as the op takes them. None where it does not norm so."""
    if query is None and key is None:
        return _Norms()
    if not _is_plain(query, nn.RMSNorm) or not _is_plain(key, nn.RMSNorm):
        return None
    if query.eps is None or query.eps != key.eps or query.weight is None or key.weight is None:
        return None
    return _Norms(query.weight, key.weight, query.eps)


def _is_plain(module: nn.Module | None, kind: type[Module]) -> TypeGuard[Module]:
    """Does a call of the module run the forward of this class itself, and nothing else?

    A subclass, a forward of the instance or a hook may compute something else.
    """
    if module is None or type(module) is not kind or "forward" in vars(module):
        return False
    return not (module._forward_hooks or module._forward_pre_hooks)
