"""The host's half of FlashInfer: lengths on the CPU become the tables and the plan that its kernels read."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnops.errors import InvalidInput
from attnops.kernels.flashinfer import modules as fi
from attnops.kernels.flashinfer.modules import I32, Call, Places, Shape
from attnops.kernels.shared.plan import HEADER, Cutter, read_header, whole_table, within, write_header
from attnops.reference import data

MAKER = "attnops.ops.plan_paged_attention"


def host_tables(s: Shape, seq_lens: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(query starts, page starts, last page lengths, key lengths) of `rows`, int32 on the CPU, from lengths on the CPU.

    Raises InvalidInput: a length is out of range, or a causal request has more queries than keys, which FA2 would get wrong.
    """
    q_lens = cu_seqlens_q.diff()
    within("seq_lens", seq_lens, s.max_pages * s.page_size)
    within("lengths of cu_seqlens_q", q_lens, max_seqlen_q)
    within("cu_seqlens_q[-1]", cu_seqlens_q[-1:], s.num_tokens)
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
    """(query lengths, key lengths) of what FlashInfer shall take for requests: ours, and one more for the padding.

    A causal request with fewer keys than queries becomes two: FA2 gets the queries that see no key wrong when they share a request.
    """
    queries, keys = [], []
    for q, k in zip(cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist(), strict=True):
        blind = q - k if causal and 0 < k < q else 0
        queries += [blind, q - blind] if blind else [q]
        keys += [0, k] if blind else [k]
    return [*queries, tokens - int(cu_seqlens_q[-1])], [*keys, 0]


def call_planner(c: Call, sms: int, at: Places, ints: Tensor, tables: tuple[Tensor, Tensor, Tensor]) -> list[int]:
    """FlashInfer's own plan. tables: query starts, page starts and key lengths on the host. ints: host memory for its int workspace."""
    starts, page_starts, keys = tables
    s, path = c.shape, c.path
    sizes = (s.q_heads, s.kv_heads, s.page_size, True)
    plan = fi.module(s, path).plan
    if path == fi.DECODE:
        empty = (torch.empty(0, dtype=s.dtype), torch.empty(0, dtype=s.kv_dtype))
        rules = (s.window_left, float(s.softcap), s.head_dim, s.v_head_dim)
        # A row without keys gets a block too, which the planner forgets when it fits the blocks to the launch (scheduler.cuh,
        # PartitionPagedKVCacheBinarySearchMinNumPagePerBatch). It is shown a page; the kernel reads the device's tables.
        shown = pad(page_starts.diff().clamp(min=1).cumsum(0, dtype=I32), (1, 0))
        return list(plan(at.floats, at.ints, ints, shown, s.rows, *sizes, *rules, *empty))
    most = fi.total_rows(s) if path == fi.FA2 else s.num_tokens
    given = (at.floats, at.ints, ints, starts, page_starts, keys, most, s.rows, *sizes)
    rules3 = (s.head_dim, s.v_head_dim, s.mask_mode == fi.CAUSAL, s.window_left)
    if path == fi.FA3:
        return list(plan(*given, *rules3))
    uniform = 1 if s.decode and not s.deterministic else 0
    return list(plan(*given, *rules3, -1, fi.whole_keys(s, sms), 0, uniform))


def staging(s: Shape, path: int, sms: int, plan: Cutter) -> tuple[Tensor, Tensor]:
    """(tables, int workspace) on the host: what is copied from."""
    return plan.cut(3 * s.rows + 2, I32), plan.cut(fi.scratch(s, path, sms)[0])


def make_plan(
    c: Call, page_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int, num_pages: int, plan: Tensor, workspace: Tensor
) -> None:
    """Plan a step, writing into `plan` and `workspace` only. The copy of the lengths to the host waits for the stream, once a step."""
    s, sms = c.shape, fi.sm_count(page_table.device)
    page_table, seq_lens = whole_table(page_table, seq_lens, cu_seqlens_q, num_pages, s.page_size, s.window_left)
    at = c.places(workspace)
    tables, ints = staging(s, c.path, sms, Cutter("plan", plan[HEADER:].view(torch.uint8)))
    lengths = torch.cat([seq_lens, cu_seqlens_q]).cpu()
    starts, page_starts, last, keys = host_tables(s, lengths[: s.requests], lengths[s.requests :], max_seqlen_q)
    tables.copy_(torch.cat([starts, page_starts, last]))
    workspace[: 4 * c.tables].view(I32).copy_(tables, non_blocking=True)
    asked = torch.where(cu_seqlens_q.diff() > 0, seq_lens, 0)
    at.indices.copy_(data.indices_of(page_table, asked, s.page_size)[1])
    fi.load_unlike(s, c.path)
    write_header(plan, c.path, num_pages, c.fields, call_planner(c, sms, at, ints, (starts, page_starts, keys)))


def read_plan(c: Call, plan: Tensor | None, workspace: Tensor | None, num_pages: int | None) -> tuple[list[int], Places]:
    """(FlashInfer's ints, places) of a plan for this call. Raises InvalidInput, naming what does not fit, for any other.

    num_pages: as in `read_header`.
    """
    made, ints = read_header(plan, MAKER, fi.FIELDS, c.fields, num_pages)
    if made != c.path:
        raise InvalidInput("plan.path", fi.NAMES.get(made, made), f"{fi.NAMES[c.path]}: max_seqlen_q differs from the plan's")
    if workspace is None:
        raise InvalidInput("workspace", "None", f"the workspace that {MAKER} was given with this plan")
    return ints, c.places(workspace)


def plan_sizes(s: Shape, sms: int) -> tuple[int, int]:
    """(length of `plan`, bytes of `workspace`) that serve every call of at most s.num_tokens, s.requests and s.max_pages."""
    cap = 2 * sms // s.kv_heads
    # FA2 splits keys only where tiles are few, so the longest call is not the one that needs most for the parts.
    split = (-(-cap * 128 // s.group) + cap) * s.q_heads * (s.v_head_dim + 1) * 4
    plans, workspaces = [0], [0]
    for decode, deterministic in ((True, False), (True, True), (False, False), (False, True)):
        shape = replace(s, decode=decode, deterministic=deterministic)
        for path in fi.NAMES if decode and not deterministic else (fi.FA2, fi.FA3):
            plan = Cutter("plan")
            staging(shape, path, sms, plan)
            plans.append(plan.used)
            workspaces.append(fi.cut(shape, path, sms).used + split * (path == fi.FA2))
    return HEADER + -(-max(plans) // 8), max(workspaces)


def plan_ragged(c: Call, queries: list[int], keys: list[int], device: torch.device) -> tuple[list[int], Places]:
    """A plan of a packed call, in memory of its own: (FlashInfer's ints, places)."""
    workspace = torch.empty(c.used, dtype=torch.uint8, device=device)
    at = c.places(workspace)
    # Pageable memory: what is copied from it is taken before the call returns, so that it may go.
    ints = torch.empty(at.ints.nbytes, dtype=torch.uint8)
    starts = pad(torch.tensor(queries, dtype=I32).cumsum(0, dtype=I32), (1, 0))
    page_starts, last, lengths = _pages(c.shape, torch.tensor(keys, dtype=I32))
    workspace[: 4 * c.tables].view(I32).copy_(torch.cat([starts, page_starts, last]))
    return call_planner(c, fi.sm_count(device), at, ints, (starts, page_starts, lengths)), at
