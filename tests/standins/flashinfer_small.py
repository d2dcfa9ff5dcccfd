"""Stand-ins for FlashInfer 0.7.2's cascade functions: not the kernels.

Their signatures, the argument checks of csrc/cascade.cu, and plain bodies on the CPU. Kept from the real ones: log-sum-exps are in base 2;
an empty part that holds NaN spoils the merge.
"""

from __future__ import annotations

import torch
from torch import Tensor

CALLS: list[str] = []
"""The functions called, in order."""

HALVES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256, 512)


def check(ok: bool, text: str) -> None:
    if not ok:
        raise RuntimeError(text)


def contiguous(**given: Tensor) -> None:
    for name, x in given.items():
        check(x.is_contiguous(), f"Check failed: (x.IsContiguous()) is false: {name} must be contiguous")


def launch(head_dim: int, heads: int, itemsize: int, blocks: int) -> None:
    """DISPATCH_HEAD_DIM, and what CUDA says of a launch of blocks without threads or with too many."""
    check(head_dim in HEAD_DIMS, f"Unsupported head_dim: {head_dim}")
    threads = heads * (head_dim // max(16 // itemsize, head_dim // 32))
    check(0 < threads <= 1024 and blocks > 0, "kernel launch failed: invalid configuration argument")


def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    CALLS.append("merge_states")
    s = s.to(torch.float32)
    contiguous(v=v, s=s)
    check(v.dim() == 4 and s.dim() == 3 and v.shape[:3] == s.shape, "Check failed: v.size(i) == s.size(i)")
    check(v.dtype in HALVES, "MergeStates kernel launch failed: unsupported data type.")
    launch(v.shape[3], v.shape[2], v.dtype.itemsize, v.shape[0])
    most = s.amax(1, keepdim=True)
    # max(x, -inf) drops the NaN of two empty parts.
    weights = torch.exp2(torch.nan_to_num(s - most, nan=-float("inf")))
    total = weights.sum(1)
    scale = torch.where(total > 0, 1.0 / total, 0.0)
    merged = (v.float() * weights[..., None]).sum(1) * scale[..., None]
    return merged.to(v.dtype), torch.log2(total) + most[:, 0]


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    CALLS.append("merge_state")
    contiguous(v_a=v_a, s_a=s_a, v_b=v_b, s_b=s_b)
    check(v_a.shape == v_b.shape and s_a.shape == s_b.shape == v_a.shape[:2], "Check failed: shapes differ")
    out = merge_states(torch.stack([v_a, v_b], 1), torch.stack([s_a, s_b], 1))
    CALLS.pop()
    return torch.empty_like(v_a).copy_(out[0]), torch.empty_like(s_a).copy_(out[1])
