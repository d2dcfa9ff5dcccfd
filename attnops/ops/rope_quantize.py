"""Rotation, quantisation and joining of queries and latents in one op: what stands before latent attention in float8."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.errors import InvalidInput, fail
from attnops.ops import _check as check
from attnops.ops._op import Op, define, target_of
from attnops.ops.dense import _packed_last
from attnops.problem import Extent, Problem
from attnops.reference import rope_quantize
from attnops.select import key_for


def _check(
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
) -> None:
    check.tensor("q_nope", q_nope, 3, check.FLOATS, "[T, H, Dc]")
    check.tensor("q_pe", q_pe, 3, (q_nope.dtype,), "[T, H, Dr]")
    check.tensor("latent", latent, 2, (q_nope.dtype,), "[T, Dc]")
    check.tensor("k_pe", k_pe, 2, (q_nope.dtype,), "[T, Dr]")
    check.tensor("cos_sin", cos_sin, 2, (torch.float32,), "[N, Dr]")
    check.tensor("positions", positions, 1, check.INDEX, "[T]")
    check.same_device(q_nope, q_pe=q_pe, latent=latent, k_pe=k_pe, cos_sin=cos_sin, positions=positions)
    for field, value in (("q_pe", q_pe), ("latent", latent), ("k_pe", k_pe), ("positions", positions)):
        check.equal(f"{field}.shape[0]", value.shape[0], q_nope.shape[0], "the tokens of q_nope")
    check.equal("q_pe.shape[1]", q_pe.shape[1], q_nope.shape[1], "the heads of q_nope")
    check.equal("latent.shape[1]", latent.shape[1], q_nope.shape[2], "Dc, as q_nope")
    check.equal("k_pe.shape[1]", k_pe.shape[1], q_pe.shape[2], "Dr, as q_pe")
    check.equal("cos_sin.shape[1]", cos_sin.shape[1], q_pe.shape[2], "Dr, half of it cosines")
    check.need(q_nope.shape[1] >= 1, "q_nope.shape[1]", q_nope.shape[1], ">= 1 head")
    check.need(q_nope.shape[2] >= 1, "q_nope.shape[2]", q_nope.shape[2], ">= 1")
    check.need(q_pe.shape[2] >= 2, "q_pe.shape[2]", q_pe.shape[2], ">= 2")
    check.need(q_pe.shape[2] % 2 == 0, "q_pe.shape[2]", q_pe.shape[2], "even: it is turned in pairs")
    for name, scale in (("q_scale", q_scale), ("kv_scale", kv_scale)):
        if not isinstance(scale, (int, float)) or not 0 < scale < float("inf"):
            fail(InvalidInput, name, scale, "a finite number > 0")


def _fake(q_nope: Tensor, q_pe: Tensor, latent: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    tokens, heads, dim = q_nope.shape
    dim = dim + q_pe.shape[2]
    stored = rope_quantize.STORED
    return q_nope.new_empty((tokens, heads, dim), dtype=stored), latent.new_empty((tokens, dim), dtype=stored)


def _problem(q_nope: Any, q_pe: Any, latent: Any, k_pe: Any, cos_sin: Any, positions: Any, **_: Any) -> Problem:
    return Problem(
        op="rope_quantize_latent",
        target=target_of(q_nope),
        dtype=q_nope.dtype,
        kv_dtype=rope_quantize.STORED,
        q_heads=int(q_nope.shape[1]),
        kv_heads=1,
        head_dim=int(q_nope.shape[2]) + int(q_pe.shape[2]),
        v_head_dim=int(q_nope.shape[2]),
        rope_dim=int(q_pe.shape[2]),
        kv_scales=True,
        last_dim_contiguous=all(map(_packed_last, (q_nope, q_pe, latent, k_pe))),
        tokens=Extent.of(q_nope.shape[0]),
    )


ROPE_QUANTIZE = define(
    Op(
        name="rope_quantize_latent",
        schema="(Tensor q_nope, Tensor q_pe, Tensor latent, Tensor k_pe, Tensor cos_sin, Tensor positions, *, float q_scale=1.0, "
        'float kv_scale=1.0, bool interleaved=False, str policy="") -> (Tensor query, Tensor row)',
        check=_check,
        fake=_fake,
        problem=_problem,
        reference=rope_quantize.rope_quantize_latent,
        about="rotation, quantisation and joining of queries and latents (MLA)",
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
    """New queries and latents rotated and quantised to float8_e4m3fn, for attention over float8 pages. Pure. No gradient.

    A pair (a, b) of q_pe and k_pe becomes (a cos - b sin, b cos + a sin), with the cosine and sine of its token's position; then all
    four are divided by their scale, saturated and rounded, with no rounding in between.

    Args:
        q_nope, q_pe: `[T, H, Dc]`, `[T, H, Dr]`, float, W_UK applied to the first, the second not rotated yet. Dr is even.
        latent, k_pe: `[T, Dc]`, `[T, Dr]`, the query's dtype: the latent after its norm, the key not rotated yet.
        cos_sin: float32 `[N, Dr]`; row p has the Dr / 2 cosines of position p, then its sines, YaRN's mscale included if there is one.
        positions: int32 or int64 `[T]`, from 0, below N. The rotated parts of a token whose position is outside are NaN,
            eager and compiled alike; `flashinfer_rope` does not look, and reads the memory there. Tokens of padding have positions
            too: 0 will do.
        q_scale, kv_scale: host floats > 0, what the stored values are multiplied by afterwards to get the true ones: those that
            `mla_attention` is given as tensors. (FlashInfer's quant_scale_q and quant_scale_kv are their inverses.)
        interleaved: pairs are neighbours (2i, 2i + 1), as in DeepSeek's weights; False: (i, i + Dr / 2). Either way a pair stays in
            its place: interleaved in, interleaved out.
        kernel: force a kernel by name for this call.

    Returns:
        (q_nope, q_pe, latent, k_pe) in float8_e4m3fn, `[T, H, Dc]`, `[T, H, Dr]`, `[T, Dc]`, `[T, Dr]`. The first two are views of one
        `[T, H, Dc + Dr]`, the last two of one `[T, Dc + Dr]`, so that kernels that want a query in one piece copy nothing. The latents
        go to `write_latent` as they are, without a scale.

    Raises:
        InvalidInput: a shape, dtype, device or number breaks this contract. NoGradient: an input requires grad in grad mode.
        UnknownKernel, NoKernel: `kernel` cannot run.
    """
    for name, scale in (("q_scale", q_scale), ("kv_scale", kv_scale)):
        if isinstance(scale, Tensor):  # torch would make a number of it, and wait for the device
            fail(InvalidInput, name, "a tensor", "a finite number > 0, of the host")
    query, row = torch.ops.attnops.rope_quantize_latent.default(
        q_nope, q_pe, latent, k_pe, cos_sin, positions, q_scale=q_scale, kv_scale=kv_scale, interleaved=interleaved,
        policy=key_for("rope_quantize_latent", kernel),
    )  # fmt: skip
    dims = q_nope.shape[-1]
    return query[..., :dims], query[..., dims:], row[..., :dims], row[..., dims:]
