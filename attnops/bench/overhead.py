"""Suite `overhead`: host time of imports, of an eager call and of an op in a compiled graph, of a
kernel that does nothing."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch

import attnops.ops
from attnops.bench import Setup
from attnops.bench.rows import Case, Rows
from attnops.core.kernel import Kernel, register
from attnops.core.problem import Problem
from attnops.core.select import active_policy, use
from attnops.ops.pages.record import PAGED
from attnops.ops.sweeps import LLAMA
from attnops.testing.calls import Call
from attnops.testing.pool import Pool
from attnops.testing.timed_calls import build
from attnops.tune.clock import Run, Times, host_us, spread
from attnops.tune.run import done_within

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
NOOP = "bench_noop"
LIMIT_S = 240.0  # a compilation may hang
TIMED_IMPORTS = (
    "from time import *; a = time(); import torch; b = time(); import attnops; print(b - a, "
    "time() - b)"
)


def cases(setup: Setup) -> dict[str, Case]:
    """One case, in a process of its own, because the suite registers a kernel."""
    sizes = (5, 40, (8, 24)) if setup.quick else (15, 400, (32, 96))
    return {"overhead": partial(in_a_process, measure, setup, *sizes)}


def in_a_process(function: Callable[..., T], *given: Any) -> T:
    """The function's result in a fresh process. Raises its error, or TimeoutError."""
    pool = ProcessPoolExecutor(1, get_context("spawn"))
    job = pool.submit(function, *given)
    if not done_within(LIMIT_S, pool, [job]):
        raise TimeoutError(f"not done after {LIMIT_S:g} s")
    return job.result()


@torch.no_grad()
def measure(setup: Setup, repeats: int, inner: int, ops: tuple[int, int]) -> Rows:
    """All rows. repeats: of `inner` calls each. ops: of the two graphs that are compared."""
    register(
        Kernel(
            NOOP,
            PAGED.name,
            lambda call: None,
            frozenset({"causal"}),
            dtypes=(setup.dtype,),
            cost_us=lambda problem: 1e9,
        )
    )
    torch.manual_seed(0)
    heads = {"q_heads": 8, "kv_heads": 8, "head_dim": 64, "v_head_dim": 64, "page_size": 16}
    kind = Problem.kind(
        PAGED.name, **LLAMA | heads | {"dtype": setup.dtype, "kv_dtype": setup.dtype}
    )
    call = build(kind, [1] * 4, [50] * 4, Pool(setup.device))
    found = imports(1 if setup.size == "toy" else 3)
    with use(kernel=f"{PAGED.name}:{NOOP}"):
        return (
            found
            + eager(call, repeats, inner)
            + compiled(setup, call, repeats, max(1, inner // 8), ops)
        )


def _plain(*args: Any, **kwargs: Any) -> None: ...


def imports(repeats: int) -> Rows:
    """Times of `import torch` and then `import attnops` in fresh processes. The first run, which
    may write bytecode, is not counted."""
    command = [sys.executable, "-c", TIMED_IMPORTS]
    runs = [
        subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
        for _ in range(repeats + 1)
    ]
    times = zip(*([1e6 * float(s) for s in run.split()] for run in runs[1:]), strict=True)
    return [
        {"case": "import", "way": name, **spread(us)}
        for name, us in zip(("torch", "attnops"), times, strict=True)
    ]


def _rows(
    case: str, times: Times, figure: str, over: tuple[str, str], of: tuple[str, ...], ops: int = 1
) -> Rows:
    """The rows of a case; those of the ways `of` have the `figure`: the time of `over[0]` over that
    of `over[1]`, an op."""
    us = round((times[over[0]]["median_us"] - times[over[1]]["median_us"]) / ops, 2)
    return [
        {"case": case, "way": way, **found, **({figure: us} if way in of else {})}
        for way, found in times.items()
    ]


def eager(call: Call, repeats: int, inner: int) -> Rows:
    """An eager paged call of a kernel that does nothing: a plain function, its overload, the op
    that selects, the public function."""
    packet = PAGED.packet
    function = attnops.ops.paged_attention
    args = call.args
    kwargs = call.kwargs
    signature = inspect.signature(function).parameters
    public = {n: v for n, v in kwargs.items() if n in signature}
    policy, overload = active_policy(), getattr(packet, NOOP)
    calls: dict[str, Run] = {
        "function": lambda: function(*args, **public),
        "op": lambda: packet.default(*args, **kwargs, policy=policy),
        "overload": lambda: overload(*args, **kwargs, policy=policy),
        "plain": lambda: _plain(*args, **kwargs, policy=policy),
    }
    times = host_us(calls, repeats, inner)
    return _rows(
        "eager call of a kernel that does nothing",
        times,
        "function_over_plain_us",
        ("function", "plain"),
        ("function",),
    )


def compiled(setup: Setup, call: Call, repeats: int, inner: int, ops: tuple[int, int]) -> Rows:
    """Two compiled graphs of ops that do nothing. `op_us`: the cost of one more op, its output
    buffer included."""
    query, *rest = call.args

    def chain(layers: int) -> Run:
        def run(x: torch.Tensor) -> torch.Tensor:
            for _ in range(layers):
                x = attnops.ops.paged_attention(x, *rest, max_seqlen_q=1, holes=False)
            return x

        return partial(setup.compiled(run, fullgraph=True), query)

    few, many = (f"{n}_ops" for n in ops)
    times = host_us({few: chain(ops[0]), many: chain(ops[1])}, repeats, inner)
    return _rows("compiled graph", times, "op_us", (many, few), (few, many), ops[1] - ops[0])
