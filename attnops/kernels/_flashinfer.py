"""How FlashInfer is called: its JIT modules directly, a plan made from host lengths, and fixed places in one workspace for all it reads.

Its wrapper classes hold buffers and the last plan; the modules under them hold nothing, so those are used. Plans are made in FlashInfer's
CUDA-graph mode: for the same sizes every plan has the same ints, hence the same launch, and only what lies in the workspace changes.

Importing flashinfer asks every GPU for its capability, which initialises CUDA, and makes folders under the user's cache. Both are left
to it: it is imported when a kernel or a plan runs on CUDA tensors, when CUDA is up already, and no variable is set in its behalf.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnops.errors import InvalidInput
from attnops.kernel import Package
from attnops.kernels._plan import HEADER, Cutter, dtype_code, read_header, write_header
from attnops.reference import data

PACKAGE = Package("flashinfer", ("flashinfer-python",), "0.7.2", "pip install flashinfer-python")
MAKER = "attnops.ops.plan_paged_attention"

DECODE, FA2, FA3 = 1, 2, 3
"""Paths: CUDA cores, tensor cores of SM80 and later with the heads of a group packed, warp groups of SM90."""
NAMES = {DECODE: "decode", FA2: "fa2", FA3: "fa3"}
NHD, ALL_KEYS, CAUSAL = 0, 0, 1
I32 = torch.int32

FIELDS = (
    "num_tokens", "requests", "max_pages", "q_heads", "kv_heads", "head_dim", "v_head_dim", "page_size", "dtype", "kv_dtype",
    "decode", "causal", "window_left", "softcap", "sinks", "deterministic",
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """What a plan is made for: all a call's numbers but its lengths. `decode`: no request has more than one query."""

    num_tokens: int
    requests: int
    max_pages: int
    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    page_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    decode: bool
    causal: bool
    window_left: int
    softcap: bool
    sinks: bool
    deterministic: bool

    @property
    def fields(self) -> list[int]:
        """For the header. A lone query at the last key sees the same keys, causal or not."""
        values = {name: getattr(self, name) for name in FIELDS}
        values |= {"dtype": dtype_code(self.dtype), "kv_dtype": dtype_code(self.kv_dtype), "causal": self.causal or self.decode}
        return [int(v) for v in values.values()]

    @property
    def group(self) -> int:
        """Query heads a key head serves."""
        return self.q_heads // self.kv_heads

    @property
    def rows(self) -> int:
        """What FlashInfer takes for requests: the tokens when decoding, else the requests and one more that owns the padding."""
        return self.num_tokens if self.decode else self.requests + 1

    @property
    def mask_mode(self) -> int:
        """FlashInfer's MaskMode."""
        return CAUSAL if self.causal and not self.decode else ALL_KEYS


def path_of(s: Shape, arch: int, max_seqlen_q: int) -> int:
    """Which of FlashInfer's kernels: a function of numbers that do not change between steps.

    A decode takes tensor cores from four query heads a key head on (the bound SGLang uses), where they are filled; FA3 does not pack a
    group's heads, so a few queries are FA2's too. Deterministic calls take one path whatever their longest request.
    """
    fa3 = arch == 90 and s.head_dim == s.v_head_dim and s.head_dim in (64, 128, 256)
    if not s.deterministic:
        if s.decode and s.group < 4 and s.head_dim == s.v_head_dim and not s.sinks:
            return DECODE
        if s.decode or max_seqlen_q * s.group <= 64:
            return FA2
    return FA3 if fa3 else FA2


# The workspace --------------------------------------------------------------------------------------------------------


@functools.cache
def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors of `device`; off CUDA, where only stand-ins run, a few."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


def tile_q(s: Shape) -> int:
    """FlashInfer's FA2DetermineCtaTileQ for the plans made here (utils.cuh; on SM80 and later)."""
    packed = s.group * (1 if s.decode and not s.deterministic else max(total_rows(s) - s.rows + 1, 1))
    if packed > 64 and s.v_head_dim < 256:
        return 128
    return 64 if packed > 16 else 16


def total_rows(s: Shape) -> int:
    """Rows that FA2 is told to reckon with. Deterministic: so many that its tile is the same for any batch."""
    return max(s.num_tokens, s.rows + 128) if s.deterministic else s.num_tokens


def whole_keys(s: Shape, sms: int) -> bool:
    """FA2 shall not split the keys: the tiles fill the GPU as they are, or the order of summation must not depend on the batch."""
    tiles = s.rows * -(-s.group // tile_q(s)) if s.decode else -(-s.num_tokens * s.group // tile_q(s)) + s.rows - 1
    return s.deterministic or tiles >= 2 * sms // s.kv_heads


def scratch(s: Shape, path: int, sms: int) -> tuple[int, int]:
    """(int workspace, float workspace) in bytes: upper bounds of what scheduler.cuh takes from them, paddings included."""
    if path == DECODE:
        blocks = max(16 * sms // s.kv_heads, s.rows)  # at most 16 blocks of 128 threads a multiprocessor
        return 13 * blocks + 512, 16 * sms // s.kv_heads * s.q_heads * (s.v_head_dim + 1) * 4 + 512
    if path == FA3:
        works = -(-s.num_tokens // 128) + s.rows
        return 28 * max(works, min(works, 4096) * s.q_heads) + 4 * sms + 1024, 16
    tiles = max(2 * sms // s.kv_heads, -(-total_rows(s) * s.group // 16) + s.rows * -(-s.group // 16))
    partial = 0 if whole_keys(s, sms) else -(-2 * sms // s.kv_heads * max(tile_q(s), 64) // s.group) + s.rows
    return 13 * tiles + 4 * (s.rows + total_rows(s)) + 1024, partial * s.q_heads * (s.v_head_dim + 1) * 4 + 512


@dataclass(frozen=True)
class Places:
    """Where things lie in the workspace: `tables` int32 (query starts, page starts, last page lengths), and what FlashInfer writes."""

    tables: Tensor
    indices: Tensor
    ints: Tensor
    floats: Tensor


def places(s: Shape, path: int, sms: int, workspace: Cutter) -> Places:
    """Cut the workspace; the sizes are those of the call, so that every step of the same sizes finds the same addresses."""
    ints, floats = scratch(s, path, sms)
    cut = workspace.cut
    return Places(cut(3 * s.rows + 2, I32), cut(s.requests * s.max_pages, I32), cut(ints), cut(floats))


def staging(s: Shape, path: int, sms: int, plan: Cutter) -> tuple[Tensor, Tensor]:
    """(tables, int workspace) beside the header: host memory that is copied from, pinned if the caller's plan is."""
    return plan.cut(3 * s.rows + 2, I32), plan.cut(scratch(s, path, sms)[0])


def split_tables(s: Shape, tables: Tensor) -> list[Tensor]:
    """(query starts `[rows + 1]`, page starts `[rows + 1]`, last page lengths `[rows]`)."""
    return list(tables.split([s.rows + 1, s.rows + 1, s.rows]))


# The plan -------------------------------------------------------------------------------------------------------------


def host_tables(s: Shape, seq_lens: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(query starts, page starts, last page lengths, key lengths) of `rows`, int32 on the CPU, from lengths on the CPU.

    Raises InvalidInput for lengths that the kernels would read past the tables with.
    """
    q_lens = cu_seqlens_q.diff()
    for field, lens, most in (("seq_lens", seq_lens, s.max_pages * s.page_size), ("lengths of cu_seqlens_q", q_lens, max_seqlen_q)):
        if lens.numel() and not 0 <= int(lens.min()) <= int(lens.max()) <= most:
            raise InvalidInput(field, lens.tolist(), f"0 <= each <= {most}")
    if int(cu_seqlens_q[-1]) > s.num_tokens:
        raise InvalidInput("cu_seqlens_q[-1]", int(cu_seqlens_q[-1]), f"<= {s.num_tokens} tokens")
    if s.causal and bool(((seq_lens > 0) & (seq_lens < q_lens)).any()):
        raise InvalidInput("seq_lens", seq_lens.tolist(), f"no key, or at least as many as new tokens {q_lens.tolist()} (causal)")
    keys = torch.where(q_lens > 0, seq_lens, 0)
    if s.decode:
        keys = keys[q_lens > 0]
        starts = torch.arange(s.rows + 1, dtype=I32)
    else:
        starts = torch.cat([cu_seqlens_q, torch.tensor([s.num_tokens], dtype=I32)])
    keys = torch.nn.functional.pad(keys, (0, s.rows - keys.shape[0]))
    pages = (keys + s.page_size - 1) // s.page_size
    page_starts = torch.nn.functional.pad(pages.cumsum(0, dtype=I32), (1, 0))
    return starts, page_starts, torch.where(keys > 0, (keys - 1) % s.page_size + 1, 0).to(I32), keys.to(I32)


def make_plan(
    s: Shape, path: int, page_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int, plan: Tensor, workspace: Tensor
) -> None:
    """Plan a step, writing into `plan` and `workspace` only. The copy of the lengths to the host waits for the stream, once a step."""
    sms = sm_count(page_table.device)
    at = places(s, path, sms, Cutter("workspace", workspace))
    tables, ints = staging(s, path, sms, Cutter("plan", plan[HEADER:].view(torch.uint8)))
    lengths = torch.cat([seq_lens, cu_seqlens_q]).cpu()
    starts, page_starts, last, keys = host_tables(s, lengths[: s.requests], lengths[s.requests :], max_seqlen_q)
    tables.copy_(torch.cat([starts, page_starts, last]))
    at.tables.copy_(tables, non_blocking=True)
    asked = torch.where(cu_seqlens_q.diff() > 0, seq_lens, 0)
    at.indices.copy_(data.kv_indices(page_table.clamp(min=0), asked, page_size=s.page_size)[1])
    sizes = (s.q_heads, s.kv_heads, s.page_size, True)
    if path == DECODE:
        empty = (torch.empty(0, dtype=s.dtype), torch.empty(0, dtype=s.kv_dtype))
        found = module(s, path).plan(
            at.floats, at.ints, ints, page_starts, s.rows, *sizes, s.window_left, float(s.softcap), s.head_dim, s.v_head_dim, *empty
        )
    else:
        given = (at.floats, at.ints, ints, starts, page_starts, keys, total_rows(s) if path == FA2 else s.num_tokens, s.rows, *sizes)
        rules = (s.head_dim, s.v_head_dim, s.mask_mode == CAUSAL, s.window_left)
        uniform = 1 if s.decode and not s.deterministic else 0
        found = module(s, path).plan(*given, *rules, *((-1, whole_keys(s, sms), 0, uniform) if path == FA2 else ()))
    write_header(plan, path, s.fields, list(found))


def run_paged(
    s: Shape, path: int, plan: Tensor | None, workspace: Tensor | None, tensors: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None,
    out: Tensor, lse: Tensor | None, scale: float, softcap: float,
) -> None:  # fmt: skip
    """Run the planned kernel on (query, key pages, value pages). lse: base 2, written in place.

    Raises InvalidInput, naming what does not fit, for a plan that was not made for this call.
    """
    made, ints = read_header(plan, MAKER, FIELDS, s.fields)
    if made != path:
        raise InvalidInput("plan.path", NAMES.get(made, made), f"{NAMES[path]}: max_seqlen_q differs from the plan's")
    if workspace is None:
        raise InvalidInput("workspace", "None", f"the workspace that {MAKER} was given with this plan")
    at = places(s, path, sm_count(workspace.device), Cutter("workspace", workspace))
    starts, page_starts, last = split_tables(s, at.tables)
    pages, found = (page_starts, at.indices, last, out, lse), module(s, path)
    if path == DECODE:
        found.run(at.floats, at.ints, ints, *tensors, *pages, NHD, s.window_left, False, None, softcap, scale, 1.0, 1e4)
        return
    given = (at.floats, at.ints, ints, *tensors, starts, *pages, s.mask_mode, NHD, s.window_left, False)
    if sinks is not None:
        found.paged_run(*given, sinks.float().contiguous(), scale)
    else:
        nothing = (None,) * 6
        found.paged_run(*given, *nothing, softcap, scale, None, None, None, 1.0, 1e4, 0, at.floats.numel())


# The modules ----------------------------------------------------------------------------------------------------------


def module(s: Shape, path: int) -> Any:
    """FlashInfer's module for the call: built by nvcc at first use, then loaded from its cache on disk."""
    return _module(path, s.dtype, s.kv_dtype, s.head_dim, s.v_head_dim, s.window_left >= 0, s.softcap, s.sinks)


@functools.cache
def _module(path: int, dtype: torch.dtype, kv_dtype: torch.dtype, d: int, dv: int, windowed: bool, softcap: bool, sinks: bool) -> Any:
    types = (dtype, kv_dtype, dtype, I32, d, dv, 0)
    if sinks:
        from flashinfer.jit.attention.modules import gen_batch_prefill_attention_sink_module

        return gen_batch_prefill_attention_sink_module(NAMES[path], *types, windowed).build_and_load()
    if path == DECODE:
        from flashinfer.decode import get_batch_decode_module

        return get_batch_decode_module(*types, windowed, softcap)
    from flashinfer.prefill import get_batch_prefill_module

    return get_batch_prefill_module(NAMES[path], *types, windowed, softcap, False)


def plan_sizes(s: Shape, sms: int) -> tuple[int, int]:
    """(length of `plan`, bytes of `workspace`) that serve every call of at most s.num_tokens, s.requests and s.max_pages."""
    cap = 2 * sms // s.kv_heads
    # FA2 splits keys only where tiles are few, so the longest call is not the one that needs most for the parts.
    split = (-(-cap * 128 // s.group) + cap) * s.q_heads * (s.v_head_dim + 1) * 4
    plans, workspaces = [0], [0]
    for decode, deterministic in ((True, False), (True, True), (False, False), (False, True)):
        shape = replace(s, decode=decode, deterministic=deterministic)
        for path in NAMES if decode and not deterministic else (FA2, FA3):
            plan, workspace = Cutter("plan"), Cutter("workspace")
            staging(shape, path, sms, plan)
            places(shape, path, sms, workspace)
            plans.append(plan.used)
            workspaces.append(workspace.used + split * (path == FA2))
    return HEADER + -(-max(plans) // 8), max(workspaces)
