"""Free memory and the needs of a model, checked before it is built: out of memory, Linux kills a process without a message."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from attnops.errors import InvalidInput

SPARE = 1.15
"""Factor for workspaces, the compiler's buffers and fragmentation."""

OVERHEAD = 1 << 30
"""Bytes of libraries that load later and of the compiler's processes."""

GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes", "/sys/fs/cgroup/memory/memory.stat"),
)
"""Limit, usage and statistics of a control group, version 2 and version 1."""


def free(device: torch.device) -> int | None:
    """Free bytes on `device`; None if the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    known = [_field("/proc/meminfo", "MemAvailable:", 1024), *(_left(*files) for files in GROUPS)]
    return min((n for n in known if n is not None), default=None)


def _field(path: str, name: str, unit: int = 1) -> int | None:
    with suppress(OSError, ValueError, IndexError):
        return next((int(line.split()[1]) * unit for line in Path(path).read_text().splitlines() if line.startswith(name)), None)
    return None


def _left(limit: str, used: str, stat: str) -> int | None:
    with suppress(OSError, ValueError):  # the limit is "max" if there is none
        return max(int(Path(limit).read_text()) - int(Path(used).read_text()) + (_field(stat, "inactive_file ") or 0), 0)
    return None


def needed(model: nn.Module, wide: torch.dtype | None = None, cached: int = 0) -> int:
    """Bytes of a model, possibly on meta, and `cached` more. wide: counts its largest module in this dtype, too (`models.widened`)."""
    weights = sum({id(p): p.nbytes for p in model.parameters()}.values())
    own = (m.parameters(recurse=False) for m in model.modules() if not isinstance(m, nn.Embedding))
    widened = 0 if wide is None else max(sum(p.numel() for p in params) for params in own) * wide.itemsize
    return int(SPARE * (weights + widened + cached)) + OVERHEAD


def refuse(what: str, need: int, there: int) -> None:
    """Raise InvalidInput if `need` bytes are more than `there`."""
    if need > there:
        need_gib, there_gib = (f"{n / 2**30:.1f} GiB free" for n in (need, there))
        raise InvalidInput("memory", there_gib, f"{need_gib}, for {what}; ask for fewer --layers, a smaller --model or smaller --points")
