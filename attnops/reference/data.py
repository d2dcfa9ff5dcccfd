"""Reference data movement: KV write and copy, merging of partial results, and the metadata ops. All are plain, capturable torch ops."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnops.reference.rows import compact, named, quantise, rows_of, store

if TYPE_CHECKING:
    from attnops.ops.merge import MergeState, MergeStates
    from attnops.ops.metadata import CuSeqlens, DecodeRows, KVIndices, NamedPages, RequestStarts, SlotMapping, TokenRows
    from attnops.ops.paged import CopyKV, WriteKV
    from attnops.ops.plan import PlanMlaAttention, PlanPagedAttention


def write_kv(call: WriteKV) -> None:
    """The reference of `attnops.write_kv`."""
    store(call.k_pages, quantise(call.key, call.k_scale, call.k_pages.dtype), call.slots)
    store(call.v_pages, quantise(call.value, call.v_scale, call.v_pages.dtype), call.slots)


def copy_kv(call: CopyKV) -> None:
    """The reference of `attnops.ops.copy_kv`. It reads all rows into a tensor of their own before it writes the first."""
    source, total = call.source, call.k_pages.shape[1] * call.k_pages.shape[2]
    slots = torch.where((source < 0) | (source >= total), -1, call.target.long())
    at = source.long().clamp(0, max(total - 1, 0))
    for pages in (call.k_pages, call.v_pages):
        if pages is None or source.shape[0] == 0 or pages.numel() == 0:
            continue
        # Few torch ops know float8.
        bits = pages.view(torch.uint8) if pages.dtype.itemsize == 1 and pages.is_floating_point() else pages
        by_slot = bits.movedim(0, 2)
        page = by_slot.shape[1]
        store(by_slot, by_slot[at // page, at % page], slots)


def empty_as_minus_inf(lse: Tensor) -> Tensor:
    """`lse` with -inf for +inf, which kernels of other packages write where no key is seen."""
    return torch.where(lse == float("inf"), float("-inf"), lse)


def merge_state(call: MergeState) -> tuple[Tensor, Tensor]:
    """merged = (exp(a - m) O_a + exp(b - m) O_b) / (exp(a - m) + exp(b - m)), lse = m + log(...), m = max(a, b)."""
    output_a, output_b = call.output_a, call.output_b
    wide = torch.float64 if output_a.dtype == torch.float64 else torch.float32
    a, b = empty_as_minus_inf(call.lse_a.to(wide)), empty_as_minus_inf(call.lse_b.to(wide))
    m = torch.maximum(a, b)
    m = torch.where(m == float("-inf"), torch.zeros_like(m), m)
    wa, wb = torch.exp(a - m), torch.exp(b - m)
    total = wa + wb
    safe = torch.where(total > 0, total, torch.ones_like(total))

    def part(output: Tensor, weight: Tensor) -> Tensor:
        # An empty side has weight 0 and may hold anything.
        return torch.where((weight > 0)[..., None], output.to(weight.dtype), 0.0) * (weight / safe)[..., None]

    merged = part(output_a, wa) + part(output_b, wb)
    return compact(merged.to(output_a.dtype)), compact((m + torch.log(total)).float())


def merge_states(call: MergeStates) -> tuple[Tensor, Tensor]:
    """As `merge_state`, over the parts in dim 1."""
    outputs = call.outputs
    z = empty_as_minus_inf(call.lses.double() if outputs.dtype == torch.float64 else call.lses.float())
    m = z.amax(1, keepdim=True)
    m = torch.where(m == float("-inf"), 0.0, m)
    weights = torch.exp(z - m)
    total = weights.sum(1)
    # An empty part has weight 0 and may hold anything.
    parts = torch.where((weights > 0)[..., None], outputs.to(weights.dtype), 0.0) * weights[..., None]
    merged = parts.sum(1) / torch.where(total > 0, total, 1.0)[..., None]
    return compact(merged.to(outputs.dtype)), compact((m[:, 0] + torch.log(total)).float())


def merge_gradients(
    outputs: Tensor, lses: Tensor, merged: Tensor, grad_output: Tensor | None, grad_lse: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients of the `outputs` `[T, N, H, D]` and `lses` `[T, N, H]` of the parts of `merged` `[T, H, D]`. None is zero.

    With p the share of a part, exp(lse_i) / sum exp(lse): grad output_i = p g, and grad lse_i = p (g . (output_i - merged) + grad_lse).
    """
    wide = torch.float64 if outputs.dtype == torch.float64 else torch.float32
    z = empty_as_minus_inf(lses.to(wide))
    m = z.amax(1, keepdim=True)
    weights = torch.exp(z - torch.where(m == float("-inf"), 0.0, m))
    total = weights.sum(1, keepdim=True)
    shares = weights / torch.where(total > 0, total, 1.0)
    # An empty part has share 0 and may hold anything.
    found, more = torch.zeros_like(outputs), torch.zeros_like(shares) if grad_lse is None else grad_lse.to(wide)[:, None]
    if grad_output is not None:
        g = grad_output.to(wide)[:, None]
        held = torch.where((shares > 0)[..., None], outputs.to(wide), 0.0)
        found, more = (shares[..., None] * g).to(outputs.dtype), more + (g * (held - merged.to(wide)[:, None])).sum(-1)
    return found, (shares * more).to(lses.dtype)


def cu_seqlens(call: CuSeqlens) -> Tensor:
    """`[B + 1]` int32."""
    total = torch.cumsum(call.lengths, 0, dtype=torch.int32)
    return torch.cat([torch.zeros(1, dtype=torch.int32, device=total.device), total])


def request_starts(call: RequestStarts) -> Tensor:
    """`[N + 1]` int32. It waits for the device."""
    places = call.begins.flatten()[1:].nonzero()[:, 0] + 1
    ends = 2 if places.shape[0] + 2 == call.begins.shape[1] else 1
    return torch.cat([places.new_zeros(1), places, places.new_full((ends,), call.begins.numel())]).to(torch.int32)


def token_rows(call: TokenRows) -> Tensor:
    """`[T]` int32."""
    rows = rows_of(call.cu_seqlens, call.num_tokens)
    return torch.where(rows < call.cu_seqlens.shape[0] - 1, rows, -1).to(torch.int32)


def slot_mapping(call: SlotMapping) -> Tensor:
    """`[T]` int64."""
    page_table, page_size, at, rows = call.page_table, call.page_size, call.positions.long(), call.rows
    if page_table.numel() == 0:
        return torch.full(at.shape, -1, dtype=torch.int64, device=at.device)
    column = torch.div(at, page_size, rounding_mode="floor")
    real = (at >= 0) & (rows >= 0) & (column < page_table.shape[1])
    page = page_table[torch.where(real, rows.long(), 0), torch.where(real, column, 0)].long()
    return compact(torch.where(real & (page >= 0), page * page_size + at % page_size, -1))


def kv_indices(call: KVIndices) -> tuple[Tensor, Tensor, Tensor]:
    """(indptr `[B + 1]`, indices `[B * M]`, last_page_len `[B]`), all int32."""
    return indices_of(call.page_table, call.seq_lens, call.page_size)


def indices_of(page_table: Tensor, seq_lens: Tensor, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same, of these tensors."""
    batch, width = page_table.shape
    lens = seq_lens.long()
    counts = torch.div(lens + page_size - 1, page_size, rounding_mode="floor")
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64, device=lens.device), torch.cumsum(counts, 0)])
    last = compact(torch.where(lens > 0, (lens - 1) % page_size + 1, 0))
    if page_table.numel() == 0:
        return indptr.to(torch.int32), page_table.new_zeros(batch * width, dtype=torch.int32), last.to(torch.int32)
    at = torch.arange(batch * width, device=lens.device)
    row = torch.searchsorted(indptr[1:] - 1, at)  # as in rows_of
    real = row < batch
    safe = torch.where(real, row, 0)
    column = torch.where(real, at - indptr[safe], 0).clamp(0, width - 1)
    indices = torch.where(real, page_table[safe, column], 0).to(torch.int32)
    return indptr.to(torch.int32), indices, last.to(torch.int32)


def decode_rows(call: DecodeRows) -> Tensor:
    """`[rows_schedule_words(T, q_heads, float8) + T * (1 + M)]` int32: zeros, `by_token`'s lengths and rows, end to end."""
    batch, width = call.page_table.shape
    schedule = rows_schedule_words(call.num_tokens, call.q_heads, call.float8)
    if batch == 0:
        return call.seq_lens.new_zeros(schedule + call.num_tokens * (1 + width))
    table, lengths = by_token(call)
    return torch.cat([*([lengths.new_zeros(schedule)] if call.q_heads else []), lengths, table.flatten()])


PART_WORDS, PART_HEADS, MOST_SMS = 8, 64, 144
"""FlashMLA's schedule: the words of one part, how many heads a block of a part takes, and the multiprocessors of a whole SM90 die."""


def rows_schedule_parts(q_heads: int, float8: bool) -> int:
    """Parts that a schedule in `decode_rows`'s plan has room for: one a multiprocessor and block of heads, whatever GPU of SM90 it is.

    float8 has one more, which stays empty, so that a plan's length tells the dtype it was made for.
    """
    return max(MOST_SMS // -(-q_heads // PART_HEADS), 1) + float8 if q_heads else 0


def rows_schedule_words(tokens: int, q_heads: int, float8: bool) -> int:
    """The words of that schedule: its parts, then the first split of each token and their number."""
    return PART_WORDS * rows_schedule_parts(q_heads, float8) + tokens + 1 if q_heads else 0


def by_token(call: DecodeRows) -> tuple[Tensor, Tensor]:
    """(page table `[T, M]`, keys seen `[T]`), both int32, of each token: its request's row; 0 keys for padding. B is at least 1.

    Token i of n of a request with L keys sees the first L - n + i + 1, or L when not causal. Negative page ids, which the table may hold
    past a request's end, become page 0: kernels prefetch them.
    """
    starts, tokens, batch = call.cu_seqlens_q, call.num_tokens, call.seq_lens.shape[0]
    # Symbolic sizes are a compiler's, which fuses the comparison with its users and never stores it.
    few = not (isinstance(tokens, int) and isinstance(batch, int)) or tokens * batch <= FEW_PAIRS
    at = torch.arange(tokens, dtype=torch.int32, device=starts.device)
    rows = (starts[1:] <= at[:, None]).sum(1) if few else rows_of(starts, tokens)
    real = rows < batch
    rows = rows.clamp(max=batch - 1)
    lengths = call.seq_lens[rows]
    if call.causal:
        lengths = (lengths - (starts[rows + 1] - 1 - at)).clamp(min=0)
    return call.page_table[rows].clamp(min=0), torch.where(real, lengths, 0)


FEW_PAIRS = 1 << 20
"""Up to this many pairs of a token and a request, comparing them all is faster than the launches of a search, in eager mode."""


def no_plan(call: PlanPagedAttention | PlanMlaAttention) -> None:
    """Zeros, which are no plan: kernels that plan refuse it, the others do not read it."""
    call.plan.zero_()


UNKNOWN = 2**31 - 1
"""Pages of a pool whose size is not given: only negative ids are holes of it."""


def named_pages(call: NamedPages) -> tuple[Tensor, Tensor]:
    """The reference of `attnops.ops.named_pages`."""
    return named(call, call.num_pages, call.page_size, call.squeeze, call.window_left)
