"""`flashinfer_rope`: FlashInfer's kernel that rotates and quantises queries and latents (MLA), all
four parts in one launch.

It writes by strides, so that both parts of a query go side by side into one tensor, and both of a
latent: no copy joins them. It multiplies by the inverse scale where the contract divides, which
differs in float32's last bit, and saturates as it rounds.

Interleaved, its source loads eight cosines and sines more than a thread uses, past the table's end
for the last row; nvcc (13.0, for SM90: read in the PTX) drops those loads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnops.core.errors import InvalidInput
from attnops.core.kernel import Invariant, Kernel, arch, multiple_of, one_of, register
from attnops.core.problem import Problem, Refusal
from attnops.kernels.flashinfer import modules as fi
from attnops.kernels.flashinfer.libraries import PACKAGE, Library, announce, built_by
from attnops.kernels.shared.memory import aligned
from attnops.ops.latent.rope_reference import STORED

if TYPE_CHECKING:
    from attnops.ops.latent import record as mla

ARCHS = (89, 90, 100, 103, 110, 120, 121)  # that round to float8 themselves
GRID_Y, OFFSETS = 65535, 2**32


def rope_quantize_latent(call: mla.RopeQuantizeLatent) -> tuple[Tensor, Tensor]:
    q_nope, q_pe, latent, k_pe = call.q_nope, call.q_pe, call.latent, call.k_pe
    tokens, heads, dims = q_nope.shape
    both = dims + q_pe.shape[2]
    query = torch.empty((tokens, heads, both), dtype=STORED, device=q_nope.device)
    row = torch.empty((tokens, both), dtype=STORED, device=q_nope.device)
    if tokens == 0:
        return query, row
    table = call.cos_sin.contiguous()
    aligned(q_nope=q_nope, q_pe=q_pe, latent=latent, k_pe=k_pe, cos_sin=table)
    if q_nope.numel() >= OFFSETS:
        raise InvalidInput(
            "q_nope", f"{q_nope.numel()} numbers", f"< {OFFSETS}: the kernel counts them in 32 bits"
        )
    announce(LIBRARY)
    # Its functions build their module at first use.
    fi.module("rope").mla_rope_quantize_fp8(
        q_pe,
        k_pe,
        q_nope,
        latent,
        table,
        call.positions.contiguous(),
        is_neox=not call.interleaved,
        quantize_dtype=STORED,
        quant_scale_q=1.0 / call.q_scale,
        quant_scale_kv=1.0 / call.kv_scale,
        q_rope_out=query[..., dims:],
        k_rope_out=row[:, dims:],
        q_nope_out=query[..., :dims],
        k_nope_out=row[:, :dims],
    )
    return query, row


def _load() -> Any:
    from flashinfer.jit.rope import gen_rope_module

    return gen_rope_module().build_and_load()


LIBRARY = Library("rope", ("rope",), _load)


def _blocks(p: Problem) -> Refusal | None:
    """One block a head and part, and as many parts of a latent as it is times as wide as a rotated
    part."""
    parts = 1 + -(-p.v_head_dim // p.rope_dim)
    most = GRID_Y // parts - 1
    return (
        None
        if p.q_heads <= most
        else Refusal(
            "q_heads", p.q_heads, f"<= {most} of {p.v_head_dim} + {p.rope_dim} numbers each"
        )
    )


def _cost_us(p: Problem) -> float:
    """One launch, and the bytes; not measured."""
    return (
        5.0
        + max(p.sizes.tokens.hint, 1)
        * (p.q_heads + 1)
        * p.head_dim
        * (p.dtype.itemsize + 1)
        / 3.1e6
    )


NEEDS = (
    arch(*ARCHS),
    multiple_of(
        "rope_dim", 32
    ),  # a thread holds 16 numbers of a rotated part, none of them from both of its halves
    multiple_of("v_head_dim", 16),  # bytes that are stored at once
    one_of("last_dim_contiguous", True),
    _blocks,
)
register(
    Kernel(
        "flashinfer_rope",
        "rope_quantize_latent",
        rope_quantize_latent,
        takes=frozenset({"interleaved"}),
        dtypes=fi.HALVES,
        kv_dtypes=(STORED,),
        needs=NEEDS,
        packages=(PACKAGE,),
        probe=fi.missing,
        built=built_by(lambda p: (LIBRARY,)),
        cost_us=_cost_us,
        invariant=Invariant(),
        about="FlashInfer's RoPE and quantisation for MLA",
    )
)
