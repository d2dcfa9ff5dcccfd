"""How far from the exact result a kernel over pages may be: as in `attnops.ops.attention.bound`.

A decode step that norms and rotates by itself rounds query and new key to the dtype after that.
Their figures are those of the exact ones, and r = u + a (sqrt(D) + 8) is the error of a number as a
share of its head's length:

    delta(logit) = (a (sqrt(D) + 4) + 2 r) L        delta(stored key) = r max|k|
"""

from __future__ import annotations

from typing import Any

import torch

from attnops.core.rounding import Allowed, Compared, Results, in_float64, roundoff, stored
from attnops.ops.attention.bound import Figures, norm
from attnops.ops.pages.decode_reference import turned


def _keys(call: Any) -> int:
    pages: int = call.page_table.shape[1] * call.k_pages.shape[1]
    return pages


def _paged(call: Any, expected: Results) -> Allowed:
    return Figures(
        call, call.query, call.v_pages, _keys(call), norm(call.query) * norm(call.k_pages)
    ).allowed(expected)


def _step(call: Any, expected: Results) -> Allowed:
    query, key = map(norm, turned(in_float64(call)))
    value = torch.cat([call.v_pages.flatten(), call.value.flatten()])
    figures = Figures(call, call.query, value, _keys(call), query * max(key, norm(call.k_pages)))
    once = figures.u + figures.a * (figures.root_d + 8)
    figures.delta += 2 * once * figures.logit
    return figures.allowed(expected) | {"k_pages": key * once}


def _rotated(call: Any, expected: Results) -> Allowed:
    dtype, root = call.query.dtype, call.query.shape[2] ** 0.5
    once = roundoff(dtype) + min(roundoff(dtype), roundoff(torch.float32)) * (root + 8)
    query, key = map(norm, turned(in_float64(call)))
    return {"turned_query": query * once, "turned_key": key * once, "k_pages": key * once}


def _written(call: Any, results: Results) -> Compared:
    """Of the rows that are stored: within half a step."""
    compared = {}
    for pages, rows, scale in (
        ("k_pages", call.key, call.k_scale),
        ("v_pages", call.value, call.v_scale),
    ):
        exact = rows[call.slots >= 0].double()
        exact = exact if scale is None else exact / scale.double().reshape(-1, 1)
        compared[pages] = (results[pages].double(), *stored(exact, results[pages].dtype))
    return compared


def _private(call: Any, results: Results) -> Compared:
    """A plan is private to its kernel."""
    return {}


BOUNDS = {
    "paged_attention": _paged,
    "decode_attention": _step,
    "rotate_and_write_kv": _rotated,
}
COMPARED = {"write_kv": _written, "plan_paged_attention": _private, "plan_mla_attention": _private}
