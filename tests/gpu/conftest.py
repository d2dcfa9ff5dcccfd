"""Collects what the GPU tests found and writes it as JSON: under $OUT if set, else benchmarks/results/local."""

import json
import os
import subprocess
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from attnops.kernel import all_kernels

ROOT = Path(__file__).resolve().parents[2]
FOUND: dict[str, Any] = {}


def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
    # One of several processes takes its share; see run.py.
    if shard := os.environ.get("SHARD"):
        at, of = map(int, shard.split("/"))
        mine = [item for item in items if zlib.crc32(item.nodeid.encode()) % of == at]
        config.hook.pytest_deselected(items=[item for item in items if item not in mine])
        items[:] = mine


@pytest.fixture
def found() -> dict[str, Any]:
    """Where a test puts its figures, by section and name."""
    return FOUND


def versions() -> dict[str, Any]:
    """What the figures were made with. The commit is that of the checkout, or $COMMIT where git has none."""
    import triton

    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "commit": os.environ.get("COMMIT") or (git.stdout.strip() if git.returncode == 0 else "unknown"),
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "packages": sorted({v for k in all_kernels() for v in k.versions() if not v.endswith("==None")}),
    }


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if not FOUND or not torch.cuda.is_available():
        return
    folder = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results" / "local")
    folder.mkdir(parents=True, exist_ok=True)
    name = f"kernels.{shard.partition('/')[0]}.json" if (shard := os.environ.get("SHARD")) else "kernels.json"
    report = {**versions(), "passed": exitstatus == 0, **FOUND}
    (folder / name).write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
