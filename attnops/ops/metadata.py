"""Metadata ops: pure functions of lengths and tables, so that a batch's bookkeeping is in the graph and made once a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.call import INDEX, INT32, KW_ONLY, Call, Result, Sizes, arg, need, record
from attnops.ops.op import Op, define
from attnops.reference import data
from attnops.select import active_policy

SPLIT_RULES = ("static", "deterministic", "balanced")
INT = INT32[0]


@record("cu_seqlens", Result("", "B + 1", INT), problem={"tokens": "B", "batch": "0"})
class CuSeqlens(Call):
    """Cumulative lengths."""

    lengths: Tensor = arg("B", INDEX)
    _: KW_ONLY
    policy: str = ""


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
    policy: str = ""


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
    policy: str = ""


SLOT_MAPPING = define(Op(SlotMapping, data.slot_mapping, about="where in the pages each token goes"))


def slot_mapping(positions: Tensor, rows: Tensor, page_table: Tensor, *, page_size: int) -> Tensor:
    """int64 `[T]`: the slot `page_id * page_size + offset` of each token, as `write_kv` takes it.

    positions: `[T]` position of the token in its request. rows: `[T]` its request. page_table: int32 `[B, max_pages]`.
    A negative position or row, a position past the table's width, or a negative page id gives -1: not stored. Raises InvalidInput.
    """
    out: Tensor = SLOT_MAPPING(SlotMapping(positions, rows, page_table, page_size=page_size, policy=active_policy()))
    return out


@record("page_table", Result("", "B, (N + page_size - 1) // page_size", INT), problem={"tokens": "R", "batch": "0"})
class PageTable(Call):
    """A page table from a table of tokens."""

    token_table: Tensor = arg("R, N", INDEX)
    rows: Tensor = arg("B", INDEX)
    seq_lens: Tensor = arg("B", INDEX)
    _: KW_ONLY
    page_size: int = arg(least=1)
    policy: str = ""


PAGE_TABLE = define(Op(PageTable, data.page_table, about="token table to page table"))


def page_table(token_table: Tensor, rows: Tensor, seq_lens: Tensor, *, page_size: int) -> Tensor:
    """int32 `[B, ceil(N / page_size)]`: the page table of a batch from a table of token slots.

    token_table: `[R, N]` slot of every token of every known request; each page's slots are contiguous and start at a multiple of
    page_size. rows: `[B]` the requests of the batch. seq_lens: `[B]` tokens. Entries past a request's end are 0. Raises InvalidInput.
    """
    out: Tensor = PAGE_TABLE(PageTable(token_table, rows, seq_lens, page_size=page_size, policy=active_policy()))
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
    policy: str = ""


KV_INDICES = define(Op(KVIndices, data.kv_indices, about="page table to indptr and indices"))


def kv_indices(page_table: Tensor, seq_lens: Tensor, *, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """(indptr `[B + 1]`, indices `[B * max_pages]`, last_page_len `[B]`), int32: the page table in compressed rows.

    Request b's pages are `indices[indptr[b]:indptr[b + 1]]`; what follows `indptr[B]` is 0. last_page_len is in tokens, 0 for an
    empty request. No host synchronisation: the length of `indices` is an upper bound. Raises InvalidInput.
    """
    out: tuple[Tensor, Tensor, Tensor] = KV_INDICES(KVIndices(page_table, seq_lens, page_size=page_size, policy=active_policy()))
    return out


@record("num_kv_splits", Result("", "B", INT), problem={"tokens": "B", "batch": "0", "q_heads": "0", "kv_heads": "0"})
class NumKVSplits(Call):
    """The number of parts of each request's keys."""

    seq_lens: Tensor = arg("B", INDEX)
    _: KW_ONLY
    rule: str = arg(choices=SPLIT_RULES)
    max_splits: int = arg(least=1)
    tile: int = arg(default=256, least=1)
    q_heads: int = arg(default=1, least=1)
    kv_heads: int = arg(default=1, least=1)
    num_sms: int = arg(default=1, least=1)
    policy: str = ""


NUM_KV_SPLITS = define(Op(NumKVSplits, data.num_kv_splits, about="how many parts a request's keys are split into"))


def num_kv_splits(
    seq_lens: Tensor, *, rule: str, max_splits: int, tile: int = 256, q_heads: int = 1, kv_heads: int = 1, num_sms: int = 1
) -> Tensor:
    """int32 `[B]`: into how many parts a split-KV decode cuts each request's keys. seq_lens: `[B]` tokens.

    rule "static": max_splits for every request. "deterministic": ceil(length / tile), a function of the request's own length, so
    that results do not depend on batch mates. "balanced": about two blocks an SM in all, shared in proportion to length; a block
    serves 16 query heads of one key head. The last two give at least 1 and at most max_splits. Raises InvalidInput.
    """
    out: Tensor = NUM_KV_SPLITS(NumKVSplits(
        seq_lens, rule=rule, max_splits=max_splits, tile=tile, q_heads=q_heads, kv_heads=kv_heads, num_sms=num_sms,
        policy=active_policy(),
    ))  # fmt: skip
    return out
