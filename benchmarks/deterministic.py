"""`deterministic=True` beside the default policy; writes deterministic.json.

    python benchmarks/deterministic.py [--device cuda] [--keys 4096] [--only latent]

GPU time of the op under each policy: replays of CUDA graphs in turn, the L2 cache flushed before each, medians. Each result is
compared with the reference in float32 before it is timed. `ratio` is the deterministic time over the default's. Rows of `training`
are forward and backward.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from timeit import timeit
from typing import Any

import torch
from common import arguments, environment, write

import attnops
from attnops.inputs import equip_as_used
from attnops.ops import OPS
from attnops.select import choose
from attnops.testing import Call, Features, Source, builders, latent
from attnops.testing.latent import DEEPSEEK
from attnops.tune.clock import GraphClock

LLAMA = Features(dtype=torch.bfloat16, head_dim=128, q_heads=32, kv_heads=8, causal=True)
WIDE = replace(DEEPSEEK, q_heads=128)
POLICIES = {"default": "", "deterministic": "deterministic"}
MOST_ERROR = 0.02
Row = dict[str, Any]
Results = tuple[torch.Tensor, ...]
Runs = dict[str, Callable[[], Results]]


def decode(batch: int, page: int, keys: int, device: str) -> Call:
    """One query a request of `keys` keys."""
    return builders.paged(Source(1, device), (1,) * batch, (keys,) * batch, page, LLAMA, padding=0, promise=True)


def prompt(page: int, keys: int, device: str) -> Call:
    """A prompt over pages."""
    return builders.paged(Source(1, device), (keys,), (keys,), page, LLAMA, padding=0, promise=True)


def packed(batch: int, keys: int, device: str) -> Call:
    """Prompts one after the other."""
    return builders.varlen(Source(1, device), (keys,) * batch, (keys,) * batch, LLAMA, padding=(0, 0), promise=True)


def dense(batch: int, keys: int, device: str) -> Call:
    """Prompts of one length."""
    return builders.dense(Source(1, device), batch, keys, keys, LLAMA)


def latents(features: Any, batch: int, keys: int, device: str, queries: int = 0) -> Call:
    """Latent attention: a prompt, or `queries` queries a request."""
    return latent.mla(Source(1, device), (queries or keys,) * batch, (keys,) * batch, 64, features, padding=0)


CALLS: dict[str, Callable[..., Call]] = {
    "decode 8x{}, pages of 16": partial(decode, 8, 16),
    "decode 8x{}, pages of 64": partial(decode, 8, 64),
    "decode 32x{}, pages of 64": partial(decode, 32, 64),
    "decode 1x{}, pages of 64": partial(decode, 1, 64),
    "prompt {}, pages of 16": partial(prompt, 16),
    "prompt {}, pages of 64": partial(prompt, 64),
    "prompt {}, packed": partial(packed, 1),
    "prompt {}, dense": partial(dense, 1),
    "latent decode 8x{}, 128 heads": partial(latents, WIDE, 8, queries=1),
    "latent decode 8x{}, 16 heads": partial(latents, DEEPSEEK, 8, queries=1),
    "latent prompt {}, 16 heads": partial(latents, DEEPSEEK, 1),
    "latent prompt {}, 128 heads": partial(latents, WIDE, 1),
    "training 2x{}, packed": partial(packed, 2),
    "training 2x{}, dense": partial(dense, 2),
}


def served(call: Call) -> tuple[Runs, Row]:
    """What runs the op under each policy and returns its output, and the start of a row."""
    runs: Runs = {}
    row: Row = {}
    for name, policy in POLICIES.items():
        with attnops.use(deterministic=bool(policy)):
            kernel = choose(call.problem, policy)
            given = equip_as_used(kernel, call)
        runs[name], row[name] = partial(output_of, getattr(torch.ops.attnops, call.op).default, given, policy), {"kernel": kernel.name}
    return runs, row


def output_of(op: Callable[..., Any], given: Call, policy: str) -> Results:
    """The output, of an op that returns it or writes it."""
    returned = op(*given.args, **given.kwargs, policy=policy)
    return (given.arguments["output"],) if returned is None else returned[:1]


def trained(call: Call) -> tuple[Runs, Row]:
    """As `served`, of the gradients."""
    runs: Runs = {}
    row: Row = {}
    for name, policy in POLICIES.items():
        steps = (replace(call.problem, lse=True), replace(call.problem, op=f"{call.op}_backward", grad=True))
        row[name] = {"kernel": ", ".join(choose(p, policy).name for p in steps)}
        runs[name] = partial(gradients, getattr(torch.ops.attnops, call.op).default, call, policy=policy)
    return runs, row


def gradients(op: Callable[..., Any], call: Call, **more: Any) -> Results:
    """Gradients of query, key and value."""
    inputs = {n: call.arguments[n].detach().requires_grad_() for n in ("query", "key", "value")}
    output = op(**call.arguments | inputs, **more)[0]
    grad = torch.linspace(-1, 1, output.numel(), device=output.device).view(output.shape).to(output.dtype)
    return torch.autograd.grad(output, list(inputs.values()), grad)


def exact(call: Call, training: bool) -> Results:
    """The same by the reference in float32."""
    wide = call.map(lambda n, t: t.float() if t.is_floating_point() else t)
    op = OPS[call.op]

    def reference(*args: Any, **kwargs: Any) -> Any:
        return op.reference(op.call(*args, **kwargs))

    return gradients(reference, wide) if training else output_of(reference, wide, "")


def times(runs: Runs, device: str) -> dict[str, float]:
    """Microseconds of each run."""
    if device == "cpu":
        return {name: timeit(run, number=1) * 1e6 for name, run in runs.items()}
    return {name: median(us) for name, us in GraphClock(device).in_turn(runs).items()}


def measured(call: Call, training: bool, device: str) -> Row:
    """The row of one call."""
    runs, row = (trained if training else served)(call)
    wanted = exact(call, training)
    for name, run in runs.items():
        error = max(float((got - want).abs().max() / want.abs().max()) for got, want in zip(run(), wanted, strict=True))
        row[name]["error"] = round(error, 5)
        if not error < MOST_ERROR:
            row[name]["failed"] = f"off by {error:.2e} of the largest value, want at most {MOST_ERROR}"
    del wanted
    if any("failed" in way for way in row.values()):
        return row
    us = times(runs, device)
    for name, taken in us.items():
        row[name]["us"] = round(taken, 1)
    return row | {"ratio": round(us["deterministic"] / us["default"], 3)}


def main(given: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__, ("cpu", "cuda"))
    parser.add_argument("--keys", type=int, default=4096, help="of a request")
    parser.add_argument("--only", default="", help="rows whose name holds this")
    asked = parser.parse_args(given)
    rows: dict[str, Row] = {}
    for name, build in CALLS.items():
        if asked.only in name:
            row = name.format(asked.keys)
            try:
                rows[row] = measured(build(keys=asked.keys, device=asked.device), name.startswith("training"), asked.device)
            except attnops.errors.NoKernel as error:
                rows[row] = {"refused": str(error).splitlines()[0]}
            print(json.dumps({row: rows[row]}), flush=True)
    print(write(environment(asked.device) | {"rows": rows}, "deterministic.json", asked.device))
    return int(any("ratio" not in row for row in rows.values()))


if __name__ == "__main__":
    raise SystemExit(main())
