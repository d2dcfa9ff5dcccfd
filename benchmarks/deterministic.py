"""`deterministic=True` beside the default policy; writes deterministic.json. CUDA only.

    python benchmarks/deterministic.py [--device cuda]

GPU time of the op under each policy: replays of CUDA graphs in turn, the L2 cache flushed before each, medians. Each result is
compared with float64 before it is timed, or with the default policy's where float64 is too slow. `ratio` is the deterministic
time over the default's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from common import default_device, environment, write

import attnops
from attnops.select import choose
from attnops.testing import Call, Features, Source, builders, latent
from attnops.testing.check import oracle
from attnops.testing.equip import equip_as_used
from attnops.testing.latent import DEEPSEEK
from attnops.tune.clock import GraphClock

LLAMA = Features(dtype=torch.bfloat16, head_dim=128, q_heads=32, kv_heads=8, causal=True)
WIDE = replace(DEEPSEEK, q_heads=128)
MOST_ERROR = 0.02
EXACT = 2**20
"""Pairs of queries and keys up to which float64 is asked."""


def decode(batch: int, page: int) -> Call:
    """One query a request of 4096 keys."""
    return builders.paged(Source(1, "cuda"), (1,) * batch, (4096,) * batch, page, LLAMA, padding=0, promise=True)


def prompt(page: int) -> Call:
    """A prompt of 4096 tokens, over pages."""
    return builders.paged(Source(1, "cuda"), (4096,), (4096,), page, LLAMA, padding=0, promise=True)


def latents(features: Any, batch: int, queries: int) -> Call:
    """Latent attention over 4096 keys."""
    return latent.mla(Source(1, "cuda"), (queries,) * batch, (4096,) * batch, 64, features, padding=0)


CALLS: dict[str, Callable[[], Call]] = {
    "decode 8x4096, pages of 16": partial(decode, 8, 16),
    "decode 8x4096, pages of 64": partial(decode, 8, 64),
    "decode 32x4096, pages of 64": partial(decode, 32, 64),
    "decode 1x4096, pages of 64": partial(decode, 1, 64),
    "prompt 4096, pages of 16": partial(prompt, 16),
    "prompt 4096, pages of 64": partial(prompt, 64),
    "prompt 4096, packed": lambda: builders.varlen(Source(1, "cuda"), (4096,), (4096,), LLAMA, padding=(0, 0), promise=True),
    "prompt 4096, dense": lambda: builders.dense(Source(1, "cuda"), 1, 4096, 4096, LLAMA),
    "latent decode 8x4096, 128 heads": partial(latents, WIDE, 8, 1),
    "latent decode 8x4096, 16 heads": partial(latents, DEEPSEEK, 8, 1),
    "latent prompt 4096, 16 heads": partial(latents, DEEPSEEK, 1, 4096),
}


def measured(build: Callable[[], Call], clock: GraphClock) -> dict[str, Any]:
    """The row of one call."""
    call = build()
    runs, row, outputs = {}, {}, {}
    for name, policy in (("default", ""), ("deterministic", "deterministic")):
        with attnops.use(deterministic=bool(policy)):
            kernel = choose(call.problem, policy)
            given = equip_as_used(kernel, call)
        op = getattr(torch.ops.attnops, call.op).default
        runs[name] = partial(op, *given.args, **given.kwargs, policy=policy)
        returned = runs[name]()
        outputs[name] = (given.arguments["output"] if returned is None else returned[0]).double().clone()
        row[name] = {"kernel": kernel.name}
    problem = call.problem
    exact = problem.tokens.hint * problem.context.hint <= EXACT and call.op != "mla_attention"
    wanted = oracle(call)["output"].double() if exact else outputs["default"]
    for name, got in outputs.items():
        error = float((got - wanted).abs().max() / wanted.abs().max())
        row[name]["error"] = round(error, 5)
        if not error < MOST_ERROR:
            row[name]["failed"] = f"off by {error:.2e} of the largest value, want at most {MOST_ERROR}"
    if any("failed" in way for way in row.values()):
        return row
    times = {name: median(t) for name, t in clock.in_turn(runs, 15).items()}
    for name, us in times.items():
        row[name]["us"] = round(us, 1)
    return row | {"ratio": round(times["deterministic"] / times["default"], 3), "compared_with": "float64" if exact else "default"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda",), default=default_device())
    device = parser.parse_args().device
    clock = GraphClock(device)
    rows = {}
    for name, build in CALLS.items():
        rows[name] = measured(build, clock)
        print(name, rows[name], flush=True)
    print(write(environment(device) | {"rows": rows}, "deterministic.json", device))
    return int(any("ratio" not in row for row in rows.values()))


if __name__ == "__main__":
    raise SystemExit(main())
