"""Measures what attnops itself costs and writes one JSON file.

    python benchmarks/run.py [--device cpu|cuda]

Suite `overhead`: import time, what an eager call costs over a plain Python function, and what one more op costs in a compiled graph.
Everything that is compared is measured in the same process, interleaved; figures are medians over repeats, with their spread.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import attnops
from attnops.kernel import Kernel, register
from attnops.select import active_policy

ROOT = Path(__file__).resolve().parent.parent


def interleaved_us(
    calls: dict[str, Callable[[], Any]], repeats: int = 15, inner: int = 400, wait: bool = True
) -> dict[str, dict[str, float]]:
    """Median and half the interquartile range, in microseconds a call, of each of `calls`, run in turn so that drift hits all alike.

    wait: for the device to be done before the clock is read.
    """
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(20):
            call()
    for _ in range(repeats):
        for name, call in calls.items():
            _sync()
            start = time.perf_counter()
            for _ in range(inner):
                call()
            if wait:
                _sync()
            taken[name].append((time.perf_counter() - start) / inner * 1e6)
    out = {}
    for name, us in taken.items():
        low, _, high = statistics.quantiles(us, n=4)
        out[name] = {"median_us": round(statistics.median(us), 2), "spread_us": round((high - low) / 2, 2)}
    return out


def _sync() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


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
    from attnops.kernel import kernels_of
    from attnops.kernels import _fa3

    (query, *rest), kwargs = _paged_call(device)
    pages, _, table, lengths, cu = rest
    kernel = kernels_of("paged_attention")["fa3"]
    if device != "cuda" or kernel.absences(attnops.problem.Target.of(query.device)):
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


def environment(device: str) -> dict[str, Any]:
    """What the figures were made with."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    return {
        "commit": os.environ.get("COMMIT") or (git.stdout.strip() if git.returncode == 0 else "unknown"),
        "date": time.strftime("%Y-%m-%d"),
        "device": name,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "attnops": attnops.__version__,
    }


def folder_of(device: str) -> Path:
    """`$OUT` if set, else benchmarks/results/<device>."""
    if out := os.environ.get("OUT"):
        return Path(out)
    gpu = torch.cuda.get_device_name().split()[-1].lower() if device == "cuda" else "cpu"
    return ROOT / "benchmarks" / "results" / gpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
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
    folder = folder_of(device)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "overhead.json").write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
