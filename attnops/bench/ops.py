"""Suites of calls of ops, which their families list (`bench_points`, `vendors`): `kernels`, `data`,
`linear` and `experts`.

`kernels`: every kernel that can answer a call, the automatic choice, and torch's and the vendors'
own calls. `automatic` is the plain op, `deterministic` the op under that policy; `kernel` in their
rows names the chosen kernel. `torch.*` are SDPA, compiled flex_attention and varlen_attn;
`direct.*` the vendors' own calls of their kernels. `of_direct` of a kernel: the time of the
vendor's fastest call of the same device code over its own. `of_automatic`: that of `automatic` over
the row's. `of_bandwidth` and `of_flops` are shares of the ceilings measured in the same run, for
the bytes a call must move and its operations.

`data`: kernels that move keys, values and latents, and what a copy of as many bytes takes.
`compiled` is what Inductor makes of the torch ops that `reference` runs eagerly. `copy` is `copy_`
of half the bytes that a case reads and writes, so it moves as many; `of_copy`: its time over the
row's. Results must be equal in every bit.

`linear`: the products of a decode step with the norm, activation and residual around them, by model
and number of rows. `aten`: the torch ops of transformers, as Inductor compiles them. `triton`: one
launch; `deterministic`: the kernel under that policy. `product`: torch's product alone. `us` of a
row of `automatic` has all times of kernels, and its regret is the time of the chosen one over the
best one's, less 1; the last rows of a model have the mean and the worst, and those of a choice by
estimates alone. Of the models in HELD no table has the shapes, and of most no table has all the
rows.

`experts`: the experts of a mixture layer at few tokens. `grouped_mm`, `batched_mm`: transformers'
functions, on the module that transformers makes; the other ways are as in `linear`.

A measurement of these two is one of `attnops.bench.cold`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnops.bench import Setup
from attnops.bench.cold import DETERMINISTIC, LESS, Task, cold_rows
from attnops.bench.exact import exact, way
from attnops.bench.op_suite import OpSuite
from attnops.bench.rows import (
    Row,
    Rows,
    Way,
    Ways,
    time_if_right,
    with_direct,
    with_ratios,
)
from attnops.core.arguments import REQUIRED, Arg
from attnops.core.kernel import Kernel, kernels_of
from attnops.core.problem import Problem, altered
from attnops.core.select import select
from attnops.measured import Sizes, work
from attnops.ops import OPS
from attnops.ops.linear import timed as linears
from attnops.ops.points import Requests
from attnops.ops.sweeps import F32, toy
from attnops.testing import oracle
from attnops.testing.calls import Call, filled
from attnops.testing.error_bounds import allowance
from attnops.testing.pool import Pool
from attnops.testing.timed_calls import build, call_of, with_copies
from attnops.tune.clock import Run, Timed, kernels_us
from attnops.tune.run import COMPILED, Stopwatch, runner

# Every kernel of attention ------------------------------------------------------------------------

# Not measured on a GPU, where a plain body holds the scores of all pairs; at toy size, compilers
# are not measured.
SLOW = ("reference", "flex", "torch.flex")
OWN = {
    "flashinfer": ("flashinfer_tensor_cores", "flashinfer_fa2", "flashinfer_fa3"),
    "flashinfer_mla_fa2": ("flashinfer_fa2",),
    "flashinfer_mla_fa3": ("flashinfer_fa3",),
}
"""By kernel, the vendor's calls that run the same device code; of other kernels, the call of the
kernel's name."""


def shorter(point: Requests, size: str) -> Requests:
    """At the size of the run: shorter and float32 on a CPU."""
    if size in ("full", "quick"):
        return point
    s, keys = point.shape, min(point.keys, 32 if size == "toy" else 512)
    queries = min(point.queries, keys if point.queries == point.keys else keys // 2)
    shape = altered(
        toy(s) if size == "toy" else altered(s, **F32),
        window=(min(s.rules.window[0], keys // 2), -1),
    )
    shape = shape if s.kv_dtype == s.dtype else altered(shape, kv_dtype=s.kv_dtype)
    return replace(point, shape=shape, batch=min(point.batch, 2), queries=queries, keys=keys)


def call_at(point: Requests, pool: Pool) -> Call:
    """The call of a point."""
    return build(
        point.shape, [point.queries] * point.batch, [point.keys] * point.batch, pool
    ).with_(**dict(point.more))


def kernel_rows(setup: Setup, pool: Pool, op: str, point: Requests) -> Rows:
    """Our kernels that are fast, the automatic choice, torch's calls and the vendors'."""
    call, brief = call_at(point, pool), setup.size == "toy"
    needs = work(point.shape, Sizes(point.batch, point.queries, point.keys / point.queries))
    want, allowed, part = exact(call)
    output = call.arguments.get(call.spec.output)
    slow = SLOW if setup.on_gpu else (*SLOW[1:], *COMPILED) if brief else ()
    fast = tuple(n for n in kernels_of(op) if n not in slow)
    ways: Ways = {
        kernel.name: way(
            runner(kernel, mine),
            part,
            allowed * kernel.tolerance.factor,
            mine.arguments.get(mine.spec.output),
        )
        for kernel, mine, _ in Stopwatch(names=fast).candidates(call)
    }
    for name, policy in (("automatic", ""), (DETERMINISTIC, DETERMINISTIC)):
        if (chosen := select(call.problem, policy).kernel) is not None:
            run = partial(OPS[op].packet.default, *call.args, **call.kwargs, policy=policy)
            ways[name] = replace(
                way(run, part, allowed * chosen.tolerance.factor, output),
                more={"kernel": chosen.name},
            )

    def other(make: Callable[..., Run | None]) -> Way | None:
        # Other calls may round weights to the dtype; the budget has a factor of two for block-wise
        # rescaling.
        run = make(call.record, setup.compiled)
        return None if run is None else way(run, part, 2 * allowed, output)

    def shares(us: float, way: Way) -> Row:
        found = setup.shares(us, of_bandwidth=needs.bytes, of_flops=needs.flops)
        return found | ({"of_ceiling": max(found.values())} if found else {})

    others = OPS[op].of_family("vendors", "VENDORS") or {}
    left = () if setup.on_gpu else ("direct",)
    ways |= {
        n: partial(other, make)
        for n, make in others.items()
        if n.partition(".")[0] not in left and not (brief and n in SLOW)
    }
    found = time_if_right(
        point.name, ways, want, allowed, partial(kernels_us, setup.device), more=shares
    )
    return with_ratios(with_direct(found, own_calls), "automatic")


def own_calls(way: str) -> list[str]:
    """The vendors' calls of the device code of a kernel."""
    return [f"direct.{name}" for name in OWN.get(way, (way,))]


def eager(kernel: Kernel, call: Call) -> Any:
    """The results of a kernel."""
    return kernel.run(call.record)


# What moves data ----------------------------------------------------------------------------------

# Ends of the names of cases whose code Inductor makes, which takes seconds
COMPILE = (" 64", " 4096")


def short(point: Any, size: str) -> Any:
    """On a CPU the short calls alone."""
    return point if size in ("full", "quick") or point.name.endswith(COMPILE[0]) else None


def moving(point: Any, pool: Pool, op: str) -> Call:
    """The call that a point fills."""
    pool.reset()
    dtype = getattr(torch, point.dtype)

    def make(a: Arg, dims: list[int]) -> Tensor | None:
        if a.default is not REQUIRED:  # a scale
            return None if dtype == torch.bfloat16 else torch.full(dims, 1 / 32, device=pool.device)
        if a.written:
            return torch.zeros(
                dims, dtype=torch.uint8 if a.dtypes == (torch.uint8,) else dtype, device=pool.device
            )
        return pool.take(*dims, dtype=torch.bfloat16)

    sizes, given = point.filled(pool)
    return Call(op, filled(op, sizes, given, make))


def move_rows(setup: Setup, pool: Pool, op: str, point: Any) -> Rows:
    """The kernels that can answer a call."""
    call = moving(point, pool, op)
    # Timed calls write their tensors again and again
    known, own = kernels_of(op), call.map(lambda _, t: t.clone())
    can = {name: k for name, k in known.items() if not k.refusals(call.problem)}

    def results(run: Callable[[Call], Any]) -> list[Tensor]:
        """The bytes of the results that a call returns or writes; the call itself is not
        changed."""
        mine = call.map(lambda _, t: t.clone())
        returned = run(mine)
        values = [mine.arguments[n] for n in mine.mutated] if returned is None else list(returned)
        return [x.contiguous().flatten().view(torch.uint8) for x in point.used(values)]

    def way(run: Callable[[Call], Any]) -> Way:
        return Way(Timed(partial(run, own)), partial(results, run))

    def compiled() -> Way:
        inline = next((name for name, k in can.items() if k.inline), None)

        def body(args: Any, kwargs: Any) -> Any:
            if inline is None:
                return OPS[op].reference(OPS[op].call(*args, **kwargs))
            return OPS[op].packet.default(*args, **kwargs, policy=f"kernel={op}:{inline}")

        made = setup.compiled(body, fullgraph=True, dynamic=False)
        return way(lambda c: made(c.args, c.kwargs))

    want = results(partial(eager, known["reference"]))
    ours = [name for name, k in can.items() if name == "reference" or not k.inline]
    ways: Ways = {name: way(partial(eager, known[name])) for name in ours}
    ways |= {"compiled": compiled} if point.name.endswith(COMPILE) else {}
    if moved := point.moved(call.tensors(), call.mutated):
        source, target = torch.zeros(2, moved // 2, dtype=torch.uint8, device=setup.device)
        ways["copy"] = Way(Timed(lambda: target.copy_(source)), lambda: want)

    def differing(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
        return float(sum(int((x != y).sum()) for x, y in zip(got, want, strict=True)))  # bytes

    return with_ratios(
        time_if_right(
            point.name, ways, want, 0.0, partial(kernels_us, setup.device), differing, own=ours
        ),
        "copy",
    )


# Weights that are read cold -----------------------------------------------------------------------

ROWS = {
    "toy": (1, 8),
    "small": (1, 8),
    "quick": (1, 8, 64),
    "full": (1, 2, 3, 8, 16, 24, 32, 48, 64, 96, 512),
}
AT = (1, 8, 64)  # the rows at which the policy is timed
HELD: Mapping[str, Mapping[str, Problem]] = {
    "phi-3-mini": linears.products(3072, 32, 32, 8192, 32064, 96),
    "mistral-small-24b": linears.products(5120, 32, 8, 32768, 131072),
}


class Model(NamedTuple):
    """The products of a model by name."""

    name: str
    products: Mapping[str, Problem]


def models(suite: str) -> list[tuple[str, Model]]:
    """Those whose products are timed, the ones that tables have first."""
    return [
        (products["o"].op, Model(name, products))
        for name, products in {**linears.MODELS, **HELD}.items()
    ]


def product_rows(setup: Setup, pool: Pool, op: str, model: Model) -> Iterator[Row]:
    """Every product of a model with every number of rows."""
    for name, shape in model.products.items():
        sizes = {n: getattr(shape, n) // LESS[setup.size] for n in ("out_features", "in_features")}
        for task in product_at(
            setup,
            pool,
            f"{model.name} {name}",
            altered(shape, dtype=setup.dtype, kv_dtype=setup.dtype, **sizes),
        ):
            yield from cold_rows(setup, task)


def product_at(setup: Setup, pool: Pool, name: str, shape: Problem) -> Iterator[Task]:
    """One product with every number of rows."""
    some, spec = ROWS[setup.size], OPS[shape.op].spec
    calls = with_copies(call_of(shape, Sizes(float(some[-1]), 1.0, 1.0), pool), pool)
    weights = [calls[0].arguments[n] for n in spec.weights]
    by_row = [a.name for a in spec.args if a.tensor and a.layout[0].text == "T"]
    for call in calls[1:]:
        for name_of, weight in zip(spec.weights, weights, strict=True):
            call.arguments[name_of].copy_(weight)
    [(written, want)] = oracle(calls[0].map(lambda _, t: t.clone())).items()
    allowed: Any = allowance(calls[0], {written: want})[written]
    moved = sum(weight.nbytes for weight in weights)
    alone = OPS[shape.op].of_family("vendors", "VENDORS")
    for count in some:
        fewer = [
            call.with_(**{n: call.arguments[n][:count] for n in by_row if n in call.arguments})
            for call in calls
        ]
        yield Task(
            f"{name} x{count}",
            fewer,
            want[:count],
            allowed[:count],
            moved,
            alone=alone,
            steady=count in AT,
            run_of=partial(runner, backend=setup.backend),
            rounds=3,
        )


def mixture_rows(setup: Setup, pool: Pool, op: str, mixture: Any) -> Iterator[Row]:
    """A layer with every number of tokens. Other suites do without transformers."""
    from attnops.bench import mixtures

    for task in mixtures.tasks(setup, op, mixture):
        yield from cold_rows(setup, task)


KERNELS = OpSuite("kernels", kernel_rows, {"toy": 4, "small": 4, "quick": 6}, shorter)
DATA = OpSuite("data", move_rows, sized=short)
LINEAR = OpSuite(
    "linear", product_rows, {"toy": 1, "small": 1, "quick": 1}, points=models, summary=True
)
EXPERTS = OpSuite("experts", mixture_rows, {"toy": 2, "small": 2, "quick": 2})
