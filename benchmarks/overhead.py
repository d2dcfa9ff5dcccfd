"""Measures what attnops itself costs and writes overhead.json.

    python benchmarks/overhead.py [--device cpu|cuda]

Import time, what an eager call costs over a plain Python function, and what one more op costs in a compiled graph.
Everything that is compared is measured in the same process, interleaved; figures are medians over repeats, with their spread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from common import ROOT, default_device, environment, interleaved_us, write

import attnops
from attnops.kernel import Kernel, kernels_of, register
from attnops.problem import Target
from attnops.select import active_policy


def import_s(repeats: int = 5) -> dict[str, float]:
    """Seconds of `import attnops` in a fresh process that has torch loaded: the median, and torch's own import beside it."""
    code = (
        "import time; a = time.perf_counter(); import torch; b = time.perf_counter(); import attnops; c = time.perf_counter();"
        "print(b - a, c - b)"
    )
    command = [sys.executable, "-c", code]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout for _ in range(repeats)]
    torch_s, ours_s = zip(*(map(float, run.split()) for run in runs), strict=True)
    return {"torch_s": round(statistics.median(torch_s), 3), "attnops_s": round(statistics.median(ours_s), 3)}


def _nothing(*args: Any, **kwargs: Any) -> None:
    """A paged kernel that does nothing, so that what is left is the cost of the call."""


def _paged_call(device: str) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    query, output = (torch.randn(4, 8, 64, device=device, dtype=dtype) for _ in range(2))
    pages = torch.randn(40, 16, 8, 64, device=device, dtype=dtype)
    table = torch.arange(1, 17, device=device, dtype=torch.int32).view(4, 4)
    lengths, cu = torch.full((4,), 50, device=device, dtype=torch.int32), torch.arange(5, device=device, dtype=torch.int32)
    return (query, pages, pages, table, lengths, cu), {"max_seqlen_q": 1, "scale": 0.125, "output": output}


def eager_overhead(device: str) -> dict[str, Any]:
    """An eager paged call of a kernel that does nothing: as a plain function, its overload, the op that selects, the public function."""
    args, kwargs = _paged_call(device)
    packet = torch.ops.attnops.paged_attention
    with torch.no_grad(), attnops.use(kernel="paged_attention:noop"):
        policy = active_policy()
        figures = interleaved_us(
            {
                "function": lambda: attnops.paged_attention(*args, max_seqlen_q=1, output=kwargs["output"]),
                "op": lambda: packet.default(*args, **kwargs, policy=policy),
                "overload": lambda: packet.noop(*args, **kwargs, policy=policy),
                "plain": lambda: _nothing(*args, **kwargs, policy=policy),
            }
        )
    over = figures["function"]["median_us"] - figures["plain"]["median_us"]
    return {**figures, "function_over_plain_us": round(over, 2)}


def fa3_overhead(device: str) -> dict[str, Any]:
    """Host microseconds of an eager decode through `paged_attention` over the raw op of the wheel, called as the wrap calls it."""
    from attnops.kernels import _fa3

    (query, *rest), kwargs = _paged_call(device)
    pages, _, table, lengths, cu = rest
    kernel = kernels_of("paged_attention")["fa3"]
    if device != "cuda" or kernel.absences(Target.of(query.device)):
        return {"skipped": "fa3 is not usable here"}
    fwd, tail = _fa3.raw_op()
    values, output, none = pages.clone(), kwargs["output"], None
    raw = (
        query, pages, values, none, none, none, output, cu, none, none, none, lengths, 1, none, table, none, none, none, none, none,
        none, none, none, 0.125, True, -1, -1, 0, 0.0, False, none, 0, none, 0, none, *tail,
    )  # fmt: skip
    calls = {
        "raw": lambda: fwd(*raw),
        "promised": lambda: attnops.paged_attention(
            query, pages, values, table, lengths, cu, max_seqlen_q=1, output=output, padded=False, kernel="fa3"
        ),
        "padded": lambda: attnops.paged_attention(query, pages, values, table, lengths, cu, max_seqlen_q=1, output=output, kernel="fa3"),
    }
    with torch.no_grad():
        # Few calls at a time, so that the queue of launches never fills and what is timed is the host.
        figures = interleaved_us(calls, repeats=25, inner=20, wait=False)
    return {**figures, "promised_over_raw_us": round(figures["promised"]["median_us"] - figures["raw"]["median_us"], 2)}


def compiled_overhead(device: str) -> dict[str, Any]:
    """Microseconds that one more paged op, its output buffer included, adds to a compiled graph: 96 against 32 ops that do nothing."""
    (query, *rest), _ = _paged_call(device)

    def chain(layers: int) -> Callable[[], torch.Tensor]:
        def call(x: torch.Tensor) -> torch.Tensor:
            for _ in range(layers):
                x = attnops.paged_attention(x, *rest, max_seqlen_q=1)
            return x

        compiled = torch.compile(call, fullgraph=True)
        return lambda: compiled(query)

    with torch.no_grad(), attnops.use(kernel="paged_attention:noop"):
        figures = interleaved_us({"32_ops": chain(32), "96_ops": chain(96)}, inner=50)
    return {**figures, "op_us": round((figures["96_ops"]["median_us"] - figures["32_ops"]["median_us"]) / 64, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default_device())
    device = parser.parse_args().device
    torch.manual_seed(0)
    register(Kernel("noop", "paged_attention", _nothing, cost_us=lambda problem: 1e9))
    report = {
        **environment(device),
        "import": import_s(),
        "eager": eager_overhead(device),
        "fa3": fa3_overhead(device),
        "compiled": compiled_overhead(device),
    }
    write(report, "overhead.json", device)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
