"""Suite `overhead`: what attnops itself costs on the host.

Import time, what an eager call costs over a plain Python function, and what one more op costs in a compiled graph. Everything that is
compared is measured in one process, in turn: a process of its own, because a kernel that does nothing is registered in it.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import attnops.ops
from attnops.bench.report import Case
from attnops.bench.setup import Setup, device_of
from attnops.bench.timing import interleaved_us
from attnops.bench.verdict import Row
from attnops.kernel import Kernel, kernels_of, register
from attnops.problem import Target
from attnops.select import active_policy, use

ROOT = Path(__file__).resolve().parents[2]
NOOP = "bench_noop"
LIMIT_S = 240.0


def cases(setup: Setup) -> dict[str, Case]:
    """Of the suite: all in one."""
    return {"overhead": partial(in_a_process, setup)}


def in_a_process(setup: Setup) -> list[Row]:
    """The rows. Raises RuntimeError: the process said so."""
    code = f"from attnops.bench import overhead; overhead.main({setup.device.type!r}, {setup.quick}, {setup.backend!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1])
    return list(rows_of(json.loads(done.stdout.splitlines()[-1])))


def main(device: str, quick: bool, backend: str) -> None:
    """Print the figures as JSON. To be called in a new process: it registers a kernel."""
    setup = Setup(device_of(device), quick, backend=backend)
    print(json.dumps(measure(setup, *((5, 40, (8, 24)) if quick else (15, 400, (32, 96))))))


def measure(setup: Setup, repeats: int, inner: int, ops: tuple[int, int]) -> dict[str, Any]:
    """All figures. repeats: of `inner` calls each. ops: of the two graphs that are compared."""
    register(Kernel(NOOP, "paged_attention", _nothing, cost_us=lambda problem: 1e9))
    torch.manual_seed(0)
    return {
        "import": import_s({"toy": 1}.get(setup.size, 3)), "eager": eager(setup, repeats, inner), "fa3": fa3(setup),
        "compiled": compiled(setup, repeats, max(1, inner // 8), ops),
    }  # fmt: skip


PARTS = (("eager", "eager call of a kernel that does nothing"), ("fa3", "eager call of fa3"), ("compiled", "compiled graph"))
DERIVED = {("eager", "function"): "function_over_plain_us", ("fa3", "promised"): "promised_over_raw_us"}
"""Of the rows of a part, what else it found."""


def rows_of(found: dict[str, Any]) -> Iterator[Row]:
    """The figures in the form that all suites share. `op_us`: of one more op in the graph, from the graphs of more and of fewer ops."""
    for part, case in PARTS:
        for way, us in found[part].items():
            if isinstance(us, dict):
                named = DERIVED.get((part, way))
                more = {named: found[part][named]} if named else {"op_us": found[part]["op_us"]} if part == "compiled" else {}
                yield Row(case, way, us["median_us"], us["spread_us"], more=more)
    times = found["import"]
    for what in ("attnops", "torch"):
        spread = times.get(f"{what}_spread_s")
        yield Row("import", what, round(times[f"{what}_s"] * 1e6), None if spread is None else round(spread * 1e6))


def import_s(repeats: int = 5) -> dict[str, float]:
    """Seconds of `import attnops` in a fresh process that has torch loaded, and torch's own import beside it: medians, half the ranges.

    A first process compiles the modules to bytecode, and is not counted: where none may be written, it would be compiled every time.
    """
    with tempfile.TemporaryDirectory(prefix="attnops-bench-") as folder:
        code = (
            "import sys, time; a = time.perf_counter(); import torch; b = time.perf_counter();"
            f"sys.dont_write_bytecode, sys.pycache_prefix = False, {folder!r};"
            "b2 = time.perf_counter(); import attnops; c = time.perf_counter(); print(b - a, c - b2)"
        )
        command = [sys.executable, "-c", code]
        runs = [subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout for _ in range(repeats + 1)][1:]
    out = {}
    for name, seconds in zip(("torch", "attnops"), zip(*(map(float, r.split()) for r in runs), strict=True), strict=True):
        out[f"{name}_s"] = round(statistics.median(seconds), 3)
        out |= {f"{name}_spread_s": round((max(seconds) - min(seconds)) / 2, 3)} if repeats > 1 else {}
    return out


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What the kernel that does nothing runs."""


def _paged_call(setup: Setup) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    device, dtype = setup.device, setup.dtype
    query, output = (torch.randn(4, 8, 64, device=device, dtype=dtype) for _ in range(2))
    pages = torch.randn(40, 16, 8, 64, device=device, dtype=dtype)
    table = torch.arange(1, 17, device=device, dtype=torch.int32).view(4, 4)
    lengths, cu = torch.full((4,), 50, device=device, dtype=torch.int32), torch.arange(5, device=device, dtype=torch.int32)
    return (query, pages, pages, table, lengths, cu), {"max_seqlen_q": 1, "scale": 0.125, "output": output}


def eager(setup: Setup, repeats: int, inner: int) -> dict[str, Any]:
    """An eager paged call of a kernel that does nothing: as a plain function, its overload, the op that selects, the public function."""
    args, kwargs = _paged_call(setup)
    packet, function = torch.ops.attnops.paged_attention, attnops.ops.paged_attention
    with torch.no_grad(), use(kernel=f"paged_attention:{NOOP}"):
        policy, overload = active_policy(), getattr(packet, NOOP)
        figures: dict[str, Any] = interleaved_us(
            {
                "function": lambda: function(*args, max_seqlen_q=1, holes=False, output=kwargs["output"]),
                "op": lambda: packet.default(*args, **kwargs, holes=False, policy=policy),
                "overload": lambda: overload(*args, **kwargs, holes=False, policy=policy),
                "plain": lambda: _nothing(*args, **kwargs, policy=policy),
            },
            repeats,
            inner,
        )
    over = figures["function"]["median_us"] - figures["plain"]["median_us"]
    return {**figures, "function_over_plain_us": round(over, 2)}


def fa3(setup: Setup) -> dict[str, Any]:
    """Host microseconds of an eager decode through `paged_attention` over the raw op of the wheel, called as the wrap calls it."""
    (query, *rest), kwargs = _paged_call(setup)
    pages, _, table, lengths, cu = rest
    kernel = kernels_of("paged_attention")["fa3"]
    if not setup.on_gpu or kernel.absences(Target.of(query.device)):
        return {}
    from attnops.kernels import _fa3

    fwd, tail = _fa3.raw_op()
    values, output, none = pages.clone(), kwargs["output"], None
    raw = (
        query, pages, values, none, none, none, output, cu, none, none, none, lengths, 1, none, table, none, none, none, none, none,
        none, none, none, 0.125, True, -1, -1, 0, 0.0, False, none, 0, none, 0, none, *tail,
    )  # fmt: skip
    call = attnops.ops.paged_attention
    calls = {
        "raw": lambda: fwd(*raw),
        "promised": lambda: call(
            query, pages, values, table, lengths, cu, max_seqlen_q=1, output=output, padded=False, holes=False, kernel="fa3"
        ),
        "padded": lambda: call(query, pages, values, table, lengths, cu, max_seqlen_q=1, output=output, holes=False, kernel="fa3"),
    }  # fmt: skip
    with torch.no_grad():
        # Few calls at a time, so that the queue of launches never fills and what is timed is the host.
        figures: dict[str, Any] = interleaved_us(calls, repeats=25, inner=20, wait=False)
    return {**figures, "promised_over_raw_us": round(figures["promised"]["median_us"] - figures["raw"]["median_us"], 2)}


def compiled(setup: Setup, repeats: int, inner: int, ops: tuple[int, int]) -> dict[str, Any]:
    """Microseconds that one more paged op, its output buffer included, adds to a compiled graph of ops that do nothing."""
    (query, *rest), _ = _paged_call(setup)

    def chain(layers: int) -> Callable[[], torch.Tensor]:
        def call(x: torch.Tensor) -> torch.Tensor:
            for _ in range(layers):
                x = attnops.ops.paged_attention(x, *rest, max_seqlen_q=1, holes=False)
            return x

        graph = setup.compiled(call, fullgraph=True)
        return lambda: graph(query)

    few, many = (f"{n}_ops" for n in ops)
    with torch.no_grad(), use(kernel=f"paged_attention:{NOOP}"):
        figures: dict[str, Any] = interleaved_us({few: chain(ops[0]), many: chain(ops[1])}, repeats, inner)
    return {**figures, "op_us": round((figures[many]["median_us"] - figures[few]["median_us"]) / (ops[1] - ops[0]), 2)}
