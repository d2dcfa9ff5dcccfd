"""Attention over pages of latents (MLA), one op for decode and extend, the write into the pages,
and the step before float8 calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.core import eager_cache
from attnops.core.eager_cache import key_for
from attnops.core.errors import InvalidInput, fail
from attnops.core.op import Op, define
from attnops.core.record import (
    FLOAT32,
    FLOATS,
    INDEX,
    INT32,
    KW_ONLY,
    QUERY,
    Call,
    Result,
    Sizes,
    arg,
    name,
    need,
    record,
)
from attnops.core.tensors import Rules
from attnops.ops import rules, typical
from attnops.ops.latent import reference, rope_reference
from attnops.ops.metadata.record import whole, with_named_pages

STORED = (torch.float8_e4m3fn, torch.int8)
"""The quantised dtypes of latents."""

WRITE_SIZES = {"head_dim": "Dc + Dr", "v_head_dim": "Dc", "kv_heads": "1"}
SIZES = {**WRITE_SIZES, "q_heads": "H"}
WRITE_LEAST = {"page": ">= 1 token a page", "Dc": ">= 1", "Dr": ">= 1"}
LEAST = {**WRITE_LEAST, "H": ">= 1 head"}


def check_stored(latent_pages: Tensor, kv_scale: Tensor | None, dtype: torch.dtype) -> None:
    """Latents have `dtype`, or a quantised one that comes with its scale."""
    if latent_pages.dtype in STORED:
        if kv_scale is None:
            fail(
                InvalidInput,
                "kv_scale",
                "None",
                f"a scale, because the latents are {name(latent_pages.dtype)}",
            )
    elif latent_pages.dtype != dtype:
        want = f"{name(dtype)} | " if dtype in FLOATS else ""
        fail(
            InvalidInput,
            "latent_pages.dtype",
            name(latent_pages.dtype),
            want + " | ".join(map(name, STORED)),
        )


def _write_rules(call: Any, sizes: Sizes) -> None:
    latent, pages, scale = call.latent, call.latent_pages, call.kv_scale
    if latent.dtype not in STORED:
        check_stored(pages, scale, latent.dtype)
        return
    own = name(latent.dtype)
    if pages.dtype != latent.dtype:
        fail(
            InvalidInput,
            "latent_pages.dtype",
            name(pages.dtype),
            f"{own}, as the latents, which are stored as they are",
        )
    if scale is not None:
        fail(InvalidInput, "kv_scale", "a tensor", f"None, because the latents are {own} already")


@record(
    "write_latent",
    least=WRITE_LEAST,
    rules=_write_rules,
    problem={**WRITE_SIZES, "kv_dtype": "latent_pages"},
)
class WriteLatent(Call):
    """The write of new latents and rotated keys into pages."""

    latent: Tensor = arg("T, Dc", (*FLOATS, *STORED), unit_stride=True, holds="new_keys")
    k_pe: Tensor = arg("T, Dr", "latent", unit_stride=True, holds="new_keys")
    latent_pages: Tensor = arg(
        "P, page, Dc + Dr", (*FLOATS, *STORED), written=True, unit_stride=True, holds="pages"
    )
    slots: Tensor = arg("T", INDEX, holds="slots_of_tokens")
    kv_scale: Tensor | None = rules.LATENT_SCALE


WRITE_LATENT = define(
    Op(
        WriteLatent,
        reference.write_latent,
        about="write of new latents and rotated keys into pages",
        typical=(typical.LATENT_WRITE,),
        shown=typical.SHOWN[:2],
    )
)


def write_latent(
    latent: Tensor,
    k_pe: Tensor,
    latent_pages: Tensor,
    slots: Tensor,
    *,
    kv_scale: Tensor | None = None,
    kernel: str | None = None,
) -> None:
    """Write new latents and their rotated keys into their slots, in place. No gradient.

    Args:
        latent, k_pe: `[T, Dc]`, `[T, Dr]`, float, the latent after its norm and the key after its
            rotation. Or float8_e4m3fn/int8, quantised already (by `rope_quantize_latent`): stored
            as they are.
        latent_pages: `[P, page, Dc + Dr]`, written. The latent's dtype, or float8_e4m3fn/int8 with
            kv_scale for float latents.
        slots: int32 or int64 `[T]`, `page_id * page_size + offset`; a negative slot skips the
            token. Distinct among written tokens.
        kv_scale: float32 `[1]`; the op divides by it, saturates and rounds. None for latents that
            are quantised already.

    Raises:
        InvalidInput: a shape, dtype or device breaks this contract. NoGradient: an input requires
            grad in grad mode.
    """
    WRITE_LATENT(
        WriteLatent(
            latent, k_pe, latent_pages, slots, kv_scale, policy=key_for("write_latent", kernel)
        )
    )


def query_rules(call: Any) -> None:
    """A quantised query brings its scale, and its plan comes from a plan op."""
    rules.q_scale(call.q_nope, call.q_scale)
    rules.plan(call)


def _rules(call: Any, sizes: Sizes) -> None:
    query_rules(call)
    check_stored(call.latent_pages, call.kv_scale, call.q_nope.dtype)


def facts(call: Any, sizes: Sizes) -> dict[str, Any]:
    """How pages lie in memory."""
    _, page, numbers = call.latent_pages.shape
    apart, *within = call.latent_pages.stride()
    in_rows = within == [numbers, 1] and apart % numbers == 0
    return {"pages_packed": in_rows and apart == page * numbers, "pages_in_rows": in_rows}


def output_dtypes(call: Any) -> tuple[torch.dtype, ...]:
    """The query's, or any float dtype for a quantised query."""
    return FLOATS if call.q_nope.dtype in STORED else (call.q_nope.dtype,)


def fresh_output(q_nope: Tensor) -> Tensor:
    """An output to write into, bfloat16 for a quantised query."""
    eager_cache.tensors(q_nope=q_nope)
    return torch.empty(
        q_nope.shape,
        dtype=torch.bfloat16 if q_nope.dtype in STORED else q_nope.dtype,
        device=q_nope.device,
    )


@record(
    "mla_attention",
    least=LEAST,
    rules=_rules,
    facts=facts,
    problem={**SIZES, "context": "max_pages * page", "kv_dtype": "latent_pages"},
    sums=True,
)
class MlaAttention(rules.Queries):
    """Attention of new tokens over pages that hold their latents."""

    q_nope: Tensor = arg("T, H, Dc", QUERY, unit_stride=True, holds="queries")
    q_pe: Tensor = arg("T, H, Dr", "q_nope", unit_stride=True, holds="queries")
    latent_pages: Tensor = arg(
        "P, page, Dc + Dr", (*FLOATS, *STORED), unit_stride=True, holds="pages"
    )
    page_table: Tensor = arg("B, max_pages", INT32, holds="page_ids")
    seq_lens: Tensor = arg("B", INT32, holds="lengths_of_keys")
    cu_seqlens_q: Tensor = arg("B + 1", INT32, holds="starts_of_queries")
    mask: Tensor | None = rules.MASK_OF_PAGES
    sinks: Tensor | None = rules.LATENT_SINK_LOGITS
    q_scale: Tensor | None = rules.LATENT_QUERY_SCALE
    kv_scale: Tensor | None = rules.LATENT_SCALE
    plan: Tensor | None = rules.PLAN
    _: KW_ONLY
    scale: float = arg(holds="scale_of_logits")
    causal: bool = arg(default=True, facts=rules.CAUSAL)
    window_left: int = rules.LEFT
    softcap: float = rules.CAP
    holes: bool = arg(default=True, hint=True, facts=rules.HOLES, without=with_named_pages)
    output: Tensor = arg("T, H, Dc", output_dtypes, written=True)
    lse: Tensor | None = rules.WRITTEN_LATENT_LSE
    workspace: Tensor | None = rules.WORKSPACE


MLA = define(
    Op(
        MlaAttention,
        reference.mla_attention,
        flops="2 * T * H * max_pages * page * (2 * Dc + Dr)",
        about="attention over pages of latents (MLA), decode and extend",
        shown=(*typical.SHOWN, "decode"),
        typical=tuple(
            {**typical.SIZES, **typical.DEEPSEEK, **more, **plan, "causal": True}
            for plan in typical.PLANS
            for more in ({}, typical.DECODE, {**typical.DECODE, **typical.FLOAT8})
        ),
        per_layer=True,
    )
)


def mla_attention(
    q_nope: Tensor,
    q_pe: Tensor,
    latent_pages: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    max_seqlen_q: int,
    scale: float,
    causal: bool = True,
    window_left: int = -1,
    softcap: float = 0.0,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    q_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
    plan: Tensor | None = None,
    output: Tensor | None = None,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
    holes: bool = True,
    kernel: str | None = None,
) -> Tensor:
    """Attention of new tokens over pages that hold their latents (MLA, absorbed form). No gradient.

    Every head reads the same latents: scores = scale * (q_nope . c + q_pe . k_pe), output = P . c,
    with c the first Dc numbers of a latent and k_pe the other Dr. The caller applies W_UK to q_nope
    before and W_UV to the output after: DeepSeek-V2, https://arxiv.org/abs/2405.04434, section
    2.1.2.

    Args:
        q_nope, q_pe: `[T, H, Dc]`, `[T, H, Dr]`, the new tokens of all requests one after the
            other; float, or float8_e4m3fn with q_scale.
        latent_pages: `[P, page, Dc + Dr]`, the query's dtype, or float8_e4m3fn/int8 with kv_scale.
        scale: factor on the scores; never 1/sqrt(Dc + Dr), hence no default. DeepSeek-V3:
            1/sqrt(128 + 64) times YaRN's mscale squared.
        window_left: keys further back than this are not seen; -1: unbounded, and so is 2**30 or
            more.
        q_scale, kv_scale: float32 `[1]`, factors on the stored query and the stored latents.
        page_table, seq_lens, cu_seqlens_q, max_seqlen_q, causal: as in `paged_attention`.
        softcap, mask, sinks, plan, workspace, holes, kernel: as in `paged_attention`.
        output: `[T, H, Dc]` to write into, of the query's dtype, or any float dtype for a quantised
            query; allocated when None (bfloat16 for a quantised query). lse: float32 `[T, H]`,
            natural log, to write into, or None.

    Returns:
        `output`. A token without keys, and tokens past `cu_seqlens_q[B]`, give 0 and lse -inf.

    Raises:
        InvalidInput: a shape, dtype, device or number breaks this contract. NoGradient: an input
            requires grad. UnknownKernel, NoKernel.
    """
    if output is None:
        output = fresh_output(q_nope)
    if mask is not None:
        eager_cache.mask(mask)
    window_left = eager_cache.side(window_left)
    if holes and plan is None and torch.compiler.is_compiling():
        seen = Rules(0.0, causal, window_left)
        page_table, seq_lens, holes = whole(
            latent_pages, page_table, seq_lens, cu_seqlens_q, mask, seen
        )
    MLA(
        MlaAttention(
            q_nope,
            q_pe,
            latent_pages,
            page_table,
            seq_lens,
            cu_seqlens_q,
            mask,
            sinks,
            q_scale,
            kv_scale,
            plan,
            max_seqlen_q=max_seqlen_q,
            scale=scale,
            causal=causal,
            window_left=window_left,
            softcap=softcap,
            holes=holes,
            policy=key_for("mla_attention", kernel),
            output=output,
            lse=lse,
            workspace=workspace,
        )
    )
    return output


def _rope_rules(call: Any, sizes: Sizes) -> None:
    need(sizes["Dr"] % 2 == 0, "q_pe.shape[2]", sizes["Dr"], "even: it is turned in pairs")
    for field, scale in (("q_scale", call.q_scale), ("kv_scale", call.kv_scale)):
        need(scale > 0, field, scale, "a finite number > 0")


RESULTS = (
    Result("query", "T, H, Dc + Dr", rope_reference.STORED),
    Result("row", "T, Dc + Dr", rope_reference.STORED),
)
ROPE_LEAST = {"H": ">= 1 head", "Dc": ">= 1", "Dr": ">= 2"}
ROPE_FACTS = {"kv_dtype": rope_reference.STORED, "kv_scales": True}


@record(
    "rope_quantize_latent",
    *RESULTS,
    least=ROPE_LEAST,
    rules=_rope_rules,
    facts=ROPE_FACTS,
    problem=SIZES,
)
class RopeQuantizeLatent(Call):
    """Rotation, quantisation and joining of queries and latents."""

    q_nope: Tensor = arg("T, H, Dc", FLOATS, unit_stride=True, holds="queries")
    q_pe: Tensor = arg("T, H, Dr", "q_nope", unit_stride=True, holds="queries")
    latent: Tensor = arg("T, Dc", "q_nope", unit_stride=True, holds="new_keys")
    k_pe: Tensor = arg("T, Dr", "q_nope", unit_stride=True, holds="new_keys")
    cos_sin: Tensor = arg("N, Dr", FLOAT32)
    positions: Tensor = arg("T", INDEX)
    _: KW_ONLY
    q_scale: float = arg(default=1.0, always=True, holds="scale_of_query")
    kv_scale: float = arg(default=1.0, always=True, holds="scale_of_keys")
    interleaved: bool = False


ABOUT = "rotation, quantisation and joining of queries and latents (MLA)"
ROPE_QUANTIZE = define(
    Op(
        RopeQuantizeLatent,
        rope_reference.rope_quantize_latent,
        about=ABOUT,
        typical=({**typical.DEEPSEEK, **ROPE_FACTS, "page_size": 0, **typical.NEW},),
    )
)


def rope_quantize_latent(
    q_nope: Tensor,
    q_pe: Tensor,
    latent: Tensor,
    k_pe: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    *,
    q_scale: float = 1.0,
    kv_scale: float = 1.0,
    interleaved: bool = False,
    kernel: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """New queries and latents rotated and quantised to float8_e4m3fn, for attention over float8
    pages. Pure. No gradient.

    A pair (a, b) of q_pe and k_pe becomes (a cos - b sin, b cos + a sin), with the cosine and sine
    of its token's position; then all four are divided by their scale, saturated and rounded, with
    no rounding in between.

    Args:
        q_nope, q_pe: `[T, H, Dc]`, `[T, H, Dr]`, float, W_UK applied to the first, the second not
            rotated yet. Dr is even.
        latent, k_pe: `[T, Dc]`, `[T, Dr]`, the query's dtype: the latent after its norm, the key
            not rotated yet.
        cos_sin: float32 `[N, Dr]`; row p has the Dr / 2 cosines of position p, then its sines,
            YaRN's mscale included if there is one.
        positions: int32 or int64 `[T]`, in `[0, N)`, padding included. The rotated parts of a token
            outside are NaN; `flashinfer_rope` does not check, and reads the memory there.
        q_scale, kv_scale: host floats > 0, factors on the stored values, as `mla_attention` takes
            them in tensors. (FlashInfer's quant_scale_q and quant_scale_kv are their inverses.)
        interleaved: pairs are neighbours (2i, 2i + 1), as in DeepSeek's weights; False: (i, i + Dr
            / 2). A pair stays in its place.
        kernel: force a kernel by name for this call.

    Returns:
        (q_nope, q_pe, latent, k_pe) in float8_e4m3fn, `[T, H, Dc]`, `[T, H, Dr]`, `[T, Dc]`,
        `[T, Dr]`. The first two are views of one `[T, H, Dc + Dr]`, the last two of one
        `[T, Dc + Dr]`. `write_latent` takes the latents without a scale.

    Raises:
        InvalidInput: a shape, dtype, device or number breaks this contract. NoGradient: an input
            requires grad. UnknownKernel, NoKernel.
    """
    for field, scale in (("q_scale", q_scale), ("kv_scale", kv_scale)):
        if isinstance(scale, Tensor):  # torch would make a number of it, and wait for the device
            fail(InvalidInput, field, "a tensor", "a finite number > 0, of the host")
    query, row = ROPE_QUANTIZE(
        RopeQuantizeLatent(
            q_nope,
            q_pe,
            latent,
            k_pe,
            cos_sin,
            positions,
            q_scale=q_scale,
            kv_scale=kv_scale,
            interleaved=interleaved,
            policy=key_for("rope_quantize_latent", kernel),
        )
    )
    dims = q_nope.shape[-1]
    return query[..., :dims], query[..., dims:], row[..., :dims], row[..., dims:]
