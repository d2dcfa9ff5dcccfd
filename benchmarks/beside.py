"""The suites `deterministic` and `gradients` of compare.py: rows as those of `attnops bench`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from common import Job
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attnops
from attnops.bench.rows import Row, Way, time_if_right, with_ratios
from attnops.inputs import equip_as_used
from attnops.ops import OPS
from attnops.problem import altered
from attnops.select import choose
from attnops.testing import Call, Features, Source, builders
from attnops.testing.latent import DEEPSEEK
from attnops.tune.clock import Timed, host_us, kernels_us, steps_us

LLAMA = Features(dtype=torch.bfloat16, head_dim=128, q_heads=32, kv_heads=8, causal=True)
WIDE = replace(DEEPSEEK, q_heads=128)
POLICIES = {"default": "", "deterministic": "deterministic"}
MOST_ERROR = 0.02
SHAPES = ((2, 4096, 32, 8, 128), (1, 16384, 32, 8, 128), (8, 1024, 16, 16, 64))
INPUTS = ("query", "key", "value")


def relative(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """The largest relative norm of a difference."""
    return max(float((a.float() - b).norm() / b.norm()) for a, b in zip(got, want, strict=True))


@torch.enable_grad()
def gradients(op: Callable[..., Any], call: Call, **more: Any) -> tuple[Tensor, ...]:
    """Gradients of query, key and value."""
    inputs = {n: call.arguments[n].detach().requires_grad_() for n in INPUTS}
    output = op(**call.arguments | inputs, **more)
    output = output[0] if isinstance(output, tuple) else output
    grad = torch.linspace(-1, 1, output.numel(), device=output.device).view(output.shape).to(output.dtype)
    return torch.autograd.grad(output, list(inputs.values()), grad)


def output_of(op: Callable[..., Any], call: Call, **more: Any) -> tuple[Tensor, ...]:
    """The output of an op that returns it or writes it."""
    returned = op(*call.args, **call.kwargs, **more)
    return (call.arguments["output"],) if returned is None else returned[:1]


def exact(call: Call, trained: bool) -> tuple[Tensor, ...]:
    """The output of the reference in float32, or its gradients."""
    op, wide = OPS[call.op], call.map(lambda n, t: t.float() if t.is_floating_point() else t)
    return (gradients if trained else output_of)(lambda *args, **kwargs: op.reference(op.call(*args, **kwargs)), wide)


def kernel_of(call: Call, policy: str, trained: bool) -> str:
    """The kernel of each op of a step."""
    steps = (altered(call.problem, lse=True), altered(call.problem, op=f"{call.op}_backward", grad=True))
    return ", ".join(choose(p, policy).name for p in (steps if trained else (call.problem,)))


# Policies -------------------------------------------------------------------------------------------------------------


def dense(source: Source, q_lens: Sequence[int], k_lens: Sequence[int], f: Features) -> Call:
    """Prompts of one length."""
    return builders.dense(source, len(q_lens), q_lens[0], k_lens[0], f)


def of(build: Callable[..., Call], *how: Any, batch: int = 1, queries: int = 0, **more: Any) -> Callable[[int, str], Call]:
    """Makes calls of `batch` prompts, or of `queries` queries a request, given the keys and the device."""
    return lambda keys, device: build(Source(1, device), (queries or keys,) * batch, (keys,) * batch, *how, **more)


PAGED, PACKED = partial(of, builders.paged, padding=None), partial(of, builders.varlen, LLAMA, padding=None)
CALLS = {
    **{f"decode {b}x{{}}, pages of {p}": PAGED(p, LLAMA, batch=b, queries=1) for b, p in ((8, 16), (8, 64), (32, 64), (1, 64))},
    **{f"prompt {{}}, pages of {page}": PAGED(page, LLAMA) for page in (16, 64)},
    "prompt {}, packed": PACKED(),
    "prompt {}, dense": of(dense, LLAMA),
    **{f"latent decode 8x{{}}, {f.q_heads} heads": of(builders.mla, 64, f, batch=8, queries=1, padding=0) for f in (WIDE, DEEPSEEK)},
    **{f"latent prompt {{}}, {f.q_heads} heads": of(builders.mla, 64, f, padding=0) for f in (DEEPSEEK, WIDE)},
    "training 2x{}, packed": PACKED(batch=2),
    "training 2x{}, dense": of(dense, LLAMA, batch=2),
}


def under_policies(name: str, keys: int, device: str) -> list[Row]:
    """The rows of one call."""
    call, trained = CALLS[name](keys, device), name.startswith("training")

    def way(policy: str) -> Way:
        with attnops.use(deterministic=bool(policy)):
            kernel = kernel_of(call, policy, trained)
            given = call if trained else equip_as_used(choose(call.problem, policy), call)
        run = partial(gradients if trained else output_of, OPS[call.op].packet.default, given, policy=policy)
        return Way(Timed(run), more={"kernel": kernel})

    ways, clock = {name: partial(way, policy) for name, policy in POLICIES.items()}, partial(kernels_us, torch.device(device))
    return with_ratios(time_if_right(name.format(keys), ways, exact(call, trained), MOST_ERROR, clock, relative), "default")


def deterministic(device: str) -> Iterator[Job]:
    """Every call under each policy."""
    keys = 4096 if device == "cuda" else 20
    for name in CALLS:
        yield "rows", name.format(keys), partial(under_policies, name, keys, device)


# Gradients ------------------------------------------------------------------------------------------------------------


def torchs(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, causal: bool, backends: Any = SDPBackend.FLASH_ATTENTION, repeats: int = 1
) -> Tensor:  # fmt: skip
    """torch's attention of `[B, S, H, D]`, by the backend if one is given. repeats: of key heads, for backends without grouped heads."""
    key, value = (x.repeat_interleave(repeats, 2) for x in (key, value)) if repeats > 1 else (key, value)
    first = (x.transpose(1, 2) for x in (query, key, value))
    with sdpa_kernel(backends) if backends else nullcontext():
        return sdpa(*first, is_causal=causal, scale=scale, enable_gqa=query.shape[2] != key.shape[2]).transpose(1, 2)


def varlen(padded: bool, **given: Any) -> Tensor:
    """The public function of packed prompts, called with padded=False."""
    return attnops.varlen_attention(**given)


def steps(batch: int, tokens: int, f: Features, device: str) -> list[Row]:
    """The rows of one shape."""
    lengths = (tokens,) * batch
    call = dense(Source(0, device), lengths, lengths, f)
    flat = builders.varlen(Source(0, device), lengths, lengths, f, padding=None)
    flat = flat.with_(**{n: call.arguments[n].flatten(0, 1) for n in INPUTS})

    def step(op: Callable[..., Any], call: Call = call, ours: bool = False) -> Way:
        run = partial(gradients, op, call)
        more: Row = {"kernel": kernel_of(call, "", trained=True)} if ours else {}
        return Way(Timed(run), lambda: [g.view(batch, tokens, *g.shape[-2:]) for g in run()], more=more)

    def host(us: float, way: Way) -> Row:
        return {"host_us": host_us({"": way.timed.call}, 5, 1, wait=False)[""]["median_us"]}

    ways = {
        "flash2": partial(step, torchs),
        "torch": partial(step, partial(torchs, backends=())),
        "attention": partial(step, attnops.attention, call, ours=True),
        "varlen_attention": partial(step, varlen, flat, ours=True),
    }
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        want = gradients(partial(torchs, backends=(), repeats=f.q_heads // f.kv_heads), call.map(lambda n, t: t.float()))
    case = f"{batch}x{tokens}, {f.q_heads}/{f.kv_heads} heads, d{f.head_dim}"
    return with_ratios(time_if_right(case, ways, want, MOST_ERROR, steps_us, relative, host), "flash2")


def training(device: str) -> Iterator[Job]:
    """A step of every shape."""
    for batch, tokens, q_heads, kv_heads, dim in SHAPES:
        f, length = replace(LLAMA, q_heads=q_heads, kv_heads=kv_heads, head_dim=dim), tokens if device == "cuda" else 24
        yield "rows", f"{batch}x{length}, d{dim}", partial(steps, batch, length, f, device)
