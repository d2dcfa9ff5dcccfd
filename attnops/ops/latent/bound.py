"""How far from the exact result a kernel on latents may be: as in `attnops.ops.attention.bound`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.core.arguments import QUANTISED
from attnops.core.rounding import Allowed, Compared, Results, in_float64, roundoff, stored
from attnops.ops.attention.bound import Figures, norm
from attnops.ops.latent.rope_reference import scaled


def latents(call: Any, expected: Results, pages: Tensor, keys: int) -> Allowed:
    """Of attention over `pages` of latents. keys: the most that a query sees."""
    query, dtype = torch.cat([call.q_nope.double(), call.q_pe.double()], -1), call.q_nope.dtype
    u = roundoff(call.output.dtype if dtype in QUANTISED else dtype)
    return Figures(
        call, query, pages[..., : call.q_nope.shape[-1]], keys, norm(query) * norm(pages), u
    ).allowed(expected)


def _mla(call: Any, expected: Results) -> Allowed:
    return latents(
        call, expected, call.latent_pages, call.page_table.shape[1] * call.latent_pages.shape[1]
    )


def _written(call: Any, results: Results) -> Compared:
    """Of the rows that are stored: within half a step, and unchanged where they are quantised
    already."""
    got, real = results["latent_pages"], call.slots >= 0
    exact = torch.cat([call.latent[real].double(), call.k_pe[real].double()], -1)
    exact = exact if call.kv_scale is None else exact / call.kv_scale.double().reshape(-1, 1)
    return {
        "latent_pages": (
            got.double(),
            *stored(exact, torch.float64 if call.latent.dtype == got.dtype else got.dtype),
        )
    }


def _rotated(call: Any, results: Results) -> Compared:
    """Within half a step, plus float32's rounding of the rotation."""
    parts, compared = scaled(in_float64(call)), {}
    for (name, got), exact in zip(
        results.items(), (torch.cat(parts[:2], -1), torch.cat(parts[2:], -1)), strict=True
    ):
        want, allowed = stored(exact, got.dtype)
        # A rotation keeps the length of a pair, so the largest number bounds the terms of its sums.
        compared[name] = got.double(), want, allowed + 2.0**-21 * exact.abs().amax(-1, keepdim=True)
    return compared


BOUNDS = {"mla_attention": _mla}
COMPARED = {"write_latent": _written, "rope_quantize_latent": _rotated}
