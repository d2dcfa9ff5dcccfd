"""Metadata ops: pure functions of lengths and tables, so that a batch's bookkeeping is in the graph and made once a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.ops import _check as check
from attnops.ops._op import Op, define, target_of
from attnops.problem import Extent, Problem
from attnops.reference import data
from attnops.select import active_policy

SPLIT_RULES = ("static", "deterministic", "balanced")


def _problem(op: str) -> Any:
    def problem(first: Any, *_: Any, page_size: int = 0, **__: Any) -> Problem:
        return Problem(
            op=op, target=target_of(first), dtype=first.dtype, kv_dtype=first.dtype, page_size=page_size, tokens=Extent.of(first.shape[0])
        )

    return problem


def _metadata_op(name: str, schema: str, check_args: Any, fake: Any, about: str) -> Op:
    return define(Op(name, schema, check_args, fake, _problem(name), getattr(data, name), about=about))


def _ints(field: str, value: Tensor, layout: str, ndim: int = 1, dtypes: tuple[torch.dtype, ...] = check.INDEX) -> None:
    check.tensor(field, value, ndim, dtypes, layout)


def _page_size(page_size: int) -> None:
    check.need(page_size >= 1, "page_size", page_size, ">= 1 token a page")


def _check_cu_seqlens(lengths: Tensor) -> None:
    _ints("lengths", lengths, "[B]")


_metadata_op(
    "cu_seqlens",
    '(Tensor lengths, *, str policy="") -> Tensor',
    _check_cu_seqlens,
    lambda lengths: lengths.new_empty(lengths.shape[0] + 1, dtype=torch.int32),
    "cumulative lengths",
)


def cu_seqlens(lengths: Tensor) -> Tensor:
    """int32 `[B + 1]`: 0 and the running sums of lengths `[B]` (int32 or int64, tokens). Raises InvalidInput."""
    out: Tensor = torch.ops.attnops.cu_seqlens.default(lengths, policy=active_policy())
    return out


def _check_token_rows(cu_seqlens: Tensor, *, num_tokens: int) -> None:
    _ints("cu_seqlens", cu_seqlens, "[B + 1]", dtypes=(torch.int32,))
    check.need(cu_seqlens.shape[0] >= 1, "cu_seqlens.shape[0]", cu_seqlens.shape[0], ">= 1")
    check.need(num_tokens >= 0, "num_tokens", num_tokens, ">= 0")


_metadata_op(
    "token_rows",
    '(Tensor cu_seqlens, *, SymInt num_tokens, str policy="") -> Tensor',
    _check_token_rows,
    lambda cu_seqlens, *, num_tokens: cu_seqlens.new_empty(num_tokens),
    "the request of each token",
)


def token_rows(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """int32 `[num_tokens]`: the request of each packed token, -1 past the last. cu_seqlens: int32 `[B + 1]`. Raises InvalidInput."""
    out: Tensor = torch.ops.attnops.token_rows.default(cu_seqlens, num_tokens=num_tokens, policy=active_policy())
    return out


def _check_slot_mapping(positions: Tensor, rows: Tensor, page_table: Tensor, *, page_size: int) -> None:
    _ints("positions", positions, "[T]")
    _ints("rows", rows, "[T]")
    _ints("page_table", page_table, "[B, max_pages]", 2, (torch.int32,))
    check.same_device(positions, rows=rows, page_table=page_table)
    check.equal("rows.shape[0]", rows.shape[0], positions.shape[0], "one request a token")
    _page_size(page_size)


_metadata_op(
    "slot_mapping",
    '(Tensor positions, Tensor rows, Tensor page_table, *, int page_size, str policy="") -> Tensor',
    _check_slot_mapping,
    lambda positions, rows, page_table, *, page_size: positions.new_empty(positions.shape[0], dtype=torch.int64),
    "where in the pages each token goes",
)


def slot_mapping(positions: Tensor, rows: Tensor, page_table: Tensor, *, page_size: int) -> Tensor:
    """int64 `[T]`: the slot `page_id * page_size + offset` of each token, as `write_kv` takes it.

    positions: `[T]` position of the token in its request. rows: `[T]` its request. page_table: int32 `[B, max_pages]`.
    A negative position or row, a position past the table's width, or a negative page id gives -1: not stored. Raises InvalidInput.
    """
    out: Tensor = torch.ops.attnops.slot_mapping.default(positions, rows, page_table, page_size=page_size, policy=active_policy())
    return out


def _check_page_table(token_table: Tensor, rows: Tensor, seq_lens: Tensor, *, page_size: int) -> None:
    _ints("token_table", token_table, "[R, N]", 2)
    _ints("rows", rows, "[B]")
    _ints("seq_lens", seq_lens, "[B]")
    check.same_device(token_table, rows=rows, seq_lens=seq_lens)
    check.equal("seq_lens.shape[0]", seq_lens.shape[0], rows.shape[0], "one length a request")
    _page_size(page_size)


def _fake_page_table(token_table: Tensor, rows: Tensor, seq_lens: Tensor, *, page_size: int) -> Tensor:
    return token_table.new_empty((rows.shape[0], (token_table.shape[1] + page_size - 1) // page_size), dtype=torch.int32)


_metadata_op(
    "page_table",
    '(Tensor token_table, Tensor rows, Tensor seq_lens, *, int page_size, str policy="") -> Tensor',
    _check_page_table,
    _fake_page_table,
    "token table to page table",
)


def page_table(token_table: Tensor, rows: Tensor, seq_lens: Tensor, *, page_size: int) -> Tensor:
    """int32 `[B, ceil(N / page_size)]`: the page table of a batch from a table of token slots.

    token_table: `[R, N]` slot of every token of every known request; each page's slots are contiguous and start at a multiple of
    page_size. rows: `[B]` the requests of the batch. seq_lens: `[B]` tokens. Entries past a request's end are 0. Raises InvalidInput.
    """
    out: Tensor = torch.ops.attnops.page_table.default(token_table, rows, seq_lens, page_size=page_size, policy=active_policy())
    return out


def _check_kv_indices(page_table: Tensor, seq_lens: Tensor, *, page_size: int) -> None:
    _ints("page_table", page_table, "[B, max_pages]", 2, (torch.int32,))
    _ints("seq_lens", seq_lens, "[B]")
    check.same_device(page_table, seq_lens=seq_lens)
    check.equal("seq_lens.shape[0]", seq_lens.shape[0], page_table.shape[0], "one length a row of the page table")
    _page_size(page_size)


def _fake_kv_indices(page_table: Tensor, seq_lens: Tensor, *, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    batch, width = page_table.shape
    return page_table.new_empty(batch + 1), page_table.new_empty(batch * width), page_table.new_empty(batch)


_metadata_op(
    "kv_indices",
    '(Tensor page_table, Tensor seq_lens, *, int page_size, str policy="") -> (Tensor indptr, Tensor indices, Tensor last_page_len)',
    _check_kv_indices,
    _fake_kv_indices,
    "page table to indptr and indices",
)


def kv_indices(page_table: Tensor, seq_lens: Tensor, *, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """(indptr `[B + 1]`, indices `[B * max_pages]`, last_page_len `[B]`), int32: the page table in compressed rows.

    Request b's pages are `indices[indptr[b]:indptr[b + 1]]`; what follows `indptr[B]` is 0. last_page_len is in tokens, 0 for an
    empty request. No host synchronisation: the length of `indices` is an upper bound. Raises InvalidInput.
    """
    policy = active_policy()
    out: tuple[Tensor, Tensor, Tensor] = torch.ops.attnops.kv_indices.default(page_table, seq_lens, page_size=page_size, policy=policy)
    return out


def _check_num_kv_splits(
    seq_lens: Tensor, *, rule: str, max_splits: int, tile: int = 256, q_heads: int = 1, kv_heads: int = 1, num_sms: int = 1
) -> None:
    _ints("seq_lens", seq_lens, "[B]")
    check.one_of("rule", rule, SPLIT_RULES)
    for field, value in (("max_splits", max_splits), ("tile", tile), ("q_heads", q_heads), ("kv_heads", kv_heads), ("num_sms", num_sms)):
        check.need(value >= 1, field, value, ">= 1")


_metadata_op(
    "num_kv_splits",
    '(Tensor seq_lens, *, str rule, int max_splits, int tile=256, int q_heads=1, int kv_heads=1, int num_sms=1, str policy="") -> Tensor',
    _check_num_kv_splits,
    lambda seq_lens, **_: seq_lens.new_empty(seq_lens.shape[0], dtype=torch.int32),
    "how many parts a request's keys are split into",
)


def num_kv_splits(
    seq_lens: Tensor, *, rule: str, max_splits: int, tile: int = 256, q_heads: int = 1, kv_heads: int = 1, num_sms: int = 1
) -> Tensor:
    """int32 `[B]`: into how many parts a split-KV decode cuts each request's keys. seq_lens: `[B]` tokens.

    rule "static": max_splits for every request. "deterministic": ceil(length / tile), a function of the request's own length, so
    that results do not depend on batch mates. "balanced": about two blocks an SM in all, shared in proportion to length; a block
    serves 16 query heads of one key head. The last two give at least 1 and at most max_splits. Raises InvalidInput.
    """
    out: Tensor = torch.ops.attnops.num_kv_splits.default(
        seq_lens,
        rule=rule,
        max_splits=max_splits,
        tile=tile,
        q_heads=q_heads,
        kv_heads=kv_heads,
        num_sms=num_sms,
        policy=active_policy(),
    )
    return out
