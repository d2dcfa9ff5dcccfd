"""The first calls of `triton` in a fresh process with an empty cache: a call that compiles more
than it launches tries variants.

`python -m tests.gpu.test_first_use` is that process.
"""

import os
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from attnops.core.kernel import kernels_of
from tests.gpu.test_triton_data import CALLS
from tests.gpu.wide import WIDE, DeviceSource

# Device kernels that one call launches, at most. The pages that ids name are found first; attention
# has two stages, one of a prompt.
LAUNCHED = {
    "paged_attention:decode_8192": 3,
    "paged_attention:prefill": 2,
    "mla_attention:decode_8192": 3,
    "mla_attention:decode_page_64_heads_128": 3,
}
LONG = {str(case): case for op in ("paged_attention", "mla_attention") for case in WIDE[op]}
DATA = (
    "write_kv_4096",
    "write_kv_torch.float8_e4m3fn",
    "write_latent",
    "write_latent_packed",
    "copy_kv_64",
    "copy_kv_4000",
)


@pytest.mark.alone
def test_first_use_compiles_no_more_than_it_launches(found: dict[str, Any], tmp_path: Path) -> None:
    environ = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.test_first_use"],
        env=environ,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    uses = {
        name: (float(seconds), int(compiled))
        for name, seconds, compiled in map(str.split, done.stdout.splitlines())
    }
    found["triton_first_use_s"] = {name: round(seconds, 2) for name, (seconds, _) in uses.items()}
    assert {
        name: compiled for name, (_, compiled) in uses.items() if compiled > LAUNCHED.get(name, 2)
    } == {}
    assert any(compiled for _, compiled in uses.values()), (
        "no compiled kernel was found in Triton's cache"
    )


def main(cache: Path) -> None:
    """By name, the seconds of the first call above those of the second, and the device kernels that
    it compiled."""
    torch.zeros(1, device="cuda")
    for name in ("attention", "data"):
        import_module(
            f"attnops.kernels.triton.launch.{name}"
        )  # what is imported once is no part of a kernel's first use
    for name in (*LAUNCHED, *DATA):
        call = LONG[name].build(DeviceSource(1, "cuda")) if name in LAUNCHED else CALLS[name]()
        kernel = kernels_of(call.op)["triton"]
        torch.cuda.synchronize()
        times, before = [], len([*cache.rglob("*.cubin")])
        for _ in range(2):
            start = time.perf_counter()
            kernel.run(call.record)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        print(name, times[0] - times[1], len([*cache.rglob("*.cubin")]) - before)


if __name__ == "__main__":
    main(Path(os.environ["TRITON_CACHE_DIR"]))
