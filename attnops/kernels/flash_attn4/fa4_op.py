"""How FlashAttention-4 (flash-attn-4, CuTe DSL) is found, compiled and called: `flash_attn.cute.interface._flash_attn_fwd`.

Its kernels are compiled at the first call of each kind, which takes seconds and must not happen while a CUDA graph is captured.
Warming is an eager call of that kind, once a process; the warm-up that torch's CUDA-graph trees make before they record counts.
`FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1` keeps what is compiled on disk (in `FLASH_ATTENTION_CUTE_DSL_CACHE_DIR`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnops.errors import NotCompiled
from attnops.kernel import Package
from attnops.problem import Problem, Refusal

DIST = "flash-attn-4"
FLOAT8 = torch.float8_e4m3fn
HALF = (torch.float16, torch.bfloat16)
OLDEST = "4.0.0b36"
PACKAGES = (
    Package("flash_attn.cute", (DIST,), OLDEST, f"pip install {DIST}"),
    Package("cutlass", ("nvidia-cutlass-dsl",)),
    Package("quack", ("quack-kernels",)),
    Package("tvm_ffi", ("apache-tvm-ffi",)),
)
USED = (
    "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "max_seqlen_q", "max_seqlen_k", "page_table", "softmax_scale", "causal", "softcap",
    "window_size_left", "window_size_right", "learnable_sink", "num_splits", "out", "lse", "q_descale", "k_descale", "v_descale",
)  # fmt: skip


@functools.cache
def interface() -> Callable[..., Any]:
    """`_flash_attn_fwd`. Raises ImportError, or RuntimeError for a version that takes other arguments."""
    from flash_attn.cute.interface import _flash_attn_fwd  # type: ignore[import-not-found, unused-ignore]

    taken = inspect.signature(_flash_attn_fwd).parameters
    if absent := [n for n in USED if n not in taken]:
        raise RuntimeError(f"flash_attn.cute: got a version without {', '.join(absent)}, want {OLDEST}, which was read")
    fwd: Callable[..., Any] = _flash_attn_fwd
    return fwd


@functools.cache
def _kinds() -> set[tuple[Any, ...]]:
    """What has been compiled: the vendor's cache is of the process too, and cannot be asked without compiling."""
    return set()


def call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    rules: tuple[bool, int, int, float],
    scales: tuple[Tensor | None, Tensor | None, Tensor | None] | None = None,
    **more: Any,
) -> None:
    """Write output and, if given, lse with the heads first. rules: causal, left, right, softcap. scales: of query, key and value.

    Raises NotCompiled while a CUDA graph is captured, unless a call of this kind came before.
    """
    causal, left, right, softcap = rules
    if sinks is not None and sinks.dtype == torch.float64:
        sinks = sinks.float()
    if scales is not None:
        batch = more["cu_seqlens_q"].shape[0] - 1 if "cu_seqlens_q" in more else query.shape[0]
        names = ("q_descale", "k_descale", "v_descale")
        more |= {n: None if s is None else s.expand(batch, key.shape[-2]).contiguous() for n, s in zip(names, scales, strict=True)}
    # It asks requires_grad of its inputs, whatever the grad mode.
    query, key, value = (x.detach() if x.requires_grad else x for x in (query, key, value))
    sinks = sinks.detach() if sinks is not None and sinks.requires_grad else sinks
    kind = _kind(query, key, value, output, lse, sinks, (causal, left < 0, right < 0, softcap), more)
    if kind not in _kinds() and query.is_cuda and torch.cuda.is_current_stream_capturing():
        raise NotCompiled("fa4", f"{tuple(query.shape)} {query.dtype} query, rules {rules}")
    interface()(
        query, key, value, softmax_scale=scale, causal=causal, softcap=softcap if softcap > 0 else None,
        window_size_left=left if left >= 0 else None, window_size_right=right if right >= 0 else None,
        learnable_sink=sinks, num_splits=1, out=output, lse=lse, **more,
    )  # fmt: skip
    _kinds().add(kind)


def _kind(
    query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor | None, sinks: Tensor | None, rules: Any, more: dict[str, Any]
) -> tuple[Any, ...]:
    """At least as fine as the vendor's key: calls of one kind share what is compiled."""
    group = query.shape[-2] // key.shape[-2]
    longest = more.get("max_seqlen_q", query.shape[-3])
    tiles = tuple(longest * rows <= limit for rows in (1, group) for limit in (64, 128, 192, 256))
    layout = tuple((x.shape[-1], tuple(s == 0 for s in x.stride())) for x in (query, key, value, output))
    batch = more["cu_seqlens_q"].shape[0] - 1 if "cu_seqlens_q" in more else query.shape[0]
    return (
        query.device, query.dtype, layout, group, lse is None, None if sinks is None else sinks.dtype, *rules, tiles, batch > 256,
        tuple(n for n, v in more.items() if v is not None), value.shape[1] if "page_table" in more else 0,
    )  # fmt: skip


def tile(p: Problem) -> int:
    """Keys a tile of SM90's and SM100's forward kernels (`_tile_size_fwd_sm90`, FwdConfig)."""
    d, narrow = p.head_dim, p.windowed
    if p.target.arch != 90 or d <= 64 or 96 < d <= 128:
        return 128
    if d <= 96:
        return 128 if p.causal or narrow else 144
    if d <= 192:
        return 96 if narrow else 128 if p.v_head_dim <= 128 else 112
    return 64 if narrow else 80


def whole_pages(p: Problem) -> Refusal | None:
    """A page that is a tile is loaded by TMA, with whatever lies past a request's end, and a weight of 0 does not silence NaN."""
    return Refusal("page_size", p.page_size, f"not {tile(p)}, a tile") if p.page_size == tile(p) else None


def head_dims(p: Problem) -> Refusal | None:
    """What `_validate_head_dims` lets through and is no wider in the value than in the query, for which tiles are chosen."""
    d, dv = p.head_dim, p.v_head_dim
    unit = 16 // p.dtype.itemsize
    for field, size in (("head_dim", d), ("v_head_dim", dv)):
        if size % unit or size < 8:
            return Refusal(field, size, f"a multiple of {unit}")
    if dv > d:
        return Refusal("v_head_dim", dv, f"<= {d}, the query's")
    if p.target.arch == 90:
        return Refusal("head_dim", d, "<= 256") if d > 256 else None
    return None if d <= 128 or (d, dv) in ((192, 128), (256, 256)) else Refusal("head_dim", d, "<= 128, or 192 with 128, or 256")


def dtype_rules(p: Problem) -> Refusal | None:
    """Half types; on SM100 also float8_e4m3fn all through, with scales."""
    if p.dtype == FLOAT8 and p.target.arch in (100, 103):
        return None if p.kv_dtype == FLOAT8 else Refusal("kv_dtype", p.kv_dtype, "the query's float8_e4m3fn")
    if p.dtype not in HALF:
        return Refusal("dtype", p.dtype, "float16 | bfloat16" + (" (float8_e4m3fn on sm100)" if p.dtype == FLOAT8 else ""))
    if p.kv_dtype != p.dtype:
        return Refusal("kv_dtype", p.kv_dtype, f"the query's {str(p.dtype).removeprefix('torch.')}")
    return Refusal("kv_scales", True, "no") if p.kv_scales else None
