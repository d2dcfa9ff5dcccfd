"""The op that reads tables of pages. `named_pages` is not timed so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attnops.ops.points import Filled, Points


@dataclass(frozen=True)
class Table(Filled):
    """64 requests of up to 512 pages."""

    name: str
    dtype: str = "int32"

    def filled(self, pool: Any) -> tuple[dict[str, int], dict[str, Any]]:
        """All of them."""
        table = (
            torch.randperm(64 * 512, generator=pool.generator, device=pool.device)
            .to(torch.int32)
            .view(64, 512)
        )
        return {}, {
            "page_table": table,
            "seq_lens": pool.ints([i * 7919 % 8192 for i in range(64)]),
            "page_size": 16,
        }

    def used(self, results: list[torch.Tensor]) -> list[torch.Tensor]:
        """As many ids as there are pages."""
        ends, ids, last = results
        return [ends, ids[: int(ends[-1])], last]


POINTS: Points = {"kv_indices": {"data": (Table(5, "kv_indices 64"),)}, "named_pages": {"data": ()}}
