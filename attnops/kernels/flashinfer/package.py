"""The FlashInfer package seen from outside, and the helpers that several of its kernels use.

Importing it makes a folder for what it compiles and asks every GPU for its capability, which initialises CUDA. So it is imported at the
first call of a kernel, when a CUDA tensor is at hand. It compiles each module at its first use, with nvcc: once, before any capture.
"""

from __future__ import annotations

import functools
import importlib
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnops.errors import InvalidInput
from attnops.kernel import Need, Package, demand, one_of, without
from attnops.kernels.shared import workspace
from attnops.problem import Refusal, Target
from attnops.reference.packed import rows_of

ARCHS = (75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121)
PACKAGE = Package("flashinfer", ("flashinfer-python",), "0.7.2")
CUDA = "/usr/local/cuda/bin"

SMS = 256
"""More streaming multiprocessors than any GPU has, so that buffers sized by their number need no device to ask."""


def missing(target: Target) -> Refusal | None:
    """The probe: tvm_ffi, which the package imports, may be absent."""
    if target.assume is not None or find_spec("tvm_ffi") is not None:
        return None
    return Refusal("package", "tvm_ffi missing", "pip install apache-tvm-ffi")


def no_compiler(target: Target) -> Refusal | None:
    """The probe: FlashInfer builds its modules with nvcc and ninja at first use, unless a package of built ones is there."""
    if target.assume is not None or find_spec("flashinfer_jit_cache") is not None:
        return None
    absent = [name for name in ("nvcc", "ninja") if shutil.which(name) is None and not Path(CUDA, name).exists()]
    want = f"nvcc and ninja on PATH (or nvcc in {CUDA}), or flashinfer-jit-cache"
    return Refusal("package", f"flashinfer without {' and '.join(absent)}", want) if absent else None


@functools.cache
def module(name: str) -> Any:
    """`flashinfer.<name>`. Raises OSError, which names the variable to set, where its folder cannot be made."""
    try:
        return importlib.import_module(f"flashinfer.{name}")
    except OSError as error:
        hint = "flashinfer writes below $FLASHINFER_WORKSPACE_BASE, or the home folder, and cannot"
        raise OSError(f"{hint}: {error}") from error


# Results --------------------------------------------------------------------------------------------------------------


def gapless(x: Tensor) -> Tensor:
    """`x`, or a contiguous tensor to write in its place."""
    return x if x.is_contiguous() else torch.empty_like(x, memory_format=torch.contiguous_format)


def blind(cu_seqlens_q: Tensor, keys: Tensor, tokens: int, causal: bool) -> Tensor:
    """bool `[T]`: tokens of no request, or that see no key. keys: int `[B]`, each request's."""
    rows = rows_of(cu_seqlens_q, tokens)
    real, rows = rows < keys.shape[0], rows.clamp(max=keys.shape[0] - 1)
    seen = keys[rows]
    if causal:
        # The last query of a request is at its last key.
        seen = seen - cu_seqlens_q[1:][rows] + torch.arange(tokens, device=keys.device) + 1
    return ~real | (keys[rows] <= 0) | (seen <= 0)


# TensorRT-LLM's kernels -----------------------------------------------------------------------------------------------


def split(given: Tensor | None, scratch: int, field: str, rows: int, heads: int, of: str) -> tuple[Tensor, Tensor]:
    """(counters, scratch) of the workspace. Raises InvalidInput when it is too small, or has no counter for each row and head."""
    counters, rest = workspace.split(given, scratch)
    if rows * heads * 4 > counters.numel():
        raise InvalidInput(field, rows, f"<= {counters.numel() // 4 // heads} {of} of {heads} heads")
    return counters, rest


def split_bytes(dim: int) -> int:
    """Bytes for partial outputs and sums: FlashInfer splits the keys among at most as many blocks as there are multiprocessors, each of
    at most 256 rows (fmhaKernels.cuh, kernelParams.h). It does not check that they fit."""
    return SMS * 256 * (2 * dim + 8)


def stats_bytes(batch: int, heads: int, queries: int) -> int:
    """Bytes for the maxima and sums that lse is made of, and the guard after them (trtllm_fmha_kernel_launcher.cu)."""
    return 8 * heads * batch * (-(-queries // 256) * 256) + (1 << 20)


PAGED: tuple[Need, ...] = (
    *without("per_head_scales"),  # scales are numbers, one for all heads
    demand("kv_scales", "no (but with a float8 cache)", lambda p: not p.kv_scales or p.kv_dtype != p.dtype),
    demand("v_head_dim", "{p.head_dim}, the key's", lambda p: p.v_head_dim == p.head_dim),
    workspace.not_of_a_plan,
    one_of("head_dim", 64, 128, 256),
    one_of("page_size", 16, 32, 64, 128),
    one_of("last_dim_contiguous", True),
    one_of("pages_alike", True),
)
"""The needs of XQA and of trtllm-gen on pages."""
HALVES = (torch.float16, torch.bfloat16)
"""The dtypes of queries."""
CACHED = (*HALVES, torch.float8_e4m3fn)
"""The dtypes of pages."""
