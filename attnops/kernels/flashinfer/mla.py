"""FlashInfer's attention over latents, called as `_flashinfer` calls the rest: the JIT module itself, on a plan made once a step.

The planner cuts queries times heads into tiles and the keys into parts, and keeps of the page table only where each row of it starts.
So the table itself is what the kernel reads pages from: nothing is compressed, and it may change under a plan. In pages, both kernels
zero the values past a request's end and replace their logits; a row without keys gives 0 and lse -inf.

Latents in float8_e4m3fn become bfloat16 as they are read, on SM90 only. The kernel takes their scale as a number of the host's; a scale on
the device meets the query before, which is rounded once more for it, too coarsely for an lse, and the output after.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnops.errors import InvalidInput
from attnops.kernel import Capture, Kernel, Need, Plan, Tolerance, dtypes, one_of, register, without
from attnops.kernels.flashinfer.modules import ALL_KEYS, CAUSAL, FA2, FA3, NAMES, PACKAGE, sm_count
from attnops.kernels.shared.plan import HEADER, Cutter, dtype_code, host_plan, read_header, whole_table, within, write_header
from attnops.problem import Problem, Refusal
from attnops.reference.holes import UNKNOWN

MAKER = "attnops.ops.plan_mla_attention"
LATENT, ROPE, TILE = 512, 64, 64
MOST_WORKS = 16384
"""Pieces of work that a plan has room for (scheduler.cuh, MLAPlan); it does not look whether they fit."""
FIELDS = ("num_tokens", "max_pages", "q_heads", "page_size", "dtype", "causal")


@dataclass(frozen=True)
class Shape:
    """What a plan is made for: all a call's numbers but its lengths. `causal`: no for a lone query, which sees every key either way."""

    num_tokens: int
    max_pages: int
    q_heads: int
    page_size: int
    dtype: torch.dtype
    causal: bool

    @property
    def fields(self) -> list[int]:
        """For the header."""
        return [int(v) for v in (self.num_tokens, self.max_pages, self.q_heads, self.page_size, dtype_code(self.dtype), self.causal)]


def places(sms: int, workspace: Cutter) -> tuple[Tensor, Tensor]:
    """(int workspace, float workspace): what MLAPlan takes from them, which no length changes."""
    ints = 9 * 4 * MOST_WORKS + 5 * 4 * sms + 16 * 16
    return workspace.cut(ints), workspace.cut(2 * sms * TILE * (2 * LATENT + 4) + 64)


def rows_of_plan(s: Shape, seq_lens: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int) -> tuple[Tensor, Tensor, Tensor]:
    """(query starts `[n + 1]`, first entries in the flat page table `[n + 1]`, keys `[n]`), int32 on the CPU, of rows of all tokens.

    Queries that see no key, and padding, are rows of their own without keys: causal tiles reckon from a row's keys minus its queries.
    Raises InvalidInput for lengths that the kernels would read past the tables with.
    """
    within("seq_lens", seq_lens, s.max_pages * s.page_size)
    within("lengths of cu_seqlens_q", cu_seqlens_q.diff(), max_seqlen_q)
    q_lens, k_lens, starts, firsts, keys = cu_seqlens_q.diff().tolist(), seq_lens.tolist(), [0], [], []
    if (tokens := sum(q_lens)) > s.num_tokens:
        raise InvalidInput("cu_seqlens_q[-1]", tokens, f"<= {s.num_tokens} tokens")

    def row(queries: int, first: int, seen: int) -> None:
        if queries:
            starts.append(starts[-1] + queries)
            firsts.append(first)
            keys.append(seen)

    for b, (n, length) in enumerate(zip(q_lens, k_lens, strict=True)):
        blind = max(n - length, 0) if s.causal or length == 0 else 0
        row(blind, 0, 0)
        row(n - blind, b * s.max_pages, length)
    # One row a token, so that a step's lengths do not change how many heads a tile holds when every request has one query.
    for _ in range(s.num_tokens - tokens):
        row(1, 0, 0)
    made = (torch.tensor(x, dtype=torch.int32) for x in (starts, [*firsts, 0], keys))
    return next(made), next(made), next(made)


def works(s: Shape, starts: Tensor, keys: Tensor, sms: int) -> int:
    """At most how many pieces MLAPlan cuts these rows into: tiles of queries times heads, and each tile's keys in parts of one size."""
    q_lens = starts.diff().long()
    cluster = 2 if int(starts[-1]) * s.q_heads // len(q_lens) > TILE else 1
    tiles = (q_lens * s.q_heads + cluster * TILE - 1) // (cluster * TILE)
    # Causal tiles see fewer keys than their row, hence smaller parts of fewer keys: half of all keys bounds the part from below.
    total = int((tiles * keys).sum()) // (2 if s.causal else 1)
    average = max(total // (sms // cluster), 1)
    part = next((size for most, size in ((8, 32), (16, 64), (32, 128), (64, 192)) if average <= most), -(-average // 256) * 256)
    return int((tiles * ((keys + part - 1) // part).clamp(min=1)).sum())


def make_plan(
    path: int, page_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor, *, num_tokens: int, max_seqlen_q: int, q_heads: int,
    head_dim: int, v_head_dim: int, page_size: int, dtype: str, kv_dtype: str, causal: bool = True, num_pages: int = UNKNOWN,
    policy: str = "", plan: Tensor, workspace: Tensor,
) -> None:  # fmt: skip
    """See `attnops.ops.plan_mla_attention`. The copy of the lengths to the host waits for the stream, once a step."""
    if num_tokens == 0 or page_table.numel() == 0:
        plan.zero_()  # nothing to attend to, and nobody reads it
        return
    s = Shape(num_tokens, page_table.shape[1], q_heads, page_size, getattr(torch, dtype), causal and max_seqlen_q > 1)
    page_table, seq_lens = whole_table(page_table, seq_lens, cu_seqlens_q, num_pages, page_size)
    sms = sm_count(page_table.device)
    ints, floats = places(sms, Cutter("workspace", workspace))
    staging = Cutter("plan", plan[HEADER:].view(torch.uint8)).cut(ints.numel())
    lengths = torch.cat([seq_lens, cu_seqlens_q]).cpu()
    starts, firsts, keys = rows_of_plan(s, lengths[: seq_lens.shape[0]], lengths[seq_lens.shape[0] :], max_seqlen_q)
    if (count := works(s, starts, keys, sms)) > MOST_WORKS:
        raise InvalidInput("work of a plan", f"up to {count} pieces", f"<= {MOST_WORKS}: fewer tokens or heads a call")
    if page_table.is_cuda and not staging.is_pinned():
        staging = torch.empty_like(staging, pin_memory=True)  # FlashInfer takes no other
    given = (floats, ints, staging, starts, firsts, keys, q_heads, v_head_dim, s.causal)
    info, _ = _module(path, s.dtype, getattr(torch, kv_dtype)).plan_with_staged_workspace_bytes(*given)
    write_header(plan, path, num_pages, s.fields, list(info))


def mla_attention(
    path: int,
    q_nope: Tensor,
    q_pe: Tensor,
    latent_pages: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    q_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
    plan: Tensor | None = None,
    *,
    max_seqlen_q: int,
    scale: float,
    causal: bool = True,
    window_left: int = -1,
    softcap: float = 0.0,
    holes: bool = True,
    policy: str = "",
    output: Tensor,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    """See `attnops.ops.mla_attention`. The kernel writes every row of `output` and `lse`: padding has rows of its own in the plan."""
    if not (output.numel() and page_table.numel() and latent_pages.numel()):
        output.zero_()
        if lse is not None:
            lse.fill_(float("-inf"))
        return
    s = Shape(
        q_nope.shape[0], page_table.shape[1], q_nope.shape[1], latent_pages.shape[1], q_nope.dtype, causal and max_seqlen_q > 1
    )  # fmt: skip
    pages = latent_pages.shape[0]
    made, info = read_header(plan, MAKER, FIELDS, s.fields, pages if holes else None)
    if made != path:
        raise InvalidInput("plan.path", NAMES.get(made, made), f"{NAMES[path]}: made for another kernel")
    if workspace is None:
        raise InvalidInput("workspace", "None", f"the workspace that {MAKER} was given with this plan")
    ints, floats = places(sm_count(workspace.device), Cutter("workspace", workspace))
    if holes:
        # The lengths are the plan's, of the table as it is without holes.
        page_table, _ = whole_table(page_table, seq_lens, cu_seqlens_q, pages, s.page_size)
    if kv_scale is not None:
        factor = kv_scale if q_scale is None else kv_scale * q_scale
        # One launch a part: a product of its own would be float32, and a copy.
        q_nope, q_pe = (torch.mul(x, factor, out=torch.empty_like(x)) for x in (q_nope, q_pe))
    out = output if output.stride(2) == 1 else torch.empty_like(output, memory_format=torch.contiguous_format)
    z = lse if lse is None or lse.is_contiguous() else torch.empty_like(lse, memory_format=torch.contiguous_format)
    latent, table = latent_pages[..., :LATENT], page_table.contiguous().view(-1)
    _module(path, q_nope.dtype, latent_pages.dtype).run(
        floats, ints, info, q_nope, q_pe, latent, latent_pages[..., LATENT:], table, out, z, CAUSAL if s.causal else ALL_KEYS,
        s.q_heads, s.page_size, scale, True, 1.0, 1.0, None,
    )  # fmt: skip
    if kv_scale is not None:
        torch.mul(out, kv_scale, out=output)
    elif out is not output:
        output.copy_(out)
    if lse is not None and z is not None and z is not lse:
        lse.copy_(z)


@functools.cache
def _module(path: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> Any:
    """FlashInfer's module: built by nvcc at first use, then loaded from its cache on disk. Its last argument: no profiler."""
    from flashinfer.jit import gen_batch_mla_module

    return gen_batch_mla_module(NAMES[path], dtype, kv_dtype, dtype, torch.int32, LATENT, ROPE, False).build_and_load()


def plan_sizes(*, device: torch.device, **_: object) -> tuple[int, int]:
    """See `attnops.ops.plan_mla_sizes`. No length or size of a call matters."""
    plan, workspace = Cutter("plan"), Cutter("workspace")
    sms = sm_count(device)
    places(sms, workspace)
    plan.cut(9 * 4 * MOST_WORKS + 5 * 4 * sms + 16 * 16)
    return HEADER + -(-plan.used // 8), workspace.used


def _dtypes(p: Problem) -> Refusal | None:
    if p.kv_dtype == torch.float8_e4m3fn and p.dtype == torch.bfloat16:
        return None if p.target.arch == 90 else Refusal("kv_dtype", p.kv_dtype, "the query's bfloat16 (float8_e4m3fn on sm90)")
    return dtypes(torch.float16, torch.bfloat16)(p)


def _scales(p: Problem) -> Refusal | None:
    if p.kv_dtype == p.dtype:
        return Refusal("kv_scales", True, "no (but of float8 latents)") if p.kv_scales else None
    return Refusal("lse", True, "no (over float8 latents)") if p.lse else None


def _heads(p: Problem) -> Refusal | None:
    """A causal tile that ends amid a query's heads drops that query's last key where it begins a tile of keys (floor against ceil)."""
    if not p.causal or (p.queries.hi is not None and p.queries.hi <= 1) or TILE % p.q_heads == 0 or p.q_heads == 2 * TILE:
        return None
    return Refusal("q_heads", p.q_heads, f"a divisor of {TILE}, or {2 * TILE} (causal, more than one query a request)")


NEEDS: tuple[Need, ...] = (
    _dtypes,
    one_of("v_head_dim", LATENT),
    one_of("rope_dim", ROPE),
    _heads,
    _scales,
    *without("mask", "sinks", "softcap", "windowed"),
)


def declare(path: int, where: Need, cost_us: Callable[[Problem], float], about: str) -> None:
    """Register `flashinfer_mla_<path>`: its plan and its attention."""
    name = f"flashinfer_mla_{NAMES[path]}"
    assert path in (FA2, FA3)
    # NEVER: as in `flashinfer`, for Inductor's recorder of CUDA graphs would copy the plan.
    register(
        Kernel(
            name,
            "plan_mla_attention",
            functools.partial(make_plan, path),
            needs=(where, *NEEDS),
            packages=(PACKAGE,),
            cost_us=lambda p: 700.0 + path,
            capture=Capture.NEVER,
            plan=Plan(sizes=plan_sizes),
            about=about,
        )
    )
    register(
        Kernel(
            name,
            "mla_attention",
            functools.partial(mla_attention, path),
            needs=(where, *NEEDS, host_plan(MAKER), one_of("last_dim_contiguous", True)),
            packages=(PACKAGE,),
            cost_us=cost_us,
            capture=Capture.NEVER,
            tolerance=Tolerance(rounded_sums=path == FA2),
            about=about,
        )
    )
