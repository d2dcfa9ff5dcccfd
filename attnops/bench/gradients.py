"""Suite `gradients`: a causal training step of attention, forward and backward, beside torch's.

`flash2` is SDPA by FlashAttention-2, `torch` by the kernel that torch chooses. `attention`, `deterministic` (the same under that policy)
and `varlen_attention` are the public functions; `kernel` names their kernels. Wall-clock time; `host_us` of a step: until it is issued.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import attnops.ops
from attnops.bench import Setup
from attnops.bench.rows import Case, Row, Way, time_if_right, with_ratios
from attnops.inputs import Pool, build
from attnops.problem import altered
from attnops.select import active_policy, choose, use
from attnops.tune.clock import Timed, steps_us
from attnops.tune.shapes import DENSE, PACKED

SHAPES = ((2, 4096, 32, 8, 128), (1, 16384, 32, 8, 128), (8, 1024, 16, 16, 64))  # requests, tokens of each, heads, key heads, head dim
MOST_ERROR = 0.02
INPUTS = ("query", "key", "value")


def cases(setup: Setup) -> dict[str, Case]:
    """A step of every shape, of few tokens on a CPU."""
    chosen = SHAPES[-1:] if setup.size == "toy" else SHAPES
    return {f"{batch}x{tokens}": partial(measure, setup, batch, tokens if setup.on_gpu else 24, *heads) for batch, tokens, *heads in chosen}


def measure(setup: Setup, batch: int, tokens: int, q_heads: int, kv_heads: int, dim: int) -> list[Row]:
    """One shape."""
    case, lengths = f"{batch}x{tokens}, {q_heads}/{kv_heads} heads, d{dim}", [tokens] * batch
    heads: dict[str, Any] = {"dtype": "bfloat16", "q_heads": q_heads, "kv_heads": kv_heads, "head_dim": dim, "v_head_dim": dim}
    call = build(replace(DENSE, **heads), lengths, lengths, Pool(setup.device))
    flat = build(replace(PACKED, **heads), lengths, lengths, Pool(setup.device))  # the same numbers: those of one seed

    def step(op: Callable[..., Tensor], given: Mapping[str, Any], trained: Any = None, policy: Any = nullcontext) -> Way:
        def run() -> tuple[Tensor, ...]:
            with policy():
                return gradients(op, given)

        steps = (altered(trained, lse=True), altered(trained, op=f"{trained.op}_backward", grad=True)) if trained else ()
        with policy():
            more: Row = {"kernel": ", ".join(choose(p, active_policy()).name for p in steps)} if steps else {}
        return Way(Timed(run), lambda: [g.view(batch, tokens, *g.shape[-2:]) for g in run()], more=more)

    def host(us: float, way: Way) -> Row:
        return {"host_us": steps_us({"": way.timed}, 5, inner=1, wait=False)[""]["median_us"]}

    packed = {name: value for name, value in flat.arguments.items() if name != "padded"}
    ways = {
        "flash2": partial(step, partial(sdpa, backends=SDPBackend.FLASH_ATTENTION), call.arguments),
        "torch": partial(step, sdpa, call.arguments),
        "attention": partial(step, attnops.ops.attention, call.arguments, call.problem),
        "deterministic": partial(step, attnops.ops.attention, call.arguments, call.problem, partial(use, deterministic=True)),
        "varlen_attention": partial(step, attnops.ops.varlen_attention, packed, flat.problem),
    }
    exact = partial(sdpa, backends=[SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], repeats=q_heads // kv_heads)
    want = gradients(exact, call.map(lambda n, t: t.float()).arguments)
    return with_ratios(time_if_right(case, ways, want, MOST_ERROR, steps_us, relative, host), "flash2")


@torch.enable_grad()
def gradients(op: Callable[..., Tensor], given: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Gradients of query, key and value."""
    inputs = {name: given[name].detach().requires_grad_() for name in INPUTS}
    output = op(**{**given, **inputs})
    grad = torch.linspace(-1, 1, output.numel(), device=output.device).view(output.shape).to(output.dtype)
    return torch.autograd.grad(output, list(inputs.values()), grad)


def sdpa(query: Tensor, key: Tensor, value: Tensor, *, scale: float, causal: bool, backends: Any = (), repeats: int = 1) -> Tensor:
    """torch's attention of `[B, S, H, D]`, by the backends if given. repeats: of key heads, for backends without grouped heads."""
    key, value = (x.repeat_interleave(repeats, 2) for x in (key, value)) if repeats > 1 else (key, value)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    with sdpa_kernel(backends) if backends else nullcontext():
        return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)


def relative(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """The largest relative norm of a difference."""
    return max(float((a.float() - b).norm() / b.norm()) for a, b in zip(got, want, strict=True))
