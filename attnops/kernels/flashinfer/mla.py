"""`flashinfer_mla_fa2`, `flashinfer_mla_fa3`: FlashInfer's attention over latents
(https://arxiv.org/abs/2501.01005), planned by the host.

The kernel of SM80 and later and the one with SM90's warp groups have a name each: selection chooses
between them and FlashMLA, and the choice can be measured, forced and read in the generated code.
They are called as `flashinfer` calls the rest: the JIT module itself, on a plan made once a step.

The planner cuts queries times heads into tiles and the keys into parts, and keeps of the page table
only where each row of it starts. So the kernel reads page ids from the table itself: it may change
under a plan. In pages, both kernels zero the values past a request's end and replace their logits;
a row without keys gives 0 and lse -inf.

Latents in float8_e4m3fn become bfloat16 as they are read, on SM90 only. The kernel takes their
scale as a host number. A scale on the device multiplies the query before the kernel and the output
after it; the query is then rounded once more, too coarsely for an lse.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from attnops.core.errors import InvalidInput
from attnops.core.kernel import Capture, Kernel, Need, Plan, Tolerance, arch, demand, register
from attnops.core.problem import Problem
from attnops.kernels.flashinfer.libraries import PACKAGE, SHORT, Library, announce, built_by
from attnops.kernels.flashinfer.modules import FA2, FA3, HALVES, NAMES, gapless, sm_count
from attnops.kernels.shared.plan import (
    HEADER,
    cut,
    host_plan,
    lengths_of,
    padded,
    read_header,
    staging_of,
    whole_table,
    write_header,
)
from attnops.kernels.shared.tokens import LATENT, LATENTS, ROPE, blank
from attnops.measured import Roofline, phases

if TYPE_CHECKING:
    from attnops.ops.latent import record as mla
    from attnops.ops.pages import plan

MAKER = "attnops.ops.plan_mla_attention"
TILE = 64
MOST_WORKS = 16384
"""Pieces of work that a plan has room for (scheduler.cuh, MLAPlan); it does not look whether they
fit."""


class Shape(NamedTuple):
    """The numbers of a call that its plan depends on, but for its lengths. causal: False for a lone
    query, which sees every key."""

    num_tokens: int
    max_pages: int
    q_heads: int
    page_size: int
    dtype: torch.dtype
    causal: bool


def sizes_of(sms: int) -> tuple[int, int]:
    """Bytes that MLAPlan takes from the int workspace and from the float workspace, whatever the
    lengths."""
    sizes = (9 * 4 * MOST_WORKS + 5 * 4 * sms + 16 * 16, 2 * sms * TILE * (2 * LATENT + 4) + 64)
    return padded(sizes[0], torch.uint8), padded(sizes[1], torch.uint8)


def rows_of_plan(s: Shape, seq_lens: Tensor, cu_seqlens_q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(query starts `[n + 1]`, first entries in the flat page table `[n + 1]`, keys `[n]`), int32
    on the CPU, of rows of all tokens.

    Queries that see no key, and padding, are rows of their own without keys: causal tiles reckon
    from a row's keys minus its queries.
    """
    rows: list[tuple[int, int, int]] = []  # queries, first entry, keys
    for b, (n, length) in enumerate(
        zip(cu_seqlens_q.diff().tolist(), seq_lens.tolist(), strict=True)
    ):
        blind = max(n - length, 0) if s.causal or length == 0 else 0
        rows += [(blind, 0, 0), (n - blind, b * s.max_pages, length)]
    # One row a token, so that a step's lengths do not change how many heads a tile holds when every
    # request has one query.
    rows = [row for row in rows if row[0]] + [(1, 0, 0)] * (s.num_tokens - int(cu_seqlens_q[-1]))
    table = torch.tensor([(0, 0, 0), *rows], dtype=torch.int32)
    return (
        table[:, 0].cumsum(0, dtype=torch.int32),
        table[:, 1].roll(-1).contiguous(),
        table[1:, 2].contiguous(),
    )


def works(s: Shape, starts: Tensor, keys: Tensor, sms: int) -> int:
    """At most how many pieces MLAPlan cuts these rows into: tiles of queries times heads, and each
    tile's keys in parts of one size."""
    q_lens = starts.diff().long()
    cluster = 2 if int(starts[-1]) * s.q_heads // len(q_lens) > TILE else 1
    tiles = (q_lens * s.q_heads + cluster * TILE - 1) // (cluster * TILE)
    # Causal tiles see fewer keys than their row, hence smaller parts of fewer keys: half of all
    # keys bounds the part from below.
    total = int((tiles * keys).sum()) // (2 if s.causal else 1)
    average = max(total // (sms // cluster), 1)
    part = next(
        (size for most, size in ((8, 32), (16, 64), (32, 128), (64, 192)) if average <= most),
        -(-average // 256) * 256,
    )
    return int((tiles * ((keys + part - 1) // part).clamp(min=1)).sum())


def plan_mla_attention(path: int, call: plan.PlanMlaAttention) -> None:
    """Without tokens or pages, no kernel reads a plan, and it is zeros."""
    table, dtype = call.page_table, getattr(torch, call.dtype)
    if call.num_tokens == 0 or table.numel() == 0:
        call.plan.zero_()
        return
    s = Shape(
        call.num_tokens,
        table.shape[1],
        call.q_heads,
        call.page_size,
        dtype,
        call.causal and call.max_seqlen_q > 1,
    )
    sms = sm_count(table.device)
    sizes = sizes_of(sms)
    ints, floats = cut("workspace", call.workspace, sizes, torch.uint8)
    staging = staging_of(call, sizes[0])
    _, _, *on_host = lengths_of(call)
    starts, firsts, keys = rows_of_plan(s, *on_host)
    if (count := works(s, starts, keys, sms)) > MOST_WORKS:
        raise InvalidInput(
            "work of a plan",
            f"up to {count} pieces",
            f"<= {MOST_WORKS}: fewer tokens or heads a call",
        )
    given = (floats, ints, staging, starts, firsts, keys, call.q_heads, call.v_head_dim, s.causal)
    info, _ = load(path, dtype, getattr(torch, call.kv_dtype)).plan_with_staged_workspace_bytes(
        *given
    )
    ints[:1].copy_(staging[:1], non_blocking=True)  # once more, so that torch knows of the copy
    write_header(call.plan, path, call.num_pages, s, list(info))


def mla_attention(path: int, call: mla.MlaAttention) -> None:
    """The kernel writes every row of `output` and `lse`: padding has rows of its own in the
    plan."""
    if blank(call):
        return
    q_nope, q_pe, latents, table = call.q_nope, call.q_pe, call.latent_pages, call.page_table
    output, kv_scale = call.output, call.kv_scale
    s = Shape(
        q_nope.shape[0],
        table.shape[1],
        q_nope.shape[1],
        latents.shape[1],
        q_nope.dtype,
        call.causal and call.max_seqlen_q > 1,
    )
    info = read_header(call, MAKER, s, path, NAMES, latents.shape[0])
    assert call.workspace is not None  # `read_header` looked
    ints, floats = cut("workspace", call.workspace, sizes_of(sm_count(table.device)), torch.uint8)
    if call.holes:
        # The lengths are the plan's, of the table as it is without holes.
        table, _ = whole_table(call, latents.shape[0], s.page_size)
    if kv_scale is not None:
        # One launch a part: a product of its own would be float32, and a copy.
        q_nope, q_pe = (torch.mul(x, kv_scale, out=torch.empty_like(x)) for x in (q_nope, q_pe))
    out = (
        output
        if output.stride(2) == 1
        else torch.empty_like(output, memory_format=torch.contiguous_format)
    )
    z = None if call.lse is None else gapless(call.lse)
    # MaskMode: 0 is all keys, 1 causal.
    load(path, q_nope.dtype, latents.dtype).run(
        floats,
        ints,
        info,
        q_nope,
        q_pe,
        latents[..., :LATENT],
        latents[..., LATENT:],
        table.contiguous().view(-1),
        out,
        z,
        int(s.causal),
        s.q_heads,
        s.page_size,
        call.scale,
        True,
        1.0,
        1.0,
        None,
    )
    _write(call, out, z)


def _write(call: mla.MlaAttention, out: Tensor, lse: Tensor | None) -> None:
    """Write what the kernel wrote elsewhere."""
    if call.kv_scale is not None:
        torch.mul(out, call.kv_scale, out=call.output)
    elif out is not call.output:
        call.output.copy_(out)
    if lse is not None and call.lse is not None and lse is not call.lse:
        call.lse.copy_(lse)


@functools.cache
def load(path: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> Any:
    """FlashInfer's module: built by nvcc at first use, which it warns of, then loaded from its
    cache on disk."""
    announce(library_of(path, dtype, kv_dtype))
    return _load(path, dtype, kv_dtype)


def _load(path: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> Any:
    """Its last argument: no profiler."""
    from flashinfer.jit import gen_batch_mla_module

    return gen_batch_mla_module(
        NAMES[path], dtype, kv_dtype, dtype, torch.int32, LATENT, ROPE, False
    ).build_and_load()


def library_of(path: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> Library:
    """What is built of a module."""
    word = f"mla_{NAMES[path]}:{str(dtype).removeprefix('torch.')}"
    if kv_dtype != dtype:
        word += f":{str(kv_dtype).removeprefix('torch.')}"
    name = (
        f"batch_mla_attention_dtype_q_{SHORT[dtype]}_dtype_kv_{SHORT[kv_dtype]}"
        f"_dtype_o_{SHORT[dtype]}_dtype_idx_i32_head_dim_ckv_{LATENT}_head_dim_kpe_{ROPE}"
        f"_profiler_False_planabi2{'_sm90' if path == FA3 else ''}"
    )
    return Library(word, (name,), functools.partial(_load, path, dtype, kv_dtype))


def libraries_of(path: int, p: Problem) -> tuple[Library, ...]:
    """What a call of this Problem, or its plan, loads."""
    return (library_of(path, p.dtype, p.kv_dtype),)


def plan_sizes(*, device: torch.device, **_: object) -> tuple[int, int]:
    """See `attnops.ops.plan_sizes`. No length or size of a call matters."""
    ints, floats = sizes_of(sm_count(device))
    return HEADER + ints // 8, ints + floats


NEEDS: tuple[Need, ...] = (
    *LATENTS,
    # A causal tile that ends amid a query's heads drops that query's last key where it begins a
    # tile of keys (floor against ceil).
    demand(
        "q_heads",
        f"a divisor of {TILE}, or {2 * TILE} (causal, more than one query a request)",
        lambda p: (
            not p.rules.causal
            or p.sizes.queries.hi in (0, 1)
            or TILE % p.q_heads == 0
            or p.q_heads == 2 * TILE
        ),
    ),
    demand(
        "kv_dtype",
        "the query's dtype (float8_e4m3fn for bfloat16 on sm90)",
        lambda p: p.kv_dtype == p.dtype or (p.dtype == torch.bfloat16 and p.target.arch == 90),
    ),
    demand(
        "kv_scales",
        "no (but of float8 latents)",
        lambda p: not p.pages.kv_scales or p.kv_dtype != p.dtype,
    ),
    demand("lse", "no (over float8 latents)", lambda p: not p.results.lse or p.kv_dtype == p.dtype),
)
TAKES = frozenset({"kv_scale", "causal", "lse", "holes"})
FA2_US = phases(Roofline(18.4, 0.61, 0.41, 0.0032, 8300), Roofline(8.0, 0.44, 0.35, 0.085, 240))
FA3_US = phases(Roofline(17.1, 1.2, 0.89, 0.0012, 31_000), Roofline(7.4, 0.54, 0.83, 0.07, 230))
for _path, _where, _cost_us, _about in (
    (FA2, arch(80, 86, 87, 89, 90, 100, 103, 120, 121), FA2_US, "of SM80 and later"),
    (FA3, arch(90), FA3_US, "on SM90"),
):
    # NEVER: as in `flashinfer`, for Inductor's recorder of CUDA graphs would copy the plan.
    # fixed_steps: how many queries a tile has, and so the launch, follows from the mean of all
    # rows. Each has one query in such a step, padding included, and others in other steps.
    _kernel = functools.partial(
        Kernel,
        f"flashinfer_mla_{NAMES[_path]}",
        dtypes=HALVES,
        kv_dtypes=(*HALVES, torch.float8_e4m3fn),
        packages=(PACKAGE,),
        capture=Capture.NEVER,
        built=built_by(functools.partial(libraries_of, _path)),
        about=f"FlashInfer: MLA {_about}, planned by the host",
    )
    _us: Callable[[Problem], float] = functools.partial(lambda path, p: 700.0 + path, _path)
    _plan = functools.partial(plan_mla_attention, _path)
    register(
        _kernel(
            "plan_mla_attention",
            _plan,
            needs=(_where, *NEEDS),
            cost_us=_us,
            plan=Plan(sizes=plan_sizes, fixed_steps=True),
        )
    )
    _run, _needs = functools.partial(mla_attention, _path), (_where, *NEEDS, host_plan(MAKER))
    register(
        _kernel(
            "mla_attention",
            _run,
            takes=TAKES,
            needs=_needs,
            cost_us=_cost_us,
            tolerance=Tolerance(rounded_sums=_path == FA2),
        )
    )
