"""Metadata ops: pure functions of lengths and tables, so that a batch's bookkeeping is in the graph and made once a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.call import INDEX, INT32, KW_ONLY, Call, Result, Sizes, arg, need, record
from attnops.ops.op import Op, define
from attnops.reference import data
from attnops.select import active_policy

INT = INT32[0]


@record("cu_seqlens", Result("", "B + 1", INT), problem={"tokens": "B", "batch": "0"})
class CuSeqlens(Call):
    """Cumulative lengths."""

    lengths: Tensor = arg("B", INDEX)


CU_SEQLENS = define(Op(CuSeqlens, data.cu_seqlens, about="cumulative lengths"))


def cu_seqlens(lengths: Tensor) -> Tensor:
    """int32 `[B + 1]`: 0 and the running sums of lengths `[B]` (int32 or int64, tokens). Raises InvalidInput."""
    out: Tensor = CU_SEQLENS(CuSeqlens(lengths, policy=active_policy()))
    return out


def _starts(call: Any, sizes: Sizes) -> None:
    need(sizes["starts"] >= 1, "cu_seqlens.shape[0]", sizes["starts"], ">= 1")


@record("token_rows", Result("", "num_tokens", INT), rules=_starts, problem={"tokens": "starts"})
class TokenRows(Call):
    """The request of each token."""

    cu_seqlens: Tensor = arg("starts", INT32)
    _: KW_ONLY
    num_tokens: int = arg(least=0, symbolic=True)


TOKEN_ROWS = define(Op(TokenRows, data.token_rows, about="the request of each token"))


def token_rows(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """int32 `[num_tokens]`: the request of each packed token, -1 past the last. cu_seqlens: int32 `[B + 1]`. Raises InvalidInput."""
    out: Tensor = TOKEN_ROWS(TokenRows(cu_seqlens, num_tokens=num_tokens, policy=active_policy()))
    return out


@record("slot_mapping", Result("", "T", torch.int64), problem={"batch": "0"})
class SlotMapping(Call):
    """The slot of each token."""

    positions: Tensor = arg("T", INDEX)
    rows: Tensor = arg("T", INDEX)
    page_table: Tensor = arg("B, max_pages", INT32)
    _: KW_ONLY
    page_size: int = arg(least=1)


SLOT_MAPPING = define(Op(SlotMapping, data.slot_mapping, about="where in the pages each token goes"))


def slot_mapping(positions: Tensor, rows: Tensor, page_table: Tensor, *, page_size: int) -> Tensor:
    """int64 `[T]`: the slot `page_id * page_size + offset` of each token, as `write_kv` takes it.

    positions: `[T]` position of the token in its request. rows: `[T]` its request. page_table: int32 `[B, max_pages]`.
    A negative position or row, a position past the table's width, or a negative page id gives -1: not stored. Raises InvalidInput.
    """
    out: Tensor = SLOT_MAPPING(SlotMapping(positions, rows, page_table, page_size=page_size, policy=active_policy()))
    return out


@record(
    "kv_indices",
    Result("indptr", "B + 1", INT),
    Result("indices", "B * max_pages", INT),
    Result("last_page_len", "B", INT),
    problem={"tokens": "B", "batch": "0"},
)
class KVIndices(Call):
    """A page table as indptr and indices."""

    page_table: Tensor = arg("B, max_pages", INT32)
    seq_lens: Tensor = arg("B", INDEX)
    _: KW_ONLY
    page_size: int = arg(least=1)


KV_INDICES = define(Op(KVIndices, data.kv_indices, about="page table to indptr and indices"))


def kv_indices(page_table: Tensor, seq_lens: Tensor, *, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """(indptr `[B + 1]`, indices `[B * max_pages]`, last_page_len `[B]`), int32: the page table in compressed rows.

    Request b's pages are `indices[indptr[b]:indptr[b + 1]]`; what follows `indptr[B]` is 0. last_page_len is in tokens, 0 for an
    empty request. No host synchronisation: the length of `indices` is an upper bound. Raises InvalidInput.
    """
    out: tuple[Tensor, Tensor, Tensor] = KV_INDICES(KVIndices(page_table, seq_lens, page_size=page_size, policy=active_policy()))
    return out
