"""Page tables without holes: what attention over pages reads of a table in which some entries are no pages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.ops import _check as check
from attnops.ops._op import Op, define, target_of
from attnops.problem import Extent, Problem
from attnops.reference import holes
from attnops.select import active_policy


def _check(
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    num_pages: int,
    page_size: int,
    squeeze: bool = True,
    window_left: int = -1,
) -> None:
    check.tensor("page_table", page_table, 2, (torch.int32,), "[B, max_pages]")
    check.tensor("seq_lens", seq_lens, 1, (torch.int32,), "[B]")
    check.tensor("cu_seqlens_q", cu_seqlens_q, 1, (torch.int32,), "[B + 1]")
    check.same_device(page_table, seq_lens=seq_lens, cu_seqlens_q=cu_seqlens_q)
    check.equal("seq_lens.shape[0]", seq_lens.shape[0], page_table.shape[0], "one length a row of the page table")
    check.equal("cu_seqlens_q.shape[0]", cu_seqlens_q.shape[0], page_table.shape[0] + 1, "one more than the requests")
    check.need(num_pages >= 0, "num_pages", num_pages, ">= 0")
    check.need(page_size >= 1, "page_size", page_size, ">= 1 token a page")
    check.need(window_left >= -1, "window_left", window_left, ">= -1 (-1: unbounded)")


def _fake(page_table: Tensor, seq_lens: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return page_table.new_empty(page_table.shape), seq_lens.new_empty(seq_lens.shape)


def _problem(page_table: Any, *_: Any, page_size: int, **__: Any) -> Problem:
    return Problem(
        op="named_pages", target=target_of(page_table), dtype=page_table.dtype, kv_dtype=page_table.dtype, page_size=page_size,
        tokens=Extent.of(page_table.shape[0]),
    )  # fmt: skip


define(
    Op(
        name="named_pages",
        schema="(Tensor page_table, Tensor seq_lens, Tensor cu_seqlens_q, *, SymInt num_pages, int page_size, bool squeeze=True, "
        'int window_left=-1, str policy="") -> (Tensor named, Tensor lengths)',
        check=_check,
        fake=_fake,
        problem=_problem,
        reference=holes.named_pages,
        about="page table without holes",
    )
)


def named_pages(
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    num_pages: int,
    page_size: int,
    squeeze: bool = True,
    window_left: int = -1,
) -> tuple[Tensor, Tensor]:
    """(page table `[B, max_pages]`, lengths `[B]`), int32, for attention that does not see the keys of entries that are no page.

    Attention calls it unless `holes=False` says that it need not; who calls it once a step says so. Entries within a request's length
    that lie outside `[0, num_pages)` are holes. Pages behind a hole move forward and the length shrinks, where that moves no key among
    the new tokens. A request with another visible hole gets length 0: it sees no key, its output is 0 and its lse -inf.

    Args:
        page_table: int32 `[B, max_pages]`. seq_lens: int32 `[B]`. cu_seqlens_q: int32 `[B + 1]`. As in `paged_attention`.
        num_pages: pages of the pool. page_size: tokens a page.
        squeeze: False where a key's place counts beyond its order: under a window, a chunk, or a mask. No page moves then.
        window_left: without squeeze, holes so far back that no new token sees them do no harm; -1: all are seen.

    Returns:
        Entries that are not read for their values are a page of the request's own, or 0 where it has none.

    Raises:
        InvalidInput: a shape, dtype, device or number breaks this contract.
    """
    out: tuple[Tensor, Tensor] = torch.ops.attnops.named_pages.default(
        page_table, seq_lens, cu_seqlens_q, num_pages=num_pages, page_size=page_size, squeeze=squeeze, window_left=window_left,
        policy=active_policy(),
    )  # fmt: skip
    return out


def whole(
    pages: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = True,
    window: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
) -> tuple[Tensor, Tensor, bool]:
    """(page table, lengths, may there be holes) that a traced call of attention reads: `named_pages` where a compiler sees it.

    Layers that ask the same get the same tensors: `attnops.lowering` and `attnops.graphs` make them once.
    """
    if not isinstance(pages, Tensor) or pages.dim() < 2:
        return page_table, seq_lens, True  # the attention op says what is wrong
    left, right = check.window(window)
    rules = holes.how(mask=mask, causal=causal, window_left=left, window_right=right, attention_chunk=attention_chunk)
    return *named_pages(page_table, seq_lens, cu_seqlens_q, num_pages=pages.shape[0], page_size=pages.shape[1], **rules), False
