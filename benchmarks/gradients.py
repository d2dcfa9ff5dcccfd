"""Attention forward + backward beside FlashAttention-2 and torch's default; writes gradients.json.

    python benchmarks/gradients.py [--device cuda] [--length 4096]

bfloat16, causal. `ms` is the median over CUDA events of one step, forward and backward. `flash2` is
`F.scaled_dot_product_attention` held to FlashAttention-2, `torch` its default. `share` is a time over that of `flash2`.
`host_ms` is the time the host takes to issue a step. The gradients of every way are compared with float32 gradients before it
is timed; `error` is the largest relative norm of a difference.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from timeit import timeit
from typing import Any

import torch
from common import arguments, environment, write
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attnops
from attnops.ops import OPS
from attnops.select import select

SHAPES = ((2, 4096, 32, 8, 128), (1, 16384, 32, 8, 128), (8, 1024, 16, 16, 64))
MOST_ERROR = 0.02
Step = Callable[[], tuple[Tensor, ...]]


def measured(batch: int, length: int, q_heads: int, kv_heads: int, dim: int, device: str) -> dict[str, Any]:
    """The row of one shape."""
    heads = (q_heads, kv_heads, kv_heads)
    q, k, v = (torch.randn(batch, length, h, dim, device=device, dtype=torch.bfloat16).requires_grad_() for h in heads)
    grad = torch.randn_like(q)
    cu = torch.arange(0, (batch + 1) * length, length, device=device, dtype=torch.int32)
    flat = [x.detach().flatten(0, 1).requires_grad_() for x in (q, k, v)]
    first = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)]
    grad_first = grad.transpose(1, 2).contiguous()

    def default() -> tuple[Tensor, ...]:
        return torch.autograd.grad(sdpa(*first, is_causal=True, enable_gqa=q_heads != kv_heads), first, grad_first)

    def flash2() -> tuple[Tensor, ...]:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return default()

    def dense() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attnops.attention(q, k, v, causal=True), (q, k, v), grad)

    def packed() -> tuple[Tensor, ...]:
        output = attnops.varlen_attention(*flat, cu, cu, max_seqlen_q=length, max_seqlen_k=length, causal=True)
        return torch.autograd.grad(output, flat, grad.flatten(0, 1))

    wide = [x.detach().float().repeat_interleave(q_heads // x.shape[1], 1).requires_grad_() for x in first]
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        exact = torch.autograd.grad(sdpa(*wide, is_causal=True), wide, grad_first.float())
    wanted = [x.unflatten(1, (h, -1)).sum(2) for x, h in zip(exact, heads, strict=True)]
    row: dict[str, Any] = {"chosen": chosen(q, k, v, cu)}
    for name, step in {"flash2": flash2, "torch": default, "attention": dense, "varlen_attention": packed}.items():
        found = [heads_first(x, batch, name) for x in step()]
        error = max(float((a.float() - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))
        if not error < MOST_ERROR:
            row[name] = {"failed": f"gradients are off by {error:.2e}, want at most {MOST_ERROR}"}
            continue
        ms, host_ms = clock(step) if device == "cuda" else (1e3 * timeit(step, number=1),) * 2
        base = row.get("flash2", {}).get("ms", ms)
        row[name] = {"ms": round(ms, 4), "share": round(ms / base, 3), "host_ms": round(host_ms, 4), "error": round(error, 5)}
    return row


def heads_first(grad: Tensor, batch: int, name: str) -> Tensor:
    """A gradient of way `name` as `[B, H, S, D]`."""
    if name in ("flash2", "torch"):
        return grad
    return (grad.unflatten(0, (batch, -1)) if grad.dim() == 3 else grad).transpose(1, 2)


def chosen(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> dict[str, str]:
    """The kernel of each op of a step."""
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    rules = {"scale": q.shape[-1] ** -0.5, "causal": True}
    sizes = {"max_seqlen_q": q.shape[1], "max_seqlen_k": q.shape[1]}
    dense, flat = (q, None, q, k, v, q, lse), [x.flatten(0, 1) for x in (q, k, v)]
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "attention": ((q, k, v), {"return_lse": True}),
        "attention_backward": (dense, {}),
        "varlen_attention": ((*flat, cu, cu), {"return_lse": True, **sizes}),
        "varlen_attention_backward": ((flat[0], None, *flat, flat[0], lse.flatten(0, 1), cu, cu), sizes),
    }
    found = {op: select(OPS[op].problem(OPS[op].call(*args, **rules, **more))).kernel for op, (args, more) in calls.items()}
    return {op: "none" if kernel is None else kernel.name for op, kernel in found.items()}


def clock(step: Step, seconds: float = 1.0) -> tuple[float, float]:
    """(median milliseconds between events, milliseconds of the host) of one step."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    step()
    torch.cuda.synchronize()
    count = max(8, min(100, int(seconds / (time.perf_counter() - begun))))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    issued = []
    for event in events[1:]:
        begun = time.perf_counter()
        step()
        issued.append(1e3 * (time.perf_counter() - begun))
        event.record()
    torch.cuda.synchronize()
    return median(a.elapsed_time(b) for a, b in pairwise(events)), median(issued)


def main(given: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__, ("cpu", "cuda"))
    parser.add_argument("--length", type=int, default=0, help="tokens of a sequence")
    asked = parser.parse_args(given)
    torch.manual_seed(0)
    shapes = [(b, asked.length or s, *heads) for b, s, *heads in SHAPES]
    rows = {f"{b}x{s}, {hq}/{hkv} heads, d{d}": measured(b, s, hq, hkv, d, asked.device) for b, s, hq, hkv, d in shapes}
    print(write(environment(asked.device) | {"rows": rows}, "gradients.json", asked.device))
    for shape, row in rows.items():
        print(shape, row)
    return int(any("failed" in way for row in rows.values() for way in row.values()))


if __name__ == "__main__":
    raise SystemExit(main())
