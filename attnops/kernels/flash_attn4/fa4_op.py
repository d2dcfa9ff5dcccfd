"""How FlashAttention-4 (flash-attn-4, CuTe DSL) is found, compiled and called: `flash_attn.cute.interface._flash_attn_fwd`.

Its kernels are compiled at the first call of each kind, which takes seconds and must not happen while a CUDA graph is captured.
Warming is an eager call of that kind, once a process; the warm-up that torch's CUDA-graph trees make before they record counts.
`FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1` keeps compiled kernels on disk (in `FLASH_ATTENTION_CUTE_DSL_CACHE_DIR`).
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
from attnops.reference.attention import Rules

DIST = "flash-attn-4"
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
    """The kinds of calls that have been compiled: the vendor's cache is of the process too, and cannot be asked without compiling."""
    return set()


def forward(call: Any, key: Tensor, value: Tensor, output: Tensor, lse: Tensor | None, batch: dict[str, Any]) -> None:
    """Write output and, if given, lse with the heads first.

    call: gives query, rules, sinks and scales. batch: the arguments of `_flash_attn_fwd` that say where requests are.
    Raises NotCompiled while a CUDA graph is captured, unless a call of this kind came before.
    """
    query, sinks, rules = call.query, call.sinks, Rules.of(call)
    if sinks is not None and sinks.dtype == torch.float64:
        sinks = sinks.float()
    requests = batch["cu_seqlens_q"].shape[0] - 1 if "cu_seqlens_q" in batch else query.shape[0]
    if call.q_scale is not None:
        scales = {"q_descale": call.q_scale, "k_descale": call.k_scale, "v_descale": call.v_scale}
        batch = batch | {n: None if s is None else s.expand(requests, key.shape[-2]).contiguous() for n, s in scales.items()}
    # It asks requires_grad of its inputs, whatever the grad mode.
    query, key, value = (x.detach() if x.requires_grad else x for x in (query, key, value))
    sinks = sinks.detach() if sinks is not None and sinks.requires_grad else sinks
    # At least as fine as the vendor's key: calls of one kind share a compiled kernel.
    group = query.shape[-2] // key.shape[-2]
    longest = batch.get("max_seqlen_q", query.shape[-3])
    kind = (
        query.device, query.dtype, tuple((x.shape[-1], tuple(s == 0 for s in x.stride())) for x in (query, key, value, output)), group,
        lse is None, None if sinks is None else sinks.dtype, rules.causal, rules.left < 0, rules.right < 0, rules.softcap,
        tuple(longest * rows <= limit for rows in (1, group) for limit in (64, 128, 192, 256)), requests > 256,
        tuple(n for n, v in batch.items() if v is not None), value.shape[1] if "page_table" in batch else 0,
    )  # fmt: skip
    if kind not in _kinds() and query.is_cuda and torch.cuda.is_current_stream_capturing():
        raise NotCompiled("fa4", f"{tuple(query.shape)} {query.dtype} query, {rules}")
    interface()(
        query, key, value, softmax_scale=rules.scale, causal=rules.causal, softcap=rules.softcap if rules.softcap > 0 else None,
        window_size_left=rules.left if rules.left >= 0 else None, window_size_right=rules.right if rules.right >= 0 else None,
        learnable_sink=sinks, num_splits=1, out=output, lse=lse, **batch,
    )  # fmt: skip
    _kinds().add(kind)
