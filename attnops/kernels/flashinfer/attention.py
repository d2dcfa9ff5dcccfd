"""`flashinfer`: FlashInfer's kernels (https://arxiv.org/abs/2501.01005) for paged and packed calls,
on plans that the host makes.

Which of them runs (CUDA cores or tensor cores for decode, FA2 or FA3 for more queries) follows from
numbers that do not change between steps. Pages may hold anything past a request's end: all of them
zero the values they load from there and replace the logits. Data pointers must be 16-byte aligned,
as torch allocates them.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnops.core.errors import InvalidInput
from attnops.core.kernel import (
    Capture,
    Invariant,
    Kernel,
    Need,
    Plan,
    Tolerance,
    arch,
    demand,
    deterministic,
    one_of,
    register,
)
from attnops.core.problem import Target
from attnops.core.tensors import no_lse
from attnops.kernels.flashinfer import modules as fi
from attnops.kernels.flashinfer.libraries import PACKAGE, built_by
from attnops.kernels.flashinfer.modules import I32, LN2, Layout, Places, Shape, gapless
from attnops.kernels.shared.plan import (
    FIRST,
    HEADER,
    cut,
    host_plan,
    lengths_of,
    read_header,
    staging_of,
    within,
    write_header,
)
from attnops.kernels.shared.tokens import blank, fresh, past, see_nothing, with_sinks
from attnops.measured import Roofline, phases

if TYPE_CHECKING:
    from attnops.ops.attention import varlen
    from attnops.ops.pages import plan, record as paged

MAKER = "attnops.ops.plan_paged_attention"


def paged_attention(call: paged.PagedAttention) -> None:
    """The kernel writes every row of `output`: padding has a request of its own in the plan.

    The page ids it reads are the plan's, which has no holes: without the caller's promise it must
    have been made for this many pages.
    """
    query, output, lse = call.query, call.output, call.lse
    if blank(call):
        return
    c = _layout(call, query.device, Shape.of_layer(call))
    ints = read_header(call, MAKER, c.shape, c.path, fi.NAMES, call.k_pages.shape[0])
    assert call.workspace is not None  # `read_header` looked
    at = Places._make(cut("workspace", call.workspace, c.sizes, I32))
    out, z = gapless(output), None if lse is None else gapless(lse)
    fi.run(c, at, ints, call, (query, call.k_pages, call.v_pages), out, z)
    if out is not output:
        output.copy_(out)
    if lse is not None and z is not None:
        lse.copy_(_natural(z, call)) if call.sinks is not None or z is not lse else lse.mul_(LN2)


def varlen_attention(call: varlen.VarlenAttention) -> tuple[Tensor, Tensor]:
    """The op takes no plan, so every call copies the lengths to the host and plans."""
    query, key, value = call.query, call.key, call.value
    (tokens, q_heads, head_dim), (_, kv_heads, v_head_dim) = query.shape, value.shape
    output, lse = fresh(call)
    cu_q, cu_k = torch.stack([call.cu_seqlens_q, call.cu_seqlens_k]).cpu()
    for field, cu, most, rows in (
        ("q", cu_q, call.max_seqlen_q, tokens),
        ("k", cu_k, call.max_seqlen_k, key.shape[0]),
    ):
        within(f"lengths of cu_seqlens_{field}", cu.diff(), most)
        within(f"cu_seqlens_{field}[-1]", cu[-1:], rows)
    used = int(cu_k[-1])
    if query.numel() and used:
        queries, keys = _ragged(cu_q, cu_k, tokens, call.causal)
        shape = Shape(
            tokens,
            len(queries) - 1,
            0,
            q_heads,
            kv_heads,
            head_dim,
            v_head_dim,
            1,
            query.dtype,
            False,
            call.causal,
            call.window_left,
            call.softcap > 0,
            call.sinks is not None,
            deterministic(call.policy),
        )
        c = _layout(call, query.device, shape)
        ints, at = _plan_ragged(c, queries, keys, query.device)
        # FA3 loads whole tiles of values, and a weight of 0 does not silence NaN: keys of no
        # request are not shown to it. Detached: the exchange of tensors with tvm_ffi refuses those
        # of a training step, which want a gradient.
        fi.run(
            c,
            at,
            ints,
            call,
            (query.detach(), key[:used].detach(), value[:used].detach()),
            output,
            lse,
        )
    else:
        see_nothing(output, lse)
    return output, no_lse(query) if lse is None else _natural(lse, call)


def _natural(z: Tensor, call: paged.PagedAttention | varlen.VarlenAttention) -> Tensor:
    """lse `[T, Hq]` of base 2 -> natural; with sinks, theirs where no key is seen, and -inf for
    padding."""
    if call.sinks is None:
        return z * LN2
    return with_sinks(z * LN2, call.sinks).masked_fill(
        past(call.cu_seqlens_q, z.shape[0])[:, None], float("-inf")
    )


def _layout(call: Any, device: torch.device, shape: Shape) -> Layout:
    return fi.layout_of(device, Target.of(device).arch, call.max_seqlen_q, shape)


# The host's half: lengths on the CPU become the tables and the plan that the kernels read ---------


def plan_paged_attention(call: plan.PlanPagedAttention) -> None:
    """Without tokens or pages, no kernel reads a plan, and it is zeros."""
    device = call.page_table.device
    if call.num_tokens == 0 or call.page_table.numel() == 0:
        call.plan.zero_()
        return
    c = _layout(call, device, Shape.of_plan(call))
    table, seq_lens, *on_host = lengths_of(call)
    at = Places._make(cut("workspace", call.workspace, c.sizes, I32))
    sizes = _staged(c.sizes)
    tables, ints = staging_of(call, 4 * sum(sizes)).view(I32).split_with_sizes(sizes)
    starts, page_starts, last, keys = _host_tables(c.shape, *on_host)
    torch.cat([starts, page_starts, last], out=tables[: 3 * c.shape.rows + 2])
    if not on_host[1].diff().all():  # requests without a token have no row of a decode
        seq_lens = torch.where(call.cu_seqlens_q.diff() > 0, seq_lens, 0)
    _, indices, _ = torch.ops.attnops.kv_indices.default(table, seq_lens, page_size=call.page_size)
    at.indices[: indices.numel()].copy_(indices)
    made = _call_planner(
        c, fi.load_paged(c.module), at, ints.view(torch.uint8), (starts, page_starts, keys)
    )
    call.workspace[: tables.nbytes].view(I32).copy_(tables, non_blocking=True)
    write_header(call.plan, c.path, call.num_pages, c.shape, made)


def _staged(sizes: tuple[int, ...]) -> tuple[int, int]:
    """Int32 numbers that are copied from the host: the tables with their gap, and FlashInfer's int
    workspace."""
    return sum(sizes[:4]), sizes[5]


def _host_tables(
    s: Shape, seq_lens: Tensor, cu_seqlens_q: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(query starts, page starts, last page lengths, key lengths) of `rows`, int32 on the CPU, from
    lengths on the CPU.

    Raises InvalidInput: a causal request has more queries than keys, which FA2 would get wrong.
    """
    q_lens = cu_seqlens_q.diff()
    if s.causal and bool(((seq_lens > 0) & (seq_lens < q_lens)).any()):
        raise InvalidInput(
            "seq_lens",
            seq_lens.tolist(),
            f"no key, or at least as many as new tokens {q_lens.tolist()} (causal)",
        )
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


def _ragged(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, tokens: int, causal: bool
) -> tuple[list[int], list[int]]:
    """(query lengths, key lengths) of FlashInfer's requests: ours, and one more for the padding.

    A causal request with fewer keys than queries becomes two: FA2 gets the queries that see no key
    wrong when they share a request.
    """
    queries, keys = [], []
    for q, k in zip(cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist(), strict=True):
        blind = q - k if causal and 0 < k < q else 0
        queries += [blind, q - blind] if blind else [q]
        keys += [0, k] if blind else [k]
    return [*queries, tokens - int(cu_seqlens_q[-1])], [*keys, 0]


def _call_planner(
    c: Layout, module: Any, at: Places, ints: Tensor, tables: tuple[Tensor, Tensor, Tensor]
) -> list[int]:
    """FlashInfer's own plan. tables: query starts, page starts and key lengths on the host. ints:
    host memory for its int workspace."""
    starts, page_starts, keys = tables
    s, sizes, dims = (
        c.shape,
        (c.shape.q_heads, c.shape.kv_heads, c.shape.page_size, True),
        (c.shape.head_dim, c.shape.v_head_dim),
    )
    given: tuple[Any, ...]
    if c.path == fi.DECODE:
        empty = torch.empty(0, dtype=s.dtype)
        # A row without keys gets a block too, which the planner forgets when it fits the blocks to
        # the launch (scheduler.cuh, PartitionPagedKVCacheBinarySearchMinNumPagePerBatch). It is
        # shown a page; the kernel reads the device's tables.
        shown = pad(page_starts.diff().clamp(min=1).cumsum(0, dtype=I32), (1, 0))
        given = (shown, s.rows, *sizes, s.window_left, float(s.softcap), *dims, empty, empty)
    else:
        most = s.total_rows if c.path == fi.FA2 else s.num_tokens
        given = (starts, page_starts, keys, most, s.rows, *sizes, *dims, s.causal, s.window_left)
    if c.path == fi.FA2:
        given += (-1, fi.whole_keys(s, c.sms), 0, 1 if s.decode and not s.deterministic else 0)
    return list(module.plan(at.floats, at.ints, ints, *given))


def _plan_ragged(
    c: Layout, queries: list[int], keys: list[int], device: torch.device
) -> tuple[list[int], Places]:
    """A plan of a packed call, in memory of its own: (FlashInfer's ints, places)."""
    workspace = torch.empty(4 * sum(c.sizes), dtype=torch.uint8, device=device)
    at = Places._make(cut("workspace", workspace, c.sizes, I32))
    # Pageable memory: a copy from it is done before the call returns, so that it may be freed then.
    ints = torch.empty(at.ints.nbytes, dtype=torch.uint8)
    starts = pad(torch.tensor(queries, dtype=I32).cumsum(0, dtype=I32), (1, 0))
    page_starts, last, lengths = _pages(c.shape, torch.tensor(keys, dtype=I32))
    workspace[: 4 * (3 * c.shape.rows + 2)].view(I32).copy_(torch.cat([starts, page_starts, last]))
    return _call_planner(c, fi.load(c.module), at, ints, (starts, page_starts, lengths)), at


def plan_sizes(
    *, max_tokens: int, max_requests: int, max_pages: int, device: torch.device, **statics: Any
) -> tuple[int, int]:
    largest = {
        **statics,
        "num_tokens": max_tokens,
        "requests": max_requests,
        "max_pages": max_pages,
    }
    most, sms = Shape(*(largest.get(n, False) for n in Shape._fields)), fi.sm_count(device)
    cap = 2 * sms // most.kv_heads
    # FA2 splits keys only where tiles are few, so the longest call is not the one that needs most
    # for the parts.
    split = (-(-cap * 128 // most.group) + cap) * most.q_heads * (most.v_head_dim + 1) * 4
    plans, workspaces = [0], [0]
    for decode, steady in ((True, False), (True, True), (False, False), (False, True)):
        for path in fi.NAMES if decode and not steady else (fi.FA2, fi.FA3):
            found = fi.sizes_of(most._replace(decode=decode, deterministic=steady), path, sms)
            plans.append(sum(_staged(found)))
            workspaces.append(4 * sum(found) + split * (path == fi.FA2))
    return HEADER + max(plans) // 2, max(workspaces)


def last_pages(plan: Tensor, workspace: Tensor) -> Tensor | None:
    """See `Plan.last`. FA3's plan holds the lengths themselves, those of the others the pages of
    each row."""
    _, path, count, *numbers = plan[:HEADER].tolist()
    if count != len(Shape._fields) or path == fi.FA3:
        return None
    made = Shape._make(numbers[FIRST - 3 : FIRST - 3 + count])
    if not made.decode:
        return None
    rows = made.num_tokens
    return workspace[8 * rows + 8 : 12 * rows + 8].view(I32)  # behind two tables of rows + 1


PAGED = phases(Roofline(16.7, 1.2, 0.52, 0.00056, 28_000), Roofline(15.4, 0.47, 0.65, 0.0035))
PACKED = Roofline(
    281.0, 0.47, 0.65, 0.0035
)  # its launches wait for a plan, which the host makes in every call

# That FlashInfer compiles, its merge of split keys included
DIMS = ((64, 64), (128, 128), (256, 256), (192, 128))
NEEDS: tuple[Need, ...] = (
    arch(80, 86, 87, 89, 90, 100, 103, 120, 121),
    demand(
        "head_dim, v_head_dim",
        "64 | 128 | 256, or 192 with 128",
        lambda p: (p.head_dim, p.v_head_dim) in DIMS,
    ),
    demand(
        "window", "no right bound (but causal)", lambda p: p.rules.causal or p.rules.window[1] < 0
    ),
    demand(
        "softcap", "no (sinks)", lambda p: not (p.rules.sinks and p.rules.softcap)
    ),  # the sink variant has no softcap
    one_of("last_dim_contiguous", True),
)
# One set of strides serves keys and values, but in FA2, the only one to take unlike head dims.
ALIKE = demand(
    "pages_alike",
    "key and value pages of equal strides",
    lambda p: p.pages.pages_alike or p.head_dim != p.v_head_dim,
)
TAKES = frozenset({"sinks", "causal", "window_left", "window_right", "softcap"})
# A compiled graph is split around these. Planning waits for the device. The paged kernels
# themselves can be captured, and are when a graph is captured by hand; but Inductor's recorder
# copies a partition's inputs, frees its copy of the plan, a CPU tensor, and keeps writing to it
# (torch/_inductor/cudagraph_trees.py, reconstructed_inputs, seen in 2.11 and 2.13). FA2 adds up the
# weights that its matrix units are given.
_flashinfer = functools.partial(
    Kernel,
    "flashinfer",
    dtypes=fi.HALVES,
    packages=(PACKAGE,),
    built=built_by(fi.libraries_of),
    capture=Capture.NEVER,
    tolerance=Tolerance(rounded_sums=True),
    invariant=Invariant(),
    about="FlashInfer: decode and prefill, FA2 and FA3, planned by the host",
)
_paged = (*NEEDS, ALIKE, host_plan(MAKER))
# The host's time, about; the shipped table's `plan_us` is measured. A step makes one plan, and
# every packed call makes one.
register(
    _flashinfer(
        "plan_paged_attention",
        plan_paged_attention,
        needs=NEEDS,
        cost_us=lambda p: 700.0,
        plan=Plan(sizes=plan_sizes, last=last_pages, fixed=True),
    )
)
register(
    _flashinfer(
        "paged_attention",
        paged_attention,
        takes=TAKES | {"lse", "holes"},
        needs=_paged,
        cost_us=PAGED,
    )
)
register(
    _flashinfer(
        "varlen_attention",
        varlen_attention,
        takes=TAKES | {"return_lse"},
        needs=NEEDS,
        cost_us=PACKED,
    )
)
