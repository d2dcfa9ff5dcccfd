"""FlashInfer seen from outside: which of its kernels a call takes, how much scratch it wants, and its JIT modules.

Its wrapper classes hold buffers and the last plan; the modules under them hold nothing, so those are used. Plans are made in FlashInfer's
CUDA-graph mode: for the same sizes every plan has the same ints, hence the same launch, and only what lies in the workspace changes.

Importing flashinfer asks every GPU for its capability, which initialises CUDA, and makes folders under the user's cache. Both are left
to it: it is imported when a kernel or a plan runs on CUDA tensors, when CUDA is up already, and no variable is set in its behalf.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnops.errors import InvalidInput
from attnops.kernel import Package
from attnops.kernels.shared.plan import Cutter, dtype_code

PACKAGE = Package("flashinfer", ("flashinfer-python",), "0.7.2", "pip install flashinfer-python")

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
    """What a plan is made for: all a call's numbers but its lengths. `decode`: no request has more than one query.

    Packed calls have no pages: their page_size is 1 and max_pages 0.
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
    dims = (s.head_dim, s.v_head_dim)
    fa3 = arch == 90 and (dims in ((64, 64), (128, 128), (256, 256)) or (dims == (192, 128) and s.max_pages == 0))
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


class Places(NamedTuple):
    """What lies where in a workspace, int32 pieces: three tables side by side, the page ids, and what FlashInfer writes."""

    starts: Tensor
    page_starts: Tensor
    last: Tensor
    indices: Tensor
    ints: Tensor
    floats: Tensor


@dataclass(frozen=True)
class Call:
    """A call's shape and path, and what follows from them: `fields` of the header, `sizes` of the workspace's pieces in int32.

    tables: numbers in the three tables. used: bytes of the workspace. overlap: a kernel may begin while the one before it ends
    (programmatic dependent launch), as FlashInfer's wrappers launch them from SM90 on; the merge of split keys begins 1 to 2 us sooner.
    """

    shape: Shape
    path: int
    fields: tuple[int, ...]
    sizes: tuple[int, ...]
    tables: int
    used: int
    overlap: bool

    def places(self, workspace: Tensor) -> Places:
        """Cut `workspace`, uint8 `[n]`. Calls of the same sizes find the same addresses. Raises InvalidInput when it is too short."""
        if workspace.numel() < self.used:
            raise InvalidInput("workspace", f"{workspace.numel()} bytes", f">= {self.used}: the sizes that its plan_sizes give")
        # One split: views one by one would cost more than the rest of a call.
        starts, page_starts, last, _, indices, _, ints, _, floats = workspace[: self.used].view(I32).split_with_sizes(self.sizes)
        return Places(starts, page_starts, last, indices, ints, floats)


def cut(s: Shape, path: int, sms: int) -> Cutter:
    """The workspace of a call, counted: tables, page ids, int and float workspace."""
    ints, floats = scratch(s, path, sms)
    counted = Cutter("workspace")
    for size in (3 * s.rows + 2, s.requests * s.max_pages, -(-ints // 4), -(-floats // 4)):
        counted.cut(size, I32)
    return counted


@functools.lru_cache(maxsize=1024)
def call_of(arch: int, sms: int, max_seqlen_q: int, *numbers: Any) -> Call:
    """The Call of these numbers, `numbers` being those of Shape in order. A pure function, asked by every layer."""
    s = Shape(*numbers)
    path = path_of(s, arch, max_seqlen_q)
    counted = cut(s, path, sms)
    indices, ints, floats = (start // 4 for start in counted.starts[1:])
    used, pages = -(-counted.used // 4), s.requests * s.max_pages
    ends = (s.rows + 1, s.rows + 1, s.rows, indices - 3 * s.rows - 2, pages, ints - indices - pages)
    size = -(-scratch(s, path, sms)[0] // 4)
    sizes = (*ends, size, floats - ints - size, used - floats)
    return Call(s, path, tuple(s.fields), sizes, 3 * s.rows + 2, 4 * used, arch >= 90)


# The modules ----------------------------------------------------------------------------------------------------------


def module(s: Shape, path: int) -> Any:
    """FlashInfer's module for the call: built by nvcc at first use, then loaded from its cache on disk."""
    return load_module(path, s.dtype, s.kv_dtype, s.head_dim, s.v_head_dim, s.window_left >= 0, s.softcap, s.sinks)


@functools.cache
def load_module(path: int, dtype: torch.dtype, kv_dtype: torch.dtype, d: int, dv: int, windowed: bool, softcap: bool, sinks: bool) -> Any:
    """As `module`, of what tells modules apart."""
    types = (dtype, kv_dtype, dtype, I32, d, dv, 0)
    if sinks:
        from flashinfer.jit.attention.modules import gen_batch_prefill_attention_sink_module

        return gen_batch_prefill_attention_sink_module(NAMES[path], *types, windowed).build_and_load()
    if path == DECODE:
        from flashinfer.decode import get_batch_decode_module

        return get_batch_decode_module(*types, windowed, softcap)
    from flashinfer.prefill import get_batch_prefill_module

    return get_batch_prefill_module(NAMES[path], *types, windowed, softcap, False)


def load_unlike(s: Shape, path: int) -> None:
    """Load what a paged run with unlike strides of keys and values loads at its first call, which must not fall into a capture."""
    if path == FA2 and s.head_dim != s.v_head_dim and not s.sinks:
        module(s, path).prewarm_paged_kv_stride_variant()


def run_decode(
    c: Call, at: Places, ints: list[int], tensors: tuple[Tensor, Tensor, Tensor], out: Tensor, lse: Tensor | None, scale: float,
    softcap: float,
) -> None:  # fmt: skip
    """The CUDA-core kernel on (query, key pages, value pages). lse: base 2, written in place."""
    s, tables = c.shape, (at.page_starts, at.indices, at.last, out, lse)
    module(s, DECODE).run(at.floats, at.ints, ints, *tensors, *tables, NHD, s.window_left, c.overlap, None, softcap, scale, 1.0, 1e4)


def run_prefill(
    c: Call, at: Places, ints: list[int], tensors: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None, out: Tensor,
    lse: Tensor | None, scale: float, softcap: float,
) -> None:  # fmt: skip
    """FA2 or FA3 on (query, key, value), pages or packed. lse: base 2, written in place."""
    s, pages = c.shape, c.shape.max_pages > 0
    tables = (at.page_starts, at.indices, at.last) if pages else (at.page_starts,)
    found = module(s, c.path)
    call = found.paged_run if pages else found.ragged_run
    given = (at.floats, at.ints, ints, *tensors, at.starts, *tables, out, lse, s.mask_mode, NHD, s.window_left, c.overlap)
    if sinks is not None:
        call(*given, sinks.detach().float().contiguous(), scale)
        return
    nothing = (None,) * 6
    scales = (None, None, None) if pages else ()
    call(*given, *nothing, softcap, scale, *scales, 1.0, 1e4, 0, *((at.floats.nbytes,) if pages else ()))
