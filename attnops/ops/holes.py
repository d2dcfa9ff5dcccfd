"""Page tables without holes: the table that attention over pages reads where some entries are no pages."""

from __future__ import annotations

from torch import Tensor

from attnops.call import INT32, KW_ONLY, Call, Result, arg, record
from attnops.ops import rules
from attnops.ops.op import Op, define
from attnops.reference import holes
from attnops.reference.attention import Rules
from attnops.select import active_policy


@record("named_pages", Result("named", like="page_table"), Result("lengths", like="seq_lens"), problem={"tokens": "B", "batch": "0"})
class NamedPages(Call):
    """A page table without holes, and the lengths that go with it."""

    page_table: Tensor = arg("B, max_pages", INT32)
    seq_lens: Tensor = arg("B", INT32)
    cu_seqlens_q: Tensor = arg("B + 1", INT32)
    _: KW_ONLY
    num_pages: int = arg(least=0, symbolic=True)
    page_size: int = arg(least=1)
    squeeze: bool = arg(default=True, always=True)
    window_left: int = arg(default=-1, least=-1, always=True)


NAMED_PAGES = define(Op(NamedPages, holes.named_pages, about="page table without holes"))


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
    out: tuple[Tensor, Tensor] = NAMED_PAGES(NamedPages(
        page_table, seq_lens, cu_seqlens_q, num_pages=num_pages, page_size=page_size, squeeze=squeeze, window_left=window_left,
        policy=active_policy(),
    ))  # fmt: skip
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
    left, right = rules.window(window)
    asked = holes.how(Rules(0.0, causal, left, right, chunk=attention_chunk), mask)
    return *named_pages(page_table, seq_lens, cu_seqlens_q, num_pages=pages.shape[0], page_size=pages.shape[1], **asked), False
