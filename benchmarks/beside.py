"""Ops under `deterministic=True` beside the default policy, and gradients beside torch's; rows as those of `attnops bench`.

    python benchmarks/beside.py deterministic [--device cuda] [--length 4096] [--only latent]
    python benchmarks/beside.py gradients [--device cuda] [--length 4096]

deterministic.json: GPU time of the op under each policy, replays of CUDA graphs in turn, the L2 cache cleared before each; rows of
`training` are forward and backward. `of_default` is the default policy's time over the row's, `kernel` the kernel of each op.
gradients.json: wall-clock time of a step, forward and backward, bfloat16 and causal; `host_us`: until the step is issued. `flash2` is
`F.scaled_dot_product_attention` held to FlashAttention-2, `torch` its default.
Every result is compared with float32 before it is timed; `error` is the largest relative norm of a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from common import arguments, environment, write
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attnops
from attnops.bench.rows import Make, Row, Way, time_if_right, with_ratios
from attnops.inputs import equip_as_used
from attnops.ops import OPS
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


def exact(call: Call, trained: bool) -> tuple[Tensor, ...]:
    """The output of the reference in float32, or its gradients."""
    op, wide = OPS[call.op], call.map(lambda n, t: t.float() if t.is_floating_point() else t)

    def reference(*args: Any, **kwargs: Any) -> Any:
        return op.reference(op.call(*args, **kwargs))

    return gradients(reference, wide) if trained else output_of(reference, wide)


def output_of(op: Callable[..., Any], call: Call, **more: Any) -> tuple[Tensor, ...]:
    """The output of an op that returns it or writes it."""
    returned = op(*call.args, **call.kwargs, **more)
    return (call.arguments["output"],) if returned is None else returned[:1]


def kernel_of(call: Call, policy: str, trained: bool) -> str:
    """The kernel of each op of a step."""
    steps = (replace(call.problem, lse=True), replace(call.problem, op=f"{call.op}_backward", grad=True))
    return ", ".join(choose(p, policy).name for p in (steps if trained else (call.problem,)))


def rows_of(case: str, ways: Any, want: Any, clock: Any, peer: str, more: Any = lambda us, way: {}) -> list[Row]:
    """The rows of ways whose results are sequences of tensors, with their speed over that of `peer`."""
    rows = with_ratios(time_if_right(case, ways, want, MOST_ERROR, clock, relative, more), peer)  # type: ignore[arg-type]
    for row in rows:
        print(row, flush=True)
    return rows


# Policies -------------------------------------------------------------------------------------------------------------


def paged(page: int, batch: int, keys: int, device: str, queries: int = 0) -> Call:
    """Prompts over pages, or `queries` queries a request of `keys` keys."""
    return builders.paged(Source(1, device), (queries or keys,) * batch, (keys,) * batch, page, LLAMA, padding=None)


def packed(batch: int, keys: int, device: str) -> Call:
    """Prompts one after the other."""
    return builders.varlen(Source(1, device), (keys,) * batch, (keys,) * batch, LLAMA, padding=None)


def dense(batch: int, keys: int, device: str) -> Call:
    """Prompts of one length."""
    return builders.dense(Source(1, device), batch, keys, keys, LLAMA)


def latents(features: Any, batch: int, keys: int, device: str, queries: int = 0) -> Call:
    """Latent attention: a prompt, or `queries` queries a request."""
    return builders.mla(Source(1, device), (queries or keys,) * batch, (keys,) * batch, 64, features, padding=0)


CALLS: dict[str, Callable[..., Call]] = {
    **{f"decode {b}x{{}}, pages of {page}": partial(paged, page, b, queries=1) for b, page in ((8, 16), (8, 64), (32, 64), (1, 64))},
    **{f"prompt {{}}, pages of {page}": partial(paged, page, 1) for page in (16, 64)},
    "prompt {}, packed": partial(packed, 1),
    "prompt {}, dense": partial(dense, 1),
    **{f"latent decode 8x{{}}, {f.q_heads} heads": partial(latents, f, 8, queries=1) for f in (WIDE, DEEPSEEK)},
    **{f"latent prompt {{}}, {f.q_heads} heads": partial(latents, f, 1) for f in (DEEPSEEK, WIDE)},
    "training 2x{}, packed": partial(packed, 2),
    "training 2x{}, dense": partial(dense, 2),
}


def policies(length: int, device: str, only: str) -> Iterator[list[Row]]:
    """The rows of every call whose name holds `only`."""
    for name, build in CALLS.items():
        if only not in name:
            continue
        call, trained = build(keys=length or 4096, device=device), name.startswith("training")

        def way(policy: str, call: Call = call, trained: bool = trained) -> Way:
            with attnops.use(deterministic=bool(policy)):
                kernel = kernel_of(call, policy, trained)
                given = call if trained else equip_as_used(choose(call.problem, policy), call)
            run = partial(gradients if trained else output_of, OPS[call.op].packet.default, given, policy=policy)
            return Way(Timed(run), more={"kernel": kernel})

        ways: dict[str, Make] = {name: partial(way, policy) for name, policy in POLICIES.items()}

        yield rows_of(name.format(length or 4096), ways, exact(call, trained), partial(kernels_us, torch.device(device)), "default")


# Gradients ------------------------------------------------------------------------------------------------------------


def torchs(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, causal: bool, backends: Any = SDPBackend.FLASH_ATTENTION, repeats: int = 1
) -> Tensor:  # fmt: skip
    """torch's attention of `[B, S, H, D]`, by the backend if one is given. repeats: of key heads, for backends without grouped heads."""
    key, value = (x.repeat_interleave(repeats, 2) for x in (key, value)) if repeats > 1 else (key, value)
    first = (x.transpose(1, 2) for x in (query, key, value))
    with sdpa_kernel(backends) if backends else nullcontext():
        return sdpa(*first, is_causal=causal, scale=scale, enable_gqa=query.shape[2] != key.shape[2]).transpose(1, 2)


def varlen(**given: Any) -> Tensor:
    """The public function of packed prompts."""
    return attnops.varlen_attention(**{n: v for n, v in given.items() if n != "padded"})


def step_rows(batch: int, tokens: int, q_heads: int, kv_heads: int, dim: int, device: str) -> list[Row]:
    """The rows of one shape."""
    f = replace(LLAMA, q_heads=q_heads, kv_heads=kv_heads, head_dim=dim)
    call = builders.dense(Source(0, device), batch, tokens, tokens, f)
    flat = builders.varlen(Source(0, device), (tokens,) * batch, (tokens,) * batch, f, padding=None)
    flat = flat.with_(**{n: call.arguments[n].flatten(0, 1) for n in INPUTS})
    # Builders give options at their neutral values, too, of which torch's function has no such names.
    neutral = dict.fromkeys(("window_left", "window_right", "softcap", "attention_chunk", "return_lse"))
    call, flat = call.with_(**neutral), flat.with_(**neutral)

    def step(op: Callable[..., Any], call: Call = call, ours: bool = False) -> Way:
        timed = Timed(partial(gradients, op, call))
        whole: Any = lambda: [g.view(batch, tokens, *g.shape[-2:]) for g in timed.call()]  # noqa: E731
        return Way(timed, whole, more={"kernel": kernel_of(call, "", trained=True)} if ours else {})

    def host(us: float, way: Way) -> dict[str, float]:
        return {"host_us": host_us({"": way.timed.call}, 5, 1, wait=False)[""]["median_us"]}

    ways: dict[str, Make] = {
        "flash2": lambda: step(torchs),
        "torch": lambda: step(partial(torchs, backends=())),
        "attention": lambda: step(attnops.attention, call, ours=True),
        "varlen_attention": lambda: step(varlen, flat, ours=True),
    }
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        want = gradients(partial(torchs, backends=(), repeats=q_heads // kv_heads), call.map(lambda n, t: t.float()))
    return rows_of(f"{batch}x{tokens}, {q_heads}/{kv_heads} heads, d{dim}", ways, want, steps_us, "flash2", host)


def training(length: int, device: str, only: str) -> Iterator[list[Row]]:
    """The rows of every shape."""
    for batch, tokens, *heads in SHAPES:
        yield step_rows(batch, length or tokens, *heads, device)


SUITES = {"deterministic": policies, "gradients": training}


def main(given: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__, ("cpu", "cuda"))
    parser.add_argument("suite", choices=list(SUITES))
    parser.add_argument("--length", type=int, default=0, help="tokens of a sequence")
    parser.add_argument("--only", default="", help="calls whose name holds this")
    asked = parser.parse_args(given)
    with torch.no_grad():
        rows = [row for some in SUITES[asked.suite](asked.length, asked.device, asked.only) for row in some]
    report = {**environment(asked.device), "suite": asked.suite, "rows": rows}
    print(write(report, f"{asked.suite}.json", asked.device))
    return int(any("wrong" in row for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
