"""Random inputs that cost no time to make: views of one buffer."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnops.core.arguments import QUANTISED
from attnops.ops.case_data import OnDevice


class Pool(OnDevice):
    """Random numbers on a device, dealt out as tensors that do not overlap until `reset`. One
    buffer a dtype, which grows."""

    def __init__(self, device: torch.device | str, seed: int = 0) -> None:
        super().__init__(device)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self._buffers: dict[torch.dtype, Tensor] = {}
        self._used: dict[torch.dtype, int] = {}

    def reset(self) -> None:
        """Allow all memory to be dealt out again."""
        self._used.clear()

    def drop(self) -> None:
        """Free the memory."""
        self._buffers.clear()
        self.reset()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def reserve(self, dtype: torch.dtype, numbers: int) -> None:
        """Allocate at least `numbers` of `dtype`. Tensors dealt out before keep their memory,
        outside of the pool."""
        have = self._buffers.get(dtype)
        if have is None or have.numel() < numbers:
            self._buffers.pop(dtype, None)
            self._buffers[dtype] = self._random(numbers, dtype)

    def take(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A contiguous tensor of normal numbers."""
        size, start = math.prod(shape), self._used.get(dtype, 0)
        self._used[dtype] = start + -(-size // 256) * 256
        self.reserve(dtype, self._used[dtype])
        return self._buffers[dtype][start : start + size].view(shape)

    def _random(self, numbers: int, dtype: torch.dtype) -> Tensor:
        out = torch.empty(numbers, dtype=dtype, device=self.device)
        for part in out.split(1 << 28):
            if dtype in QUANTISED:
                part.copy_(
                    torch.randn(part.shape, generator=self.generator, device=self.device).mul_(2.0)
                )
            else:
                part.normal_(generator=self.generator)
        return out
