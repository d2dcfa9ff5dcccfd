"""Steps and prompts over pages that are timed, and the kernels that move keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from attnops.core.problem import altered
from attnops.ops.pages.timed import FP8, PAGED
from attnops.ops.points import Filled, Points, Requests, Written
from attnops.ops.sweeps import GPT_OSS, decoding

STEP = decoding(PAGED)
SIZES = {"Hkv": 8, "D": 128, "Dv": 128}


@dataclass(frozen=True)
class Copied(Filled):
    """Slots of whole pages that go to each other's places, in all layers."""

    slots: int
    layers: int
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """As in the results."""
        return f"copy_kv of {self.layers} layers {self.slots}"

    def filled(self, pool: Any) -> tuple[dict[str, int], dict[str, Any]]:
        """All of them."""
        size = self.layers, -(-self.slots // 16), 16, SIZES["Hkv"], SIZES["D"]
        given = {name: pool.take(*size, dtype=torch.bfloat16) for name in ("k_pages", "v_pages")}
        order = torch.randperm(self.slots, generator=pool.generator, device=pool.device)
        return {}, {
            **given,
            "source": torch.arange(self.slots, device=pool.device),
            "target": order,
        }

    def moved(self, given: Mapping[str, Any], written: tuple[str, ...]) -> int:
        """Every slot is read and written."""
        return sum(2 * self.slots * given[n][:, 0, 0].nbytes for n in written)


POINTS: Points = {
    "paged_attention": {
        "kernels": (
            Requests(1, "decode", STEP, 8, 1, 4096),
            Requests(3, "extend", PAGED, 4, 256, 4096),
            Requests(5, "decode", altered(STEP, **FP8), 8, 1, 4096, "float8 pages"),
            Requests(6, "decode", altered(STEP, **GPT_OSS), 64, 1, 2048, "window and sinks"),
            Requests(7, "decode", STEP, 64, 1, 4096),
            Requests(8, "decode", STEP, 1, 1, 32768),
            Requests(14, "paged prefill", PAGED, 1, 8192, 8192),
        )
    },
    "write_kv": {
        "data": (
            *(Written(1, "write_kv", n, SIZES) for n in (64, 1, 512, 4096)),
            *(Written(1, "write_kv", n, SIZES, dtype="float8_e4m3fn") for n in (64, 4096)),
            Written(1, "write_kv", 4096, SIZES, dtype="int8"),
        )
    },
    "copy_kv": {
        "data": tuple(Copied(4, n, m) for n, m in ((64, 32), (8, 32), (256, 32), (2048, 8)))
    },
}
