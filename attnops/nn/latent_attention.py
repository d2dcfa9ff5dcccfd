"""`LatentAttention`: a decoder layer's attention with latents (MLA) and its projections, as
DeepSeek-V2 and V3 have it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attnops.cache.batch import PagedBatch
from attnops.core.errors import InvalidInput, fail
from attnops.core.record import need
from attnops.nn import arguments as check
from attnops.nn.dropout import dropped, refuse
from attnops.nn.jagged import rows
from attnops.nn.latent import (
    LatentDims,
    NewTokens,
    attend_float8,
    attend_latents,
    check_scales,
    scale_tensor,
    unfold,
)
from attnops.nn.rotary import RotaryEmbedding, rope_of
from attnops.ops import attention, varlen_attention
from attnops.ops.latent.absorb_or_expand import kernel_for


class LatentAttention(nn.Module):
    """Multi-head latent attention, https://arxiv.org/abs/2405.04434, section 2.1 and appendix C.
    Dense, packed, jagged or paged.

    Dense and packed calls unfold the latents into keys and values; a paged call takes the cheaper
    way (`attnops.nn.attend_latents`). Parameters have the names of Hugging Face's
    DeepseekV2Attention and DeepseekV3Attention, so that their weights load.

    Args:
        hidden_size: E of input and output.
        num_heads: H.
        q_lora_rank: numbers of a query's own latent; None: the query is projected at once.
        kv_lora_rank: Dc.
        qk_nope_head_dim, qk_rope_head_dim, v_head_dim: numbers of a head's key without and with
            position, and of its value.
        rope: a RotaryEmbedding of qk_rope_head_dim, or None. DeepSeek's weights need an interleaved
            one.
        norm_eps: epsilon of the latents' RMS norms.
        bias: do the projections to the latents and the output projection have one?
        scale: factor on the scores; default `rope.softmax_scale() / sqrt(qk_nope_head_dim +
            qk_rope_head_dim)`.
        absorb: in a paged call whose batch describes its cached tokens, the most new tokens of a
            request for which the latents are not unfolded; "auto": as many as make it cheaper
            (`attnops.explain` shows the figure).
        dropout: as in `Attention`.
        kernel: force a kernel by name, on the attention ops that have one of that name; None lets
            attnops choose.
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
        *,
        q_lora_rank: int | None = None,
        kv_lora_rank: int = 512,
        qk_nope_head_dim: int = 128,
        qk_rope_head_dim: int = 64,
        v_head_dim: int = 128,
        rope: RotaryEmbedding | None = None,
        norm_eps: float = 1e-6,
        bias: bool = False,
        scale: float | None = None,
        absorb: str | int = "auto",
        dropout: float = 0.0,
        kernel: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = check.size("hidden_size", hidden_size)
        self.num_heads = check.size("num_heads", num_heads)
        self.dims = LatentDims(
            check.size("qk_nope_head_dim", qk_nope_head_dim),
            check.size("qk_rope_head_dim", qk_rope_head_dim),
            check.size("kv_lora_rank", kv_lora_rank),
            check.size("v_head_dim", v_head_dim),
        )
        self.rope = rope_of(rope, "qk_rope_head_dim", qk_rope_head_dim)
        self.head_dim = qk_nope_head_dim + qk_rope_head_dim
        usual = self.head_dim**-0.5 * (1.0 if rope is None else rope.softmax_scale())
        self.scale = usual if scale is None else check.number("scale", scale, -3e38, 3e38)
        known = absorb == "auto" or (type(absorb) is int and absorb >= 0)
        need(known, "absorb", repr(absorb), "'auto' or an int >= 0 (tokens)")
        self.absorb_up_to = absorb if isinstance(absorb, int) else None
        self.dropout = check.number("dropout", dropout, 0.0, 1.0)
        self.kernel = kernel
        eps = check.number("norm_eps", norm_eps, 0.0)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        wide = num_heads * self.head_dim
        if q_lora_rank is None:
            self.q_proj = nn.Linear(hidden_size, wide, bias=False, **made)
        else:
            self.q_a_proj = nn.Linear(
                hidden_size, check.size("q_lora_rank", q_lora_rank), bias=bias, **made
            )
            self.q_a_layernorm = nn.RMSNorm(q_lora_rank, eps=eps, **made)
            self.q_b_proj = nn.Linear(q_lora_rank, wide, bias=False, **made)
        self.q_lora_rank = q_lora_rank
        self.kv_a_proj_with_mqa = nn.Linear(
            hidden_size, kv_lora_rank + qk_rope_head_dim, bias=bias, **made
        )
        self.kv_a_layernorm = nn.RMSNorm(kv_lora_rank, eps=eps, **made)
        self.kv_b_proj = nn.Linear(
            kv_lora_rank, num_heads * (qk_nope_head_dim + v_head_dim), bias=False, **made
        )
        self.o_proj = nn.Linear(num_heads * v_head_dim, hidden_size, bias=bias, **made)

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
        latent_pages: Tensor | None = None,
        kv_scale: Tensor | None = None,
        float8_scales: tuple[float, float] | None = None,
    ) -> Tensor:
        """Attend, causally.

        Args:
            hidden: `[B, S, E]` dense, or `[T, E]` packed (with cu_seqlens int32 `[B + 1]` and
                max_seqlen in tokens) or paged (with batch and latent_pages), or a jagged nested
                tensor `[B, j, E]` (max_seqlen is then optional, as in `Attention.forward`).
            positions: int `[S]` or `[B, S]`, or `[T]`, for RoPE. Default: from 0 in each request,
                or the batch's.
            mask: as the op takes it (`attnops.attention`, `varlen_attention`, `mla_attention`),
                e.g. of a tree of drafts over pages; none with float8_scales.
            kv_start, kv_end: dense: int `[B]`, keys outside are invisible.
            batch: from the cache. No gradient: call it under torch.no_grad().
            latent_pages: this layer's, `[P, page, Dc + Dr]`, written; the layer's dtype, or
                float8_e4m3fn or int8 with kv_scale.
            kv_scale: float32 `[1]`, or None.
            float8_scales: (q_scale, kv_scale), host floats, in place of kv_scale, for float8_e4m3fn
                pages: a decode step, whose batch does not describe its cached tokens, quantises the
                queries, too (`attend_float8`). Compiled graphs specialise on them.

        Returns:
            As hidden.

        Raises:
            InvalidInput, NoGradient, UnknownKernel, NoKernel: as in `Attention.forward`.
        """
        drops = self.training and self.dropout > 0
        others = positions, mask, kv_start, kv_end, cu_seqlens, max_seqlen
        step = not drops and self._is_step(hidden, batch, latent_pages, others)
        if step and batch is not None and latent_pages is not None:
            at = batch.positions
            return self._paged(hidden, at, batch, latent_pages, kv_scale, float8_scales)
        if check.nested(hidden):
            check.absent("with a nested tensor, which says it", cu_seqlens=cu_seqlens, batch=batch)
            if drops:
                refuse(self.dropout, hidden=("a nested tensor", "a plain tensor"))
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
                    latent_pages=latent_pages,
                    kv_scale=kv_scale,
                    float8_scales=float8_scales,
                )
            )
        dense = check.kind_of_call(
            "cu_seqlens",
            cu_seqlens,
            batch,
            dense={"kv_start": kv_start, "kv_end": kv_end},
            packed={"max_seqlen": max_seqlen},
            paged={
                "latent_pages": latent_pages,
                "kv_scale": kv_scale,
                "float8_scales": float8_scales,
            },
        )
        if drops:
            refuse(
                self.dropout,
                batch=(batch and "a batch", None),
                cu_seqlens=(cu_seqlens, None),
                kv_start=(kv_start, None),
                kv_end=(kv_end, None),
                kernel=(self.kernel, None),
            )
        hidden = check.hidden_states(hidden, self.hidden_size, dense)
        at = check.positions_of(hidden, positions, cu_seqlens, batch)
        if batch is not None and latent_pages is not None:
            if float8_scales is not None:
                check.absent("with float8_scales", mask=mask)
            check.tensor("latent_pages", latent_pages, "[P, page, Dc + Dr]", 3)
            return self._paged(hidden, at, batch, latent_pages, kv_scale, float8_scales, mask)
        q_nope, q_pe, latent, k_pe = self._project(hidden, at)
        query = torch.cat([q_nope, q_pe], -1)
        key, value = unfold(self.dims, q_nope.shape[-2], latent, k_pe, self.kv_b_proj)
        if drops:
            return self._out(
                dropped(query, key, value, self.dropout, scale=self.scale, causal=True, mask=mask)
            )
        if cu_seqlens is None:
            return self._out(
                attention(
                    query,
                    key,
                    value,
                    scale=self.scale,
                    causal=True,
                    mask=mask,
                    kv_start=kv_start,
                    kv_end=kv_end,
                    kernel=kernel_for("attention", self.kernel),
                )
            )
        most = check.longest("max_seqlen", max_seqlen, "cu_seqlens")
        return self._out(
            varlen_attention(
                query,
                key,
                value,
                cu_seqlens,
                cu_seqlens,
                max_seqlen_q=most,
                max_seqlen_k=most,
                scale=self.scale,
                causal=True,
                mask=mask,
                kernel=kernel_for("varlen_attention", self.kernel),
            )
        )

    def _is_step(self, hidden: Any, batch: Any, pages: Any, others: tuple[Any, ...]) -> bool:
        """Is an eager call one of a step over pages that the checks of `forward` would pass?
        others: arguments that such a call does not have. A compiler is not asked: the checks tell
        it which sizes are constants."""
        if torch.compiler.is_compiling() or any(each is not None for each in others):
            return False
        if type(batch) is not PagedBatch or type(hidden) is not Tensor or type(pages) is not Tensor:
            return False
        if hidden.is_nested or hidden.dim() != 2 or pages.dim() != 3:
            return False
        return hidden.shape[1] == self.hidden_size

    def _paged(
        self,
        hidden: Tensor,
        at: Tensor,
        batch: PagedBatch,
        latent_pages: Tensor,
        kv_scale: Tensor | None,
        float8_scales: tuple[float, float] | None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """A step over pages, whose arguments are checked. at: the position of each token."""
        if float8_scales is not None:
            rope = self._rope_of_float8(latent_pages, kv_scale, float8_scales)
            if batch.prefix is None:
                new = self._project(hidden, None)
                return self._out(
                    attend_float8(
                        self.dims,
                        new,
                        self.kv_b_proj,
                        rope,
                        at,
                        latent_pages,
                        batch,
                        scale=self.scale,
                        scales=float8_scales,
                        kernel=self.kernel,
                    )
                )
            kv_scale = scale_tensor(float8_scales[1], hidden)
        return self._out(
            attend_latents(
                self.dims,
                self._project(hidden, at),
                self.kv_b_proj,
                latent_pages,
                batch,
                scale=self.scale,
                kv_scale=kv_scale,
                absorb_up_to=self.absorb_up_to,
                mask=mask,
                kernel=self.kernel,
            )
        )

    def _out(self, attended: Tensor) -> Tensor:
        out: Tensor = self.o_proj(attended.flatten(-2))
        return out

    def _project(self, hidden: Tensor, positions: Tensor | None) -> NewTokens:
        """The tokens of `hidden` `[..., T, E]`, with all leading dims; rotated if positions are
        given."""
        d = self.dims
        both = self.kv_a_proj_with_mqa(hidden)
        query = (
            self.q_proj(hidden)
            if self.q_lora_rank is None
            else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden)))
        )
        # A shard of the layer has fewer heads than the layer.
        query = query.view(*hidden.shape[:-1], query.shape[-1] // self.head_dim, self.head_dim)
        q_nope, q_pe = query.split([d.nope, d.rope], -1)
        latent, k_pe = both.split([d.latent, d.rope], -1)
        # Autocast norms in float32 and the ops take one dtype.
        latent = self.kv_a_layernorm(latent).to(both.dtype)
        if self.rope is not None and positions is not None:
            q_pe, turned = self.rope(q_pe, k_pe[..., None, :], positions)
            k_pe = turned[..., 0, :]
        return NewTokens(q_nope, q_pe, latent, k_pe)

    def _rope_of_float8(
        self, latent_pages: Tensor, kv_scale: Tensor | None, scales: tuple[float, float]
    ) -> RotaryEmbedding:
        check.absent("with float8_scales", kv_scale=kv_scale)
        check_scales(
            "float8_scales", scales, "(q_scale, kv_scale), finite host floats > 0, or None"
        )
        stored = latent_pages.dtype
        need(
            stored == torch.float8_e4m3fn,
            "latent_pages.dtype",
            stored,
            "float8_e4m3fn, because float8_scales is given",
        )
        if self.rope is None:
            fail(InvalidInput, "float8_scales", scales, "None: this layer has no rope to fuse with")
        return self.rope

    def extra_repr(self) -> str:
        d = self.dims
        return check.shown(
            f"{self.hidden_size}",
            f"{self.num_heads}",
            q_lora_rank=(self.q_lora_rank, None),
            kv_lora_rank=(d.latent, 0),
            qk_nope_head_dim=(d.nope, 0),
            qk_rope_head_dim=(d.rope, 0),
            v_head_dim=(d.v, 0),
            absorb=(self.absorb_up_to, None),
            dropout=(self.dropout, 0.0),
            kernel=(self.kernel, None),
        )
