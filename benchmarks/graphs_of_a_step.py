"""One decode step of a Llama-3-8B shape in graphs: eager, reduce-overhead, piecewise, breakable, against the bytes it has to read.

    python benchmarks/graphs_of_a_step.py [--layers 32] [--points 1x1024,8x1024,32x2048] [--buckets 256]

Writes graphs.json. Weights are random bfloat16; the model is attnops.nn over a PagedCache, the same code in every mode. A step's time is
that of the call alone, its batch made before. `roofline`: weights without the embedding and the cached keys and values, over the rate of
a pass over a large tensor in the same run. Every mode compiles from an empty cache folder.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from common import a_pass, environment, interleaved_us, write
from torch import Tensor

from attnops.bench import decoder
from attnops.bench.decoder import PAGE, Decoder, Dims
from attnops.cache import PagedCache
from attnops.graphs import Buckets, breakable, piecewise

LLAMA_8B = asdict(decoder.LLAMA_8B)


def copy_tb_s(device: str, nbytes: int = 1 << 30) -> float:
    """Bytes read and written a second by a pass over them."""
    us = interleaved_us({"copy": a_pass(device, nbytes)}, repeats=5, inner=20)["copy"]["median_us"]
    return 2 * nbytes / us / 1e6


def read_bytes(model: Decoder, requests: int, context: int) -> int:
    weights = sum(p.nbytes for n, p in model.named_parameters() if not n.startswith("embed"))
    attention = model.layers[0].attention.attention
    per_token = 2 * len(model.layers) * attention.num_kv_heads * attention.head_dim * 2
    return weights + requests * context * per_token


def stock(model: Decoder) -> Callable[..., Tensor]:
    return torch.compile(model, mode="reduce-overhead", fullgraph=True)


def modes(model: Decoder, cache: PagedCache, buckets: int, graphs: Any) -> dict[str, Callable[..., Tensor]]:
    given: dict[str, Any] = {"tokens": ("tokens",), "cache": cache, "graphs": graphs}
    sizes = Buckets.up_to(buckets, padding="null")
    return {
        "eager": model,
        "reduce-overhead": stock(model),
        "piecewise": piecewise(model, sizes, **given),
        "breakable": breakable(model, sizes, **given),
    }


@torch.no_grad()
def measure(
    device: str, layers: int, points: list[tuple[int, int]], buckets: int, shape: dict[str, int], graphs: Any = None,
    fresh: Callable[[], None] = lambda: None,
) -> dict[str, Any]:  # fmt: skip
    model = decoder.built(layers, Dims(**shape), device, torch.bfloat16)
    report: dict[str, Any] = {"shape": {**shape, "layers": layers}, "copy_tb_s": copy_tb_s(device, 1 << (30 if device == "cuda" else 20))}
    for requests, context in points:
        width = -(-(context + 1) // PAGE)
        cache = PagedCache(
            layers, requests * width + 1, PAGE, num_kv_heads=shape["kv_heads"], head_dim=shape["hidden"] // shape["heads"],
            max_requests=max(requests, 1), max_pages_per_request=width, dtype=torch.bfloat16, device=device,
        )  # fmt: skip
        ids = [cache.alloc(context - 1) for _ in range(requests)]
        values = {"tokens": torch.randint(shape["vocab"], (requests,), device=device), "batch": cache.batch(ids)}
        values |= {"k_pages": cache.k_pages, "v_pages": cache.v_pages}
        found: dict[str, Any] = {}
        calls = {}
        for name, step in modes(model, cache, max(requests, 1), graphs).items():
            fresh()
            began = time.perf_counter()
            for _ in range(3):
                step(**values)
            if device == "cuda":
                torch.cuda.synchronize()
            found[name] = {"first_s": round(time.perf_counter() - began, 2)}
            calls[name] = partial(step, **values)
        bytes_ = read_bytes(model, requests, context)
        for name, took in interleaved_us(calls, repeats=9, inner=20 if device == "cuda" else 1).items():
            ideal = bytes_ / report["copy_tb_s"] / 1e6
            found[name] |= {**took, "roofline": round(ideal / took["median_us"], 3)}
        report[f"{requests}x{context}"] = found
        del calls
    # All default buckets, after compilation: what a server pays at its start.
    cache = PagedCache(
        layers, 64, PAGE, num_kv_heads=shape["kv_heads"], head_dim=shape["hidden"] // shape["heads"], max_requests=buckets,
        max_pages_per_request=64, dtype=torch.bfloat16, device=device,
    )  # fmt: skip
    values = {"tokens": torch.zeros(1, dtype=torch.long, device=device), "batch": cache.batch([cache.alloc()])}
    values |= {"k_pages": cache.k_pages, "v_pages": cache.v_pages}
    for name in ("piecewise", "breakable"):
        fresh()
        step: Any = modes(model, cache, buckets, graphs)[name]
        told = step.capture(**values)
        report[f"capture {name}"] = {
            "buckets": len(told.rows), "seconds": round(sum(r.seconds for r in told.rows), 2), "graph_bytes": told.graph_bytes,
            "input_bytes": told.input_bytes, "compile_s": round(told.compile_seconds, 2), "pieces": told.compiled, "modes": told.modes,
        }  # fmt: skip
        step.free()
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda",), default="cuda")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--points", default="1x1024,8x1024,32x2048", help="requests x context, with commas")
    parser.add_argument("--buckets", type=int, default=256, help="the largest of the default decode buckets")
    given = parser.parse_args()
    points = [(int(a), int(b)) for a, b in (p.split("x") for p in given.points.split(","))]
    with tempfile.TemporaryDirectory() as empty:

        def fresh() -> None:
            # One for each mode, so that none finds what another has compiled.
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(dir=empty)

        found = measure(given.device, given.layers, points, given.buckets, LLAMA_8B, fresh=fresh)
    print(write({**environment(given.device), "graphs": found}, "graphs.json", given.device))


if __name__ == "__main__":
    main()
