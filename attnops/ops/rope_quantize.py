"""Rotation, quantisation and joining of queries and latents in one op: the step before latent attention in float8."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attnops.call import FLOAT32, FLOATS, INDEX, KW_ONLY, Call, Result, Sizes, arg, need, record
from attnops.errors import InvalidInput, fail
from attnops.ops.mla import SIZES
from attnops.ops.op import Op, define
from attnops.ops.rules import key_for
from attnops.reference import rope_quantize


def _rules(call: Any, sizes: Sizes) -> None:
    need(sizes["Dr"] % 2 == 0, "q_pe.shape[2]", sizes["Dr"], "even: it is turned in pairs")
    for field, scale in (("q_scale", call.q_scale), ("kv_scale", call.kv_scale)):
        need(scale > 0, field, scale, "a finite number > 0")


RESULTS = (Result("query", "T, H, Dc + Dr", rope_quantize.STORED), Result("row", "T, Dc + Dr", rope_quantize.STORED))
LEAST = {"H": ">= 1 head", "Dc": ">= 1", "Dr": ">= 2"}
FACTS = {"kv_dtype": rope_quantize.STORED, "kv_scales": True}


@record("rope_quantize_latent", *RESULTS, least=LEAST, rules=_rules, facts=FACTS, problem=SIZES)
class RopeQuantizeLatent(Call):
    """Rotation, quantisation and joining of queries and latents."""

    q_nope: Tensor = arg("T, H, Dc", FLOATS, unit_stride=True)
    q_pe: Tensor = arg("T, H, Dr", "q_nope", unit_stride=True)
    latent: Tensor = arg("T, Dc", "q_nope", unit_stride=True)
    k_pe: Tensor = arg("T, Dr", "q_nope", unit_stride=True)
    cos_sin: Tensor = arg("N, Dr", FLOAT32)
    positions: Tensor = arg("T", INDEX)
    _: KW_ONLY
    q_scale: float = arg(default=1.0, always=True)
    kv_scale: float = arg(default=1.0, always=True)
    interleaved: bool = False


ABOUT = "rotation, quantisation and joining of queries and latents (MLA)"
ROPE_QUANTIZE = define(Op(RopeQuantizeLatent, rope_quantize.rope_quantize_latent, about=ABOUT))


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
        positions: int32 or int64 `[T]`, in `[0, N)`, padding included. The rotated parts of a token outside are NaN;
            `flashinfer_rope` does not check, and reads the memory there.
        q_scale, kv_scale: host floats > 0, factors on the stored values, as `mla_attention` takes them in tensors. (FlashInfer's
            quant_scale_q and quant_scale_kv are their inverses.)
        interleaved: pairs are neighbours (2i, 2i + 1), as in DeepSeek's weights; False: (i, i + Dr / 2). A pair stays in its place.
        kernel: force a kernel by name for this call.

    Returns:
        (q_nope, q_pe, latent, k_pe) in float8_e4m3fn, `[T, H, Dc]`, `[T, H, Dr]`, `[T, Dc]`, `[T, Dr]`. The first two are views of one
        `[T, H, Dc + Dr]`, the last two of one `[T, Dc + Dr]`. `write_latent` takes the latents without a scale.

    Raises:
        InvalidInput: a shape, dtype, device or number breaks this contract. NoGradient: an input requires grad. UnknownKernel, NoKernel.
    """
    for name, scale in (("q_scale", q_scale), ("kv_scale", kv_scale)):
        if isinstance(scale, Tensor):  # torch would make a number of it, and wait for the device
            fail(InvalidInput, name, "a tensor", "a finite number > 0, of the host")
    query, row = ROPE_QUANTIZE(RopeQuantizeLatent(
        q_nope, q_pe, latent, k_pe, cos_sin, positions, q_scale=q_scale, kv_scale=kv_scale, interleaved=interleaved,
        policy=key_for("rope_quantize_latent", kernel),
    ))  # fmt: skip
    dims = q_nope.shape[-1]
    return query[..., :dims], query[..., dims:], row[..., :dims], row[..., dims:]
