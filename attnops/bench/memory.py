"""Free memory and the needs of a model, checked before it is built: out of memory, Linux kills a process without a message."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from attnops.errors import InvalidInput

SPARE, OVERHEAD = 1.15, 1 << 30
"""Factor for workspaces, the compiler's buffers and fragmentation; bytes of libraries that load later and of the compiler's processes."""

GROUPS = (("/sys/fs/cgroup/memory.", "max", "current"), ("/sys/fs/cgroup/memory/memory.", "limit_in_bytes", "usage_in_bytes"))
"""Path prefix, limit and usage of a control group, version 2 and version 1."""


def free(device: torch.device) -> int | None:
    """Free bytes on `device`; None if the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    known = [n * 1024 for name, n in _read("/proc/meminfo").items() if name == "MemAvailable:"]
    return min([*known, *(left for group in GROUPS if (left := _left(*group)) is not None)], default=None)


def _read(path: str) -> dict[str, int]:
    """The numbers of a file of lines `name number`, or of one number by the name ""; empty if there is no file or limit."""
    with suppress(OSError, ValueError, IndexError):
        lines = [line.split() for line in Path(path).read_text().splitlines()]
        return {words[0] if words[1:] else "": int((words[1:] or words)[0]) for words in lines}
    return {}


def _left(prefix: str, limit: str, used: str) -> int | None:
    most, now = (_read(prefix + name).get("") for name in (limit, used))
    return None if most is None or now is None else max(most - now + _read(f"{prefix}stat").get("inactive_file", 0), 0)


def needed(model: nn.Module, wide: torch.dtype | None = None, cached: int = 0) -> int:
    """Bytes of a model, possibly on meta, and `cached` more. wide: counts its largest module in this dtype, too (`models.widened`)."""
    weights = sum({id(p): p.nbytes for p in model.parameters()}.values())
    own = (m.parameters(recurse=False) for m in model.modules() if not isinstance(m, nn.Embedding))
    widened = 0 if wide is None else max(sum(p.numel() for p in params) for params in own) * wide.itemsize
    return int(SPARE * (weights + widened + cached)) + OVERHEAD


def refuse(holder: str, need: int, there: int) -> None:
    """Raise InvalidInput if `need` bytes are more than `there`."""
    if need > there:
        need_gib, there_gib = (f"{n / 2**30:.1f} GiB free" for n in (need, there))
        raise InvalidInput("memory", there_gib, f"{need_gib}, for {holder}; ask for fewer --layers, a smaller --model or smaller --points")
