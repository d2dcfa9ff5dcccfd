"""The host's half of FlashInfer: lengths on the CPU become the tables and the plan that its kernels read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnops.errors import InvalidInput
from attnops.kernels.flashinfer import modules as fi
from attnops.kernels.flashinfer.modules import I32, Layout, Places, Shape
from attnops.kernels.shared.plan import HEADER, cut, host_lengths, whole_table, write_header
from attnops.problem import Target
from attnops.reference import data

if TYPE_CHECKING:
    from attnops.ops.plan import PlanPagedAttention

MAKER = "attnops.ops.plan_paged_attention"


def plan_paged_attention(call: PlanPagedAttention) -> None:
    """See `attnops.ops.plan_paged_attention`."""
    if call.num_tokens == 0 or call.page_table.numel() == 0:
        call.plan.zero_()  # without tokens or pages, no kernel reads a plan
        return
    device = call.page_table.device
    c = fi.layout_of(device, Target.of(device).arch, call.max_seqlen_q, Shape.of_plan(call))
    table, seq_lens = whole_table(call, call.num_pages, call.page_size)
    at = Places._make(cut("workspace", call.workspace, c.sizes, I32))
    tables, ints = cut("plan", call.plan[HEADER:].view(torch.uint8), _staged(c.sizes), I32)
    starts, page_starts, last, keys = _host_tables(c.shape, *host_lengths(call, seq_lens))
    torch.cat([starts, page_starts, last], out=tables[: 3 * c.shape.rows + 2])
    call.workspace[: tables.nbytes].view(I32).copy_(tables, non_blocking=True)
    asked = torch.where(call.cu_seqlens_q.diff() > 0, seq_lens, 0)
    indices = data.indices_of(table, asked, call.page_size)[1]
    at.indices[: indices.numel()].copy_(indices)
    made = _call_planner(c, fi.load_paged(c.module), at, ints.view(torch.uint8), (starts, page_starts, keys))
    write_header(call.plan, c.path, call.num_pages, c.shape, made)


def _staged(sizes: tuple[int, ...]) -> tuple[int, int]:
    """Int32 numbers that are copied from the host: the tables with their gap, and FlashInfer's int workspace."""
    return sum(sizes[:4]), sizes[5]


def _host_tables(s: Shape, seq_lens: Tensor, cu_seqlens_q: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(query starts, page starts, last page lengths, key lengths) of `rows`, int32 on the CPU, from lengths on the CPU.

    Raises InvalidInput: a causal request has more queries than keys, which FA2 would get wrong.
    """
    q_lens = cu_seqlens_q.diff()
    if s.causal and bool(((seq_lens > 0) & (seq_lens < q_lens)).any()):
        raise InvalidInput("seq_lens", seq_lens.tolist(), f"no key, or at least as many as new tokens {q_lens.tolist()} (causal)")
    keys = torch.where(q_lens > 0, seq_lens, 0)
    if s.decode:
        keys = keys[q_lens > 0]
        starts = torch.arange(s.rows + 1, dtype=I32)
    else:
        starts = torch.cat([cu_seqlens_q, torch.tensor([s.num_tokens], dtype=I32)])
    return starts, *_pages(s, pad(keys, (0, s.rows - keys.shape[0])))


def _pages(s: Shape, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(page starts, last page lengths, key lengths) of requests with `keys`."""
    pages = (keys + s.page_size - 1) // s.page_size
    last = torch.where(keys > 0, (keys - 1) % s.page_size + 1, 0)
    return pad(pages.cumsum(0, dtype=I32), (1, 0)), last.to(I32), keys.to(I32)


def ragged_tables(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, tokens: int, causal: bool) -> tuple[list[int], list[int]]:
    """(query lengths, key lengths) of FlashInfer's requests: ours, and one more for the padding.

    A causal request with fewer keys than queries becomes two: FA2 gets the queries that see no key wrong when they share a request.
    """
    queries, keys = [], []
    for q, k in zip(cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist(), strict=True):
        blind = q - k if causal and 0 < k < q else 0
        queries += [blind, q - blind] if blind else [q]
        keys += [0, k] if blind else [k]
    return [*queries, tokens - int(cu_seqlens_q[-1])], [*keys, 0]


def _call_planner(c: Layout, module: Any, at: Places, ints: Tensor, tables: tuple[Tensor, Tensor, Tensor]) -> list[int]:
    """FlashInfer's own plan. tables: query starts, page starts and key lengths on the host. ints: host memory for its int workspace."""
    starts, page_starts, keys = tables
    s, sizes, dims = c.shape, (c.shape.q_heads, c.shape.kv_heads, c.shape.page_size, True), (c.shape.head_dim, c.shape.v_head_dim)
    given: tuple[Any, ...]
    if c.path == fi.DECODE:
        empty = torch.empty(0, dtype=s.dtype)
        # A row without keys gets a block too, which the planner forgets when it fits the blocks to the launch (scheduler.cuh,
        # PartitionPagedKVCacheBinarySearchMinNumPagePerBatch). It is shown a page; the kernel reads the device's tables.
        shown = pad(page_starts.diff().clamp(min=1).cumsum(0, dtype=I32), (1, 0))
        given = (shown, s.rows, *sizes, s.window_left, float(s.softcap), *dims, empty, empty)
    else:
        most = fi.total_rows(s) if c.path == fi.FA2 else s.num_tokens
        given = (starts, page_starts, keys, most, s.rows, *sizes, *dims, s.causal, s.window_left)
    if c.path == fi.FA2:
        given += (-1, fi.whole_keys(s, c.sms), 0, 1 if s.decode and not s.deterministic else 0)
    return list(module.plan(at.floats, at.ints, ints, *given))


def plan_ragged(c: Layout, queries: list[int], keys: list[int], device: torch.device) -> tuple[list[int], Places]:
    """A plan of a packed call, in memory of its own: (FlashInfer's ints, places)."""
    workspace = torch.empty(4 * sum(c.sizes), dtype=torch.uint8, device=device)
    at = Places._make(cut("workspace", workspace, c.sizes, I32))
    # Pageable memory: a copy from it is done before the call returns, so that it may be freed then.
    ints = torch.empty(at.ints.nbytes, dtype=torch.uint8)
    starts = pad(torch.tensor(queries, dtype=I32).cumsum(0, dtype=I32), (1, 0))
    page_starts, last, lengths = _pages(c.shape, torch.tensor(keys, dtype=I32))
    workspace[: 4 * (3 * c.shape.rows + 2)].view(I32).copy_(torch.cat([starts, page_starts, last]))
    return _call_planner(c, fi.load(c.module), at, ints, (starts, page_starts, lengths)), at


def plan_sizes(*, max_tokens: int, max_requests: int, max_pages: int, device: torch.device, **statics: Any) -> tuple[int, int]:
    """See `attnops.ops.plan_sizes`."""
    largest = {**statics, "num_tokens": max_tokens, "requests": max_requests, "max_pages": max_pages}
    most, sms = Shape(*(largest.get(n, False) for n in Shape._fields)), fi.sm_count(device)
    cap = 2 * sms // most.kv_heads
    # FA2 splits keys only where tiles are few, so the longest call is not the one that needs most for the parts.
    split = (-(-cap * 128 // most.group) + cap) * most.q_heads * (most.v_head_dim + 1) * 4
    plans, workspaces = [0], [0]
    for decode, deterministic in ((True, False), (True, True), (False, False), (False, True)):
        shape = most._replace(decode=decode, deterministic=deterministic)
        for path in fi.NAMES if decode and not deterministic else (fi.FA2, fi.FA3):
            found = fi.sizes_of(shape, path, sms)
            plans.append(sum(_staged(found)))
            workspaces.append(4 * sum(found) + split * (path == fi.FA2))
    return HEADER + max(plans) // 2, max(workspaces)
