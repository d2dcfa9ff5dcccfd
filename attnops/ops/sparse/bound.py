"""How far from the exact result a kernel of sparse attention, or of a packed write, may be: as in
`attnops.ops.attention.bound`."""

from __future__ import annotations

from typing import Any

import torch

from attnops.core.rounding import Allowed, Compared, Results, stored
from attnops.ops.attention.bound import attention
from attnops.ops.latent.bound import latents
from attnops.ops.sparse.packed_format import GROUP, LEAST, TOP, unpack


def _listed(call: Any, expected: Results) -> Allowed:
    pages = call.latent_pages
    pages = (
        unpack(pages, call.q_nope.shape[-1], call.q_pe.shape[-1])
        if pages.dtype == torch.uint8
        else pages
    )
    return latents(call, expected, pages, call.indices.shape[1])


def _packed(call: Any, results: Results) -> Compared:
    """The scales are exact, numbers within half a step of theirs."""
    rows, real = results["latent_pages"], call.slots >= 0
    latent, k_pe = (x[real].double() for x in (call.latent, call.k_pe))
    groups = latent.unflatten(-1, (-1, GROUP))
    mantissa, exponent = torch.frexp(groups.abs().amax(-1) / TOP)
    scale = torch.exp2((exponent - (mantissa == 0.5).to(exponent.dtype)).clamp(min=LEAST).double())
    scale = torch.where(mantissa == 0, 2.0**LEAST, scale)
    found = (
        rows[:, latent.shape[1] : rows.shape[1] - 2 * k_pe.shape[1]]
        .clone(memory_format=torch.contiguous_format)
        .view(torch.float32)
    )
    step = (stored(groups / scale[..., None], torch.float8_e4m3fn)[1] * scale[..., None]).flatten(
        -2
    )
    numbers = unpack(rows, latent.shape[1], k_pe.shape[1], torch.float64)
    allowed = torch.cat([step, k_pe.abs() * 2.0**-8], -1)
    return {
        "scale": (found, scale, 0.0),
        "latent_pages": (numbers, torch.cat([latent, k_pe], -1), allowed),
    }


BOUNDS = {"sparse_mla_attention": _listed, "vertical_slash_attention": attention}
COMPARED = {"write_latent_packed": _packed}
