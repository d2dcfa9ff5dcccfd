"""What the kernels of TensorRT-LLM share, as FlashInfer ships them: where they are, and which tokens see no key."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from attnops.kernel import Package
from attnops.problem import Problem, Refusal, Target
from attnops.reference.packed import rows_of

PACKAGE = Package("flashinfer", ("flashinfer-python",), "0.7.2", "pip install flashinfer-python")

CUDA = "/usr/local/cuda/bin"

SMS = 256
"""More streaming multiprocessors than any GPU has: what is sized by their number is sized by this, which needs no device."""


def no_compiler(target: Target) -> Refusal | None:
    """The probe: FlashInfer builds its modules with nvcc and ninja at first use, unless a package of built ones is there."""
    if target.assume is not None or find_spec("flashinfer_jit_cache") is not None:
        return None
    absent = [name for name in ("nvcc", "ninja") if shutil.which(name) is None and not Path(CUDA, name).exists()]
    want = f"nvcc and ninja on PATH (or nvcc in {CUDA}), or flashinfer-jit-cache"
    return Refusal("package", f"flashinfer without {' and '.join(absent)}", want) if absent else None


def scales(p: Problem) -> Refusal | None:
    """Scales are numbers, one for all heads, of a quantised cache."""
    if p.per_head_scales:
        return Refusal("per_head_scales", True, "no")
    return Refusal("kv_scales", True, "no (but with a float8 cache)") if p.kv_scales and p.kv_dtype == p.dtype else None


def one_head_dim(p: Problem) -> Refusal | None:
    """The value's head dim is the key's."""
    return None if p.v_head_dim == p.head_dim else Refusal("v_head_dim", p.v_head_dim, f"{p.head_dim}, the key's")


def blind(cu_seqlens_q: Tensor, keys: Tensor, tokens: int, causal: bool) -> Tensor:
    """bool `[T]`: tokens of no request, or that see no key. keys: int `[B]`, each request's."""
    rows = rows_of(cu_seqlens_q, tokens)
    real, rows = rows < keys.shape[0], rows.clamp(max=keys.shape[0] - 1)
    seen = keys[rows]
    if causal:
        # The last query of a request stands at its last key.
        seen = seen - cu_seqlens_q[1:][rows] + torch.arange(tokens, device=keys.device) + 1
    return ~real | (keys[rows] <= 0) | (seen <= 0)
