"""`flashmla` and `flashmla_fp8`: dense decode of FlashMLA inside the sgl_kernel wheel, over latents of 512 + 64 on SM90.

Called without a schedule, the raw ops make it on the device from this call's lengths: no state, no sync, and a captured graph follows
its inputs. A plan of `decode_rows` made for the call's heads holds one, and every layer starts one kernel less. Every query token is a
row of its own: the raw ops want the same number of queries of every request, and the contract lets them differ. The kernels are lowered
in place: the compiler joins the query's parts where they are made, and takes the raw op's result for the output.

The half types' kernel itself gives 0 to a row without keys, so that padding needs no pass over the output. The float8 kernel would read
before the page table of such a row, so it is given one key, whose results are dropped. The float8 kernel takes query and latents in
float8_e4m3fn. Weights are rounded to it before they meet the latents, and those below 2^-10 of the largest vanish: `tolerance` says so.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnops.kernel import Core, Inline, Kernel, Plan, Tolerance, arch, extent_at_most, one_of, register
from attnops.kernels.sgl import flashmla_schedule, wheel
from attnops.kernels.sgl.flashmla_schedule import LIBRARY, PACKAGE, few_tokens, missing
from attnops.kernels.shared.decode import adjoin, batch_by_token, blank, rows, whole
from attnops.measured import Roofline, phases
from attnops.problem import Problem

if TYPE_CHECKING:
    from attnops.ops.mla import MlaAttention

PAGE, LATENT, ROPE = 64, 512, 64
FLOAT8 = torch.float8_e4m3fn
MOST_QUERIES = 8
"""Of one request. Every token reads all keys of its request."""


def mla_attention(call: MlaAttention) -> None:
    """Both kernels. plan: from `decode_rows`, or None to make it here."""
    if blank(call):
        return
    float8 = call.q_nope.dtype == FLOAT8
    tables, lengths, schedule = batch_by_token(call, (float8,))
    given = (*adjoin(call.q_nope, call.q_pe), call.latent_pages, tables)
    if float8:
        out, z = torch.ops.attnops.mla_attention__flashmla_fp8(
            *given, lengths.clamp(min=1), schedule, call.scale, call.q_scale, call.kv_scale
        )
        out = out.masked_fill((lengths == 0)[:, None, None], 0.0)
    else:
        out, z = torch.ops.attnops.mla_attention__flashmla(*given, lengths, schedule, call.scale)
    call.output.copy_(out)
    if call.lse is not None:
        # The half types' kernel gives +inf where there is no key.
        call.lse.copy_(z.masked_fill((lengths == 0)[:, None] if float8 else z == float("inf"), float("-inf")))


def _core(
    q_nope: Tensor,
    q_pe: Tensor | None,
    latent_pages: Tensor,
    tables: Tensor,
    lengths: Tensor,
    schedule: Tensor | None,
    scale: float,
    q_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    tokens, heads = q_nope.shape[:2]
    # A single query at the last key it sees sees every key, causal or not.
    given = (whole(q_nope, q_pe)[:, None], latent_pages[:, :, None], LATENT, lengths, tables, scale, False)
    made: tuple[Any, Any] = (None, None) if schedule is None else flashmla_schedule.split(schedule, tokens, heads)
    if q_scale is None or kv_scale is None:
        wheel.load("dense_decode_fwd", LIBRARY)
        out, z, _, _ = torch.ops.sgl_kernel.dense_decode_fwd(*given, *made)
    else:
        wheel.load("fwd_kvcache_mla_fp8", LIBRARY)
        made = flashmla_schedule.made(lengths, heads, True) if schedule is None else made
        out, z = torch.ops.sgl_kernel.fwd_kvcache_mla_fp8(*given, *made, q_scale.contiguous(), kv_scale.contiguous())
    return out[:, 0], z[:, :, 0]


def _fake_core(q_nope: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    shape, dtype = q_nope.shape[:2], torch.bfloat16 if q_nope.dtype == FLOAT8 else q_nope.dtype
    return q_nope.new_empty((*shape, LATENT), dtype=dtype), q_nope.new_empty(shape, dtype=torch.float32)


CORE = Core(
    "(Tensor q_nope, Tensor? q_pe, Tensor latent_pages, Tensor tables, Tensor lengths, Tensor? schedule, float scale, "
    "Tensor? q_scale=None, Tensor? kv_scale=None) -> (Tensor output, Tensor lse)",
    _core,
    _fake_core,
)
PLANNED = phases(Roofline(23.2, 1.2, 1.1, 0.0013, 25_000), Roofline(16.3, 0.19, 1.0, 0.0046, 2700))
# No table has times of float8: as the other kernel where they are alike.
PLANNED_FP8 = Roofline(24.0, 0.75, 1.0, 0.0013, 25_000)


def _cost_us(p: Problem) -> float:
    return (PLANNED_FP8 if p.dtype == FLOAT8 else PLANNED)(p) + flashmla_schedule.cost_us(p)


for _name, _dtypes, _stored, _scales, _tolerance, _about in (
    ("flashmla", (torch.float16, torch.bfloat16), None, set[str](), Tolerance(), "FlashMLA dense decode (sgl_kernel)"),
    (
        "flashmla_fp8", (FLOAT8,), (FLOAT8,), {"q_scale", "kv_scale"}, Tolerance(16.0, rounded_sums=True),
        "FlashMLA dense decode in float8 (sgl_kernel)",
    ),
):  # fmt: skip
    register(
        Kernel(
            _name,
            "mla_attention",
            mla_attention,
            takes=frozenset({"causal", "lse"} | _scales),
            dtypes=_dtypes,
            kv_dtypes=_stored,
            needs=(
                arch(90),
                one_of("v_head_dim", LATENT),
                one_of("rope_dim", ROPE),
                one_of("page_size", PAGE),
                extent_at_most("queries", MOST_QUERIES),
                few_tokens,
                one_of("last_dim_contiguous", True),
            ),
            packages=(PACKAGE,),
            probe=missing,
            cost_us=_cost_us,
            tolerance=_tolerance,
            plan=Plan(device=partial(rows, schedule=True)),
            inline=Inline(core=CORE),
            about=_about,
        )
    )
