"""Metadata ops: pure functions of lengths and tables, so that a batch's bookkeeping is in the graph
and made once a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.core.eager_cache import key_for, side
from attnops.core.kernel import Core
from attnops.core.op import UNREAD, Op, define, define_core
from attnops.core.private_torch import DynamicOutputShapeException, FakeTensor
from attnops.core.problem import Extent
from attnops.core.record import (
    INDEX,
    INT32,
    KW_ONLY,
    Call,
    Result,
    Sizes,
    arg,
    changed,
    need,
    record,
)
from attnops.core.select import active_policy
from attnops.core.tensors import Rules, how, refuse_plan_of_holes
from attnops.ops import rules
from attnops.ops.metadata import reference

INT = INT32[0]


@record("cu_seqlens", Result("", "B + 1", INT), problem={"tokens": "B", "batch": "0"})
class CuSeqlens(Call):
    """Cumulative lengths."""

    lengths: Tensor = arg("B", INDEX)


CU_SEQLENS = define(Op(CuSeqlens, reference.cu_seqlens, about="cumulative lengths"))


def cu_seqlens(lengths: Tensor) -> Tensor:
    """int32 `[B + 1]`: 0 and the running sums of lengths `[B]` (int32 or int64, tokens). Raises
    InvalidInput."""
    out: Tensor = CU_SEQLENS(CuSeqlens(lengths, policy=active_policy()))
    return out


def _starts(call: Any) -> tuple[Any, ...]:
    if not isinstance(call.begins, FakeTensor):
        return reference.request_starts(call).shape
    return _counted(call.begins)


def _counted(begins: Any) -> tuple[Any, ...]:
    if (env := begins.fake_mode.shape_env) is None:
        raise DynamicOutputShapeException(REQUEST_STARTS.packet.default)
    # `new_dynamic_size` of torch.library raises unless a graph that may break sets
    # `capture_dynamic_output_shape_ops`.
    size = env.create_unbacked_symint()
    torch._check(size >= 2)
    return (size,)


@record("request_starts", Result("", _starts, INT), problem={"tokens": "B * S", "batch": "B"})
class RequestStarts(Call):
    """Cumulative lengths of requests whose first tokens are marked."""

    begins: Tensor = arg("B, S", (torch.bool,))


REQUEST_STARTS = define(
    Op(
        RequestStarts,
        reference.request_starts,
        about="cumulative lengths of requests whose first tokens are marked",
        typical=(
            {
                "dtype": torch.bool,
                "kv_dtype": torch.bool,
                "tokens": Extent.of(4096),
                "batch": Extent(1, 1, 1),
            },
        ),
    )
)


# In place of a call whose result no operation reads: assertions of its size would keep the call,
# and the wait, in the graph.
define_core(
    f"request_starts__{UNREAD}",
    Core(
        "(Tensor begins) -> Tensor",
        lambda begins: begins.new_zeros(2, dtype=INT),
        lambda begins: begins.new_empty(_counted(begins), dtype=INT),
    ),
)


def request_starts(begins: Tensor) -> Tensor:
    """int32 `[N + 1]`: the first token of each of N requests, then `B * S`. begins: bool `[B, S]`,
    True at those tokens.

    The rows follow one another, and the first token of all begins a request whatever its mark.
    Where the result would have S numbers, as a mask of ints has, an empty request comes last. A
    compiled graph can hold this op, for any N. A CUDA graph cannot, because the host waits for the
    device. Raises InvalidInput, NotCapturable.
    """
    out: Tensor = REQUEST_STARTS(RequestStarts(begins, policy=active_policy()))
    return out


@record(
    "token_rows",
    Result("", "num_tokens", INT),
    least={"starts": ">= 1"},
    problem={"tokens": "starts"},
)
class TokenRows(Call):
    """The request of each token."""

    cu_seqlens: Tensor = arg("starts", INT32, holds="starts_of_queries")
    _: KW_ONLY
    num_tokens: int = arg(least=0, symbolic=True, holds="tokens")


TOKEN_ROWS = define(Op(TokenRows, reference.token_rows, about="the request of each token"))


def token_rows(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """int32 `[num_tokens]`: the request of each packed token, -1 past the last. cu_seqlens: int32
    `[B + 1]`. Raises InvalidInput."""
    out: Tensor = TOKEN_ROWS(TokenRows(cu_seqlens, num_tokens=num_tokens, policy=active_policy()))
    return out


@record("slot_mapping", Result("", "T", torch.int64), problem={"batch": "0"})
class SlotMapping(Call):
    """The slot of each token."""

    positions: Tensor = arg("T", INDEX)
    rows: Tensor = arg("T", INDEX)
    page_table: Tensor = arg("B, max_pages", INT32, holds="page_ids")
    _: KW_ONLY
    page_size: int = arg(least=1)


SLOT_MAPPING = define(
    Op(SlotMapping, reference.slot_mapping, about="where in the pages each token goes")
)


def slot_mapping(positions: Tensor, rows: Tensor, page_table: Tensor, *, page_size: int) -> Tensor:
    """int64 `[T]`: the slot `page_id * page_size + offset` of each token, as `write_kv` takes it.
    Raises InvalidInput.

    positions: `[T]` position of the token in its request. rows: `[T]` its request. page_table:
    int32 `[B, max_pages]`. A negative position or row, a position past the table's width, or a
    negative page id gives -1: not stored.
    """
    out: Tensor = SLOT_MAPPING(
        SlotMapping(positions, rows, page_table, page_size=page_size, policy=active_policy())
    )
    return out


INDICES = (
    Result("indptr", "B + 1", INT),
    Result("indices", "B * max_pages", INT),
    Result("last_page_len", "B", INT),
)


@record("kv_indices", *INDICES, problem={"tokens": "B", "batch": "0"})
class KVIndices(Call):
    """A page table as indptr and indices."""

    page_table: Tensor = arg("B, max_pages", INT32, holds="page_ids")
    seq_lens: Tensor = arg("B", INDEX, holds="lengths_of_keys")
    _: KW_ONLY
    page_size: int = arg(least=1)


KV_INDICES = define(Op(KVIndices, reference.kv_indices, about="page table to indptr and indices"))


def kv_indices(
    page_table: Tensor, seq_lens: Tensor, *, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(indptr `[B + 1]`, indices `[B * max_pages]`, last_page_len `[B]`), int32: the page table in
    compressed rows.

    Request b's pages are `indices[indptr[b]:indptr[b + 1]]`; entries from `indptr[B]` on are 0.
    last_page_len is in tokens, 0 for an empty request. No host synchronisation: the length of
    `indices` is an upper bound. Raises InvalidInput.
    """
    out: tuple[Tensor, Tensor, Tensor] = KV_INDICES(
        KVIndices(page_table, seq_lens, page_size=page_size, policy=active_policy())
    )
    return out


def _row_words(call: Any) -> tuple[Any, ...]:
    words = call.num_tokens * (1 + call.page_table.shape[1])
    return (reference.rows_schedule_words(call.num_tokens, call.q_heads, call.float8) + words,)


def _row_rules(call: Any, sizes: Sizes) -> None:
    need(call.q_heads > 0 or not call.float8, "float8", call.float8, "False without q_heads")


def _row_facts(call: Any, sizes: Sizes) -> dict[str, Any]:
    dtype = torch.float8_e4m3fn if call.float8 else call.page_table.dtype
    return {"dtype": dtype, "kv_dtype": dtype}


@record(
    "decode_rows",
    Result("", _row_words, torch.int32),
    rules=_row_rules,
    facts=_row_facts,
    problem={"tokens": "num_tokens"},
)
class DecodeRows(rules.Paged):
    """The batch of a decode by token, and FlashMLA's schedule of it."""

    _: KW_ONLY
    num_tokens: int = arg(least=0, symbolic=True, holds="tokens")
    causal: bool = arg(default=True, always=True, facts=rules.CAUSAL)
    q_heads: int = arg(default=0, least=0, always=True)
    float8: bool = arg(default=False, always=True)


DECODE_ROWS = define(
    Op(DecodeRows, reference.decode_rows, about="the batch by token, and FlashMLA's schedule of it")
)


def decode_rows(
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    num_tokens: int,
    causal: bool = True,
    q_heads: int = 0,
    float8: bool = False,
    kernel: str | None = None,
) -> Tensor:
    """int32 `[S + T * (1 + max_pages)]`: S words of schedule, how many keys each token sees, each
    token's row of the page table.

    The `plan` of a decode over latents for kernels that take one query token a row (FlashMLA,
    CUTLASS MLA), which would make it in every layer. A captured graph may replay it. With `q_heads`
    it holds FlashMLA's schedule too (26 us for 64 tokens on an H200):
    https://github.com/deepseek-ai/FlashMLA, csrc/api/dense_decode.h.

    Args:
        page_table, seq_lens, cu_seqlens_q: int32 `[B, max_pages]`, `[B]`, `[B + 1]`, as in
            `paged_attention`.
        num_tokens: T, the query's tokens; those past `cu_seqlens_q[B]` see 0 keys.
        causal: token i of n of a request with L keys sees L - n + i + 1 keys, otherwise L.
        q_heads: of the query to come; 0: S = 0. Otherwise S = 8 * max(144 // ceil(q_heads / 64), 1)
            + T + 1, for a GPU of SM90 has at most 144 multiprocessors. Where `flashmla` cannot run
            the schedule is zeros, which no kernel reads.
        float8: is the query to come float8? Its schedule is 8 words longer.
        kernel: force a kernel by name for this call.

    Raises:
        InvalidInput: a shape, dtype or number breaks this contract.
        UnknownKernel, NoKernel: `kernel` cannot run.
    """
    out: Tensor = DECODE_ROWS(
        DecodeRows(
            page_table,
            seq_lens,
            cu_seqlens_q,
            num_tokens=num_tokens,
            causal=causal,
            q_heads=q_heads,
            float8=float8,
            policy=key_for("decode_rows", kernel),
        )
    )
    return out


@record(
    "named_pages",
    Result("named", like="page_table"),
    Result("lengths", like="seq_lens"),
    problem={"tokens": "B", "batch": "0"},
)
class NamedPages(rules.Paged):
    """A page table without holes, and the lengths that go with it."""

    _: KW_ONLY
    num_pages: int = arg(least=0, symbolic=True, holds="page_count")
    page_size: int = arg(least=1)
    squeeze: bool = arg(default=True, always=True)
    window_left: int = rules.LEFT_OF_ANY_KERNEL


NAMED_PAGES = define(Op(NamedPages, reference.named_pages, about="page table without holes"))


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
    """(page table `[B, max_pages]`, lengths `[B]`), int32, for attention that does not see the keys
    of entries that are no page.

    Attention calls it unless `holes=False`. Entries within a request's length outside
    `[0, num_pages)` are holes. Pages behind a hole move forward and the length shrinks, where that
    moves no key among the new tokens. A request with another visible hole gets length 0: its output
    is 0 and its lse -inf.

    Args:
        page_table: int32 `[B, max_pages]`. seq_lens: int32 `[B]`. cu_seqlens_q: int32 `[B + 1]`. As
            in `paged_attention`.
        num_pages: pages of the pool. page_size: tokens a page.
        squeeze: False where a key's place counts beyond its order (a window, a chunk, a mask): no
            page moves then.
        window_left: without squeeze, holes so far back that no new token sees them do no harm; -1,
            or 2**30 or more: all are seen.

    Returns:
        Entries that are not read for their values are a page of the request's own, or 0 where it
        has none.

    Raises:
        InvalidInput: a shape, dtype, device or number breaks this contract.
    """
    out: tuple[Tensor, Tensor] = NAMED_PAGES(
        NamedPages(
            page_table,
            seq_lens,
            cu_seqlens_q,
            num_pages=num_pages,
            page_size=page_size,
            squeeze=squeeze,
            window_left=side(window_left),
            policy=active_policy(),
        )
    )
    return out


def with_named_pages(call: Any) -> Any:
    """A call of attention over pages whose table may have holes, with the table and the lengths of
    `named_pages`."""
    refuse_plan_of_holes(call)
    num_pages, page_size, *_ = getattr(call, call.spec.stored).shape
    moves = how(Rules.of(call), call.mask)
    given = call.page_table, call.seq_lens, call.cu_seqlens_q
    table, lengths = NAMED_PAGES.packet.default(
        *given, num_pages=num_pages, page_size=page_size, **moves
    )
    return changed(call, page_table=table, seq_lens=lengths, holes=False)


def whole(
    pages: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    mask: Tensor | None,
    rules: Rules,
) -> tuple[Tensor, Tensor, bool]:
    """(page table, lengths, may there be holes) that a traced call of attention reads: by
    `named_pages`, made once for equal calls."""
    if not isinstance(pages, Tensor) or pages.dim() < 2:
        return page_table, seq_lens, True  # the op says why it is wrong
    sizes = {"num_pages": pages.shape[0], "page_size": pages.shape[1], **how(rules, mask)}
    return *named_pages(page_table, seq_lens, cu_seqlens_q, **sizes), False
