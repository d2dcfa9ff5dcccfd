"""The FlashInfer package: its own requirements, and the numbers and JIT modules of its attention.

Importing the package makes a folder for compiled modules and asks every GPU for its capability,
which initialises CUDA. So attnops imports it at the first call of a kernel, when a CUDA tensor is
at hand. FlashInfer compiles each module at its first use, with nvcc: once, before any capture.

FlashInfer's wrapper classes hold buffers and the last plan; the modules under them are stateless,
so those are used. Plans are made in its CUDA-graph mode: for the same sizes every plan has the same
ints, hence the same launch, and only the workspace's contents change.
"""

from __future__ import annotations

import functools
import importlib
import shutil
from importlib.util import find_spec
from math import log
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from attnops.core.kernel import deterministic
from attnops.core.problem import Problem, Refusal, Target
from attnops.kernels.flashinfer.libraries import PREBUILT, SHORT, Library, announce
from attnops.kernels.shared.plan import padded

if TYPE_CHECKING:
    from attnops.ops.pages import plan, record as paged

CUDA = "/usr/local/cuda/bin"
HALVES = (torch.float16, torch.bfloat16)
I32 = torch.int32

DECODE, FA2, FA3 = 1, 2, 3
"""Paths: CUDA cores, tensor cores of SM80 and later with the heads of a group as rows, warp groups
of SM90."""
NAMES = {DECODE: "decode", FA2: "fa2", FA3: "fa3"}
NHD, LN2 = 0, log(2.0)


def missing(target: Target) -> Refusal | None:
    """A probe: tvm_ffi, which the package imports, may be absent."""
    if target.assume is not None or find_spec("tvm_ffi") is not None:
        return None
    return Refusal("package", "tvm_ffi missing", "pip install apache-tvm-ffi")


def no_compiler(target: Target) -> Refusal | None:
    """A probe: FlashInfer builds its modules with nvcc and ninja at first use, unless a package of
    built ones is there."""
    if target.assume is not None or find_spec(PREBUILT) is not None:
        return None
    return absent_compiler()


def absent_compiler() -> Refusal | None:
    """Which of nvcc and ninja is missing here."""
    absent = [
        name
        for name in ("nvcc", "ninja")
        if shutil.which(name) is None and not Path(CUDA, name).exists()
    ]
    want = f"nvcc and ninja on PATH (or nvcc in {CUDA}), or flashinfer-jit-cache"
    return (
        Refusal("package", f"flashinfer without {' and '.join(absent)}", want) if absent else None
    )


@functools.cache
def module(name: str) -> Any:
    """`flashinfer.<name>`. Raises OSError, which names the variable to set, where its folder cannot
    be made."""
    try:
        return importlib.import_module(f"flashinfer.{name}")
    except OSError as error:
        hint = "flashinfer writes below $FLASHINFER_WORKSPACE_BASE, or the home folder, and cannot"
        raise OSError(f"{hint}: {error}") from error


def gapless(x: Tensor) -> Tensor:
    """`x`, or a contiguous tensor to write in its place."""
    return x if x.is_contiguous() else torch.empty_like(x, memory_format=torch.contiguous_format)


# The numbers of a call ----------------------------------------------------------------------------


class Shape(NamedTuple):
    """The numbers of a call that its plan depends on, but for its lengths.

    decode: no request has more than one query. causal: False for a decode, whose query sees every
    key either way. Packed calls have no pages: their page_size is 1 and max_pages 0.
    """

    num_tokens: int
    requests: int
    max_pages: int
    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    page_size: int
    dtype: torch.dtype
    decode: bool
    causal: bool
    window_left: int
    softcap: bool
    sinks: bool
    deterministic: bool

    @classmethod
    def of_layer(cls, call: paged.PagedAttention) -> Shape:
        (tokens, q_heads, head_dim), (_, page_size, kv_heads, v_head_dim) = (
            call.query.shape,
            call.v_pages.shape,
        )
        numbers = (q_heads, kv_heads, head_dim, v_head_dim, page_size, call.query.dtype)
        return cls._over_pages(call, tokens, numbers, call.softcap > 0, call.sinks is not None)

    @classmethod
    def of_plan(cls, call: plan.PlanPagedAttention) -> Shape:
        numbers = (
            call.q_heads,
            call.kv_heads,
            call.head_dim,
            call.v_head_dim,
            call.page_size,
            getattr(torch, call.dtype),
        )
        return cls._over_pages(call, call.num_tokens, numbers, call.softcap, call.sinks)

    @classmethod
    def _over_pages(
        cls,
        call: Any,
        tokens: int,
        numbers: tuple[int, int, int, int, int, torch.dtype],
        softcap: bool,
        sinks: bool,
    ) -> Shape:
        (requests, pages), decode, steady = (
            call.page_table.shape,
            call.max_seqlen_q <= 1,
            deterministic(call.policy),
        )
        return cls(
            tokens,
            requests,
            pages,
            *numbers,
            decode,
            call.causal and not decode,
            call.window_left,
            softcap,
            sinks,
            steady,
        )

    @property
    def group(self) -> int:
        """Query heads a key head serves."""
        return self.q_heads // self.kv_heads

    @property
    def rows(self) -> int:
        """Requests as FlashInfer sees them: the tokens when decoding, else the requests and one
        more that owns the padding."""
        return self.num_tokens if self.decode else self.requests + 1

    @property
    def total_rows(self) -> int:
        """The rows that FA2's planner is given. Deterministic: so many that its tile is the same
        for any batch."""
        return max(self.num_tokens, self.rows + 128) if self.deterministic else self.num_tokens

    @property
    def tile_q(self) -> int:
        """FlashInfer's FA2DetermineCtaTileQ for the plans made here (utils.cuh; on SM80 and
        later)."""
        rows = self.group * (
            1 if self.decode and not self.deterministic else max(self.total_rows - self.rows + 1, 1)
        )
        if rows > 64 and self.v_head_dim < 256:
            return 128
        return 64 if rows > 16 else 16


def path_of(s: Shape, arch: int, max_seqlen_q: int) -> int:
    """Which of FlashInfer's kernels: a function of numbers that do not change between steps.

    A decode takes tensor cores from four query heads a key head on (the bound SGLang uses), where
    they are filled; FA3 does not pack a group's heads, so a few queries are FA2's too.
    Deterministic calls take one path whatever their longest request.
    """
    dims = (s.head_dim, s.v_head_dim)
    fa3 = arch == 90 and (
        dims in ((64, 64), (128, 128), (256, 256)) or (dims == (192, 128) and s.max_pages == 0)
    )
    if not s.deterministic:
        if s.decode and s.group < 4 and s.head_dim == s.v_head_dim and not s.sinks:
            return DECODE
        if s.decode or max_seqlen_q * s.group <= 64:
            return FA2
    return FA3 if fa3 else FA2


@functools.cache
def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors of `device`; off CUDA, where only stand-ins run, a few."""
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 8
    )


def whole_keys(s: Shape, sms: int) -> bool:
    """FA2 shall not split the keys: the tiles fill the GPU as they are, or the order of summation
    must not depend on the batch."""
    tiles = (
        s.rows * -(-s.group // s.tile_q)
        if s.decode
        else -(-s.num_tokens * s.group // s.tile_q) + s.rows - 1
    )
    return s.deterministic or tiles >= 2 * sms // s.kv_heads


def scratch(s: Shape, path: int, sms: int) -> tuple[int, int]:
    """Upper bounds of the bytes that scheduler.cuh takes from (int workspace, float workspace),
    paddings included."""
    if path == DECODE:
        blocks = max(
            16 * sms // s.kv_heads, s.rows
        )  # at most 16 blocks of 128 threads a multiprocessor
        return 13 * blocks + 512, 16 * sms // s.kv_heads * s.q_heads * (s.v_head_dim + 1) * 4 + 512
    if path == FA3:
        works = -(-s.num_tokens // 128) + s.rows
        return 28 * max(works, min(works, 4096) * s.q_heads) + 4 * sms + 1024, 16
    tiles = max(
        2 * sms // s.kv_heads, -(-s.total_rows * s.group // 16) + s.rows * -(-s.group // 16)
    )
    partial = (
        0
        if whole_keys(s, sms)
        else -(-2 * sms // s.kv_heads * max(s.tile_q, 64) // s.group) + s.rows
    )
    return 13 * tiles + 4 * (s.rows + s.total_rows) + 1024, partial * s.q_heads * (
        s.v_head_dim + 1
    ) * 4 + 512


class Places(NamedTuple):
    """The pieces of a workspace, int32: three tables side by side, a gap, the page ids, and two
    that FlashInfer writes."""

    starts: Tensor
    page_starts: Tensor
    last: Tensor
    gap: Tensor
    indices: Tensor
    ints: Tensor
    floats: Tensor


def sizes_of(s: Shape, path: int, sms: int) -> tuple[int, ...]:
    """The int32 numbers of each piece, each piece of FlashInfer's aligned."""
    tables = 3 * s.rows + 2
    ends = (s.rows + 1, s.rows + 1, s.rows, padded(tables, I32) - tables)
    return (
        *ends,
        padded(s.requests * s.max_pages, I32),
        *(padded(-(-size // 4), I32) for size in scratch(s, path, sms)),
    )


# The modules --------------------------------------------------------------------------------------


class Module(NamedTuple):
    """The numbers that tell FlashInfer's modules apart, written
    path:dtype:head_dim[xv_head_dim][:window][:softcap][:sinks]."""

    path: int
    dtype: torch.dtype
    head_dim: int
    v_head_dim: int
    window: bool = False
    softcap: bool = False
    sinks: bool = False

    @classmethod
    def of(cls, s: Shape, path: int) -> Module:
        return cls(path, s.dtype, s.head_dim, s.v_head_dim, s.window_left >= 0, s.softcap, s.sinks)

    def __str__(self) -> str:
        dims = str(self.head_dim) + (
            f"x{self.v_head_dim}" if self.v_head_dim != self.head_dim else ""
        )
        flags = [f for f in self._fields[4:] if getattr(self, f)]
        return ":".join([NAMES[self.path], str(self.dtype).removeprefix("torch."), dims, *flags])


def module_of(p: Problem, queries: int) -> Module:
    """The module of a call whose longest request has so many queries, or of its plan."""
    paged = p.op != "varlen_attention"
    shape = Shape(
        1,
        1,
        int(paged),
        p.q_heads,
        p.kv_heads,
        p.head_dim,
        p.v_head_dim,
        p.page_size or 1,
        p.dtype,
        paged and queries <= 1,
        p.rules.causal,
        p.rules.window[0],
        p.rules.softcap,
        p.rules.sinks,
        p.step.deterministic,
    )
    return Module.of(shape, path_of(shape, p.target.arch, queries))


def libraries_of(p: Problem) -> tuple[Library, ...]:
    """Those that calls of this Problem load: more than one where its bounds leave the path open."""
    least, most = p.sizes.queries.lo, p.sizes.queries.hi
    # The least number of queries of each path that is not the first (`path_of`).
    begins = (2, 64 // max(p.group_size, 1) + 1)
    asked = [least, *(n for n in begins if least < n and (most is None or n <= most))]
    paged = p.op != "varlen_attention"
    return tuple(library_of(m, paged) for m in dict.fromkeys(module_of(p, n) for n in asked))


def library_of(m: Module, paged: bool = True) -> Library:
    """What is built of a module. paged: `load_paged` loads it."""
    name = _name_of(m)
    variants = [""]
    if m.path == FA2 and not m.sinks:
        variants = ["_kv_stride_equal"]
        if paged and m.head_dim != m.v_head_dim:
            variants.append("_paged_kv_stride_independent")
    names = tuple(name + variant for variant in variants)
    load = functools.partial(_load_paged if paged else _load, m)
    return Library(str(m), names, load)


def _name_of(m: Module) -> str:
    """FlashInfer's name of a module, without its variants."""
    kind = "decode" if m.path == DECODE else "prefill"
    dtype = SHORT[m.dtype]
    name = (
        f"batch_{kind}_with{'_attention_sink' if m.sinks else ''}_kv_cache_dtype_q_{dtype}"
        f"_dtype_kv_{dtype}_dtype_o_{dtype}_dtype_idx_i32_head_dim_qk_{m.head_dim}"
        f"_head_dim_vo_{m.v_head_dim}_{'' if m.sinks else 'posenc_0_'}use_swa_{m.window}_"
    )
    if not m.sinks:
        name += f"use_logits_cap_{m.softcap}"
        name += "_f16qk_False" if kind == "prefill" else ""
    return name + ("_sm90" if m.path == FA3 else "")


@functools.cache
def load(m: Module) -> Any:
    """FlashInfer's module: built by nvcc at first use, which it warns of, then loaded from its
    cache on disk."""
    _announce(m, False)
    return _load(m)


@functools.cache
def _announce(m: Module, paged: bool) -> None:
    announce(library_of(m, paged))


def _load(m: Module) -> Any:
    types = (m.dtype, m.dtype, m.dtype, I32, m.head_dim, m.v_head_dim, 0)
    if m.sinks:
        from flashinfer.jit.attention.modules import gen_batch_prefill_attention_sink_module

        return gen_batch_prefill_attention_sink_module(
            NAMES[m.path], *types, m.window
        ).build_and_load()
    if m.path == DECODE:
        from flashinfer.decode import get_batch_decode_module

        return get_batch_decode_module(*types, m.window, m.softcap)
    from flashinfer.prefill import get_batch_prefill_module

    return get_batch_prefill_module(NAMES[m.path], *types, m.window, m.softcap, False)


def load_paged(m: Module) -> Any:
    """`load`, and load the variant for unlike strides of keys and values now: its first call may be
    in a capture."""
    _announce(m, True)
    return _with_variant(m, load(m))


def _load_paged(m: Module) -> Any:
    return _with_variant(m, _load(m))


def _with_variant(m: Module, found: Any) -> Any:
    if m.path == FA2 and m.head_dim != m.v_head_dim and not m.sinks:
        found.prewarm_paged_kv_stride_variant()
    return found


class Layout(NamedTuple):
    """A call's shape and path, and the facts that follow from them.

    sizes: of `Places`. overlap: a kernel may begin while the one before it ends (programmatic
    dependent launch), as FlashInfer's wrappers launch them from SM90 on; the merge of split keys
    begins 1 to 2 us sooner.
    """

    shape: Shape
    path: int
    module: Module
    sms: int
    sizes: tuple[int, ...]
    overlap: bool


@functools.lru_cache(maxsize=1024)
def layout_of(device: torch.device, arch: int, max_seqlen_q: int, s: Shape) -> Layout:
    """The layout of a call. A pure function, asked by every layer."""
    path, sms = path_of(s, arch, max_seqlen_q), sm_count(device)
    return Layout(s, path, Module.of(s, path), sms, sizes_of(s, path, sms), arch >= 90)


def run(
    c: Layout,
    at: Places,
    ints: list[int],
    call: Any,
    tensors: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """A call's kernel on (query, key, value), pages or packed. lse: base 2, written in place."""
    s, found, pages = c.shape, load(c.module), (at.page_starts, at.indices, at.last)
    given: tuple[Any, ...]
    if c.path == DECODE:
        given = (
            *tensors,
            *pages,
            out,
            lse,
            NHD,
            s.window_left,
            c.overlap,
            None,
            call.softcap,
            call.scale,
            1.0,
            1e4,
        )
        found.run(at.floats, at.ints, ints, *given)
        return
    paged = s.max_pages > 0
    tables = (at.starts, *(pages if paged else pages[:1]))
    # FlashInfer's MaskMode: 0 is all keys, 1 causal.
    given = (
        at.floats,
        at.ints,
        ints,
        *tensors,
        *tables,
        out,
        lse,
        int(s.causal),
        NHD,
        s.window_left,
        c.overlap,
    )
    if call.sinks is not None:
        given += (call.sinks.detach().float().contiguous(), call.scale)
    elif paged:
        given += (
            *(None,) * 6,
            call.softcap,
            call.scale,
            None,
            None,
            None,
            1.0,
            1e4,
            0,
            at.floats.nbytes,
        )
    else:
        given += (*(None,) * 6, call.softcap, call.scale, 1.0, 1e4, 0)
    (found.paged_run if paged else found.ragged_run)(*given)
