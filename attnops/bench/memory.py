"""The memory that is free, and how much a model needs: asked before one is built, for the system ends a process without a word."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from attnops.errors import InvalidInput

SPARE = 1.15
"""Times what is counted: workspaces, what a compiler keeps, pieces between allocations."""

OVERHEAD = 1 << 30
"""Bytes beside: libraries that are loaded later, the compiler's processes."""

GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes", "/sys/fs/cgroup/memory/memory.stat"),
)
"""Files of a control group: its limit, what is used, and what of that is files that can be dropped. Of version 2, of version 1."""


def free(device: torch.device) -> int | None:
    """Bytes that may still be taken on `device`; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    known = [n for n in (_available(), *(_left(*files) for files in GROUPS)) if n is not None]
    return min(known, default=None)


def _available(path: str = "/proc/meminfo") -> int | None:
    with suppress(OSError, ValueError, IndexError):
        for line in Path(path).read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _left(limit: str, used: str, stat: str) -> int | None:
    with suppress(OSError, ValueError):
        most = int(Path(limit).read_text())  # "max" where there is none
        droppable = 0
        with suppress(OSError, ValueError, IndexError):
            lines = dict(line.split()[:2] for line in Path(stat).read_text().splitlines())
            droppable = int(lines.get("inactive_file", 0))
        return max(most - int(Path(used).read_text()) + droppable, 0)
    return None


def needed(model: nn.Module, wide: torch.dtype | None = None, cached: int = 0) -> int:
    """Bytes of a model, which may be on meta, and of `cached` more. wide: modules are widened one by one, as by `models.widened`."""
    weights = sum({id(p): p.nbytes for p in model.parameters()}.values())
    widened = 0
    if wide is not None:
        own = (m.parameters(recurse=False) for m in model.modules() if not isinstance(m, nn.Embedding))
        widened = max(sum(p.numel() for p in params) for params in own) * wide.itemsize
    return int(SPARE * (weights + widened + cached)) + OVERHEAD


def refuse(what: str, need: int, there: int) -> None:
    """Raise InvalidInput where `need` bytes are more than there are."""
    if need > there:
        want = f"{_gib(need)} free, for {what}; ask for fewer --layers, a smaller --model or smaller --points"
        raise InvalidInput("memory", f"{_gib(there)} free", want)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
