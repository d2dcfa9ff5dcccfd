"""Ops that move rows: a copy of keys and values between slots of all layers, and ragged queries to a rectangle and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.call import INDEX, STORED, Call, Sizes, arg, need, record
from attnops.errors import InvalidInput, fail
from attnops.ops.op import Op, define
from attnops.ops.rules import key_for
from attnops.reference import data

PAGES = (*STORED, torch.uint8)
"""What pages may hold; uint8 is that of packed latents."""


def _rules(call: Any, sizes: Sizes) -> None:
    k, v = call.k_pages, call.v_pages
    if k.dim() not in (4, 5) or (v is not None and v.dim() != k.dim()):
        field, given = ("k_pages", k) if k.dim() not in (4, 5) else ("v_pages", v)
        fail(InvalidInput, field, f"shape {tuple(given.shape)}", "[L, P, page, Hkv, D] or [L, P, page, D], as the keys")
    if v is not None and k.dim() == 5:
        need(v.shape[3] == k.shape[3], "v_pages.shape[3]", v.shape[3], f"{k.shape[3]} (Hkv, as k_pages.shape[3])")


def _facts(call: Any, sizes: Sizes) -> dict[str, Any]:
    k, v = call.k_pages, call.v_pages
    return {
        "kv_heads": int(k.shape[3]) if k.dim() == 5 else 1,
        "head_dim": int(k.shape[-1]),
        "v_head_dim": 0 if v is None else int(v.shape[-1]),
    }


@record("copy_kv", least={"page": ">= 1 token a page"}, rules=_rules, facts=_facts, problem={"tokens": "N"})
class CopyKV(Call):
    """The copy of keys and values between slots, in all layers."""

    k_pages: Tensor = arg("L, P, page, ...", PAGES, written=True, unit_stride=True)
    v_pages: Tensor | None = arg("L, P, page, ...", "k_pages", written=True, unit_stride=True)
    source: Tensor = arg("N", INDEX)
    target: Tensor = arg("N", INDEX)


COPY_KV = define(Op(CopyKV, data.copy_kv, about="copy of keys and values between slots, in all layers"))


def copy_kv(k_pages: Tensor, v_pages: Tensor | None, source: Tensor, target: Tensor, *, kernel: str | None = None) -> None:
    """Copy what slots hold into other slots, in place, in all layers (accepted drafts that move up, prefixes). No gradient.

    Everything is read before anything is written, so that a slot may be source and target at once.

    Args:
        k_pages, v_pages: `[L, P, page, Hkv, D]`, `[L, P, page, Hkv, Dv]`, one dtype, written: the pages of L layers in one tensor each.
            Latents are `[L, P, page, D]` and v_pages None. Pages of one layer are `k_pages[None]`.
        source, target: int32 or int64 `[N]`, slots `page_id * page_size + offset`. Entry i copies `source[i]` to `target[i]`; a
            negative number in either skips it. Targets are distinct among the entries that are copied.
        kernel: force a kernel by name for this call.

    Raises:
        InvalidInput: a shape, dtype or device breaks this contract. NoGradient: an input requires grad. UnknownKernel, NoKernel.
    """
    COPY_KV(CopyKV(k_pages, v_pages, source, target, policy=key_for("copy_kv", kernel)))
