"""`attnops bench`: suites that measure attnops beside its alternatives, in one run. Rows of all
suites are dicts, see `rows.Row`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from attnops.core.errors import InvalidInput

LONG = 16384
"""Tokens of a request of the points that are `Point.long`."""


class Point(NamedTuple):
    """The size of a decode step or prompt: requests, and tokens of each."""

    batch: int
    context: int

    def __str__(self) -> str:
        thousands = self.context >= 1024 and not self.context % 1024
        return f"{self.batch}x{f'{self.context // 1024}k' if thousands else self.context}"

    @property
    def long(self) -> bool:
        """Has a request so many tokens that ways are measured one after the other, each with all of
        the memory, and after random caches?"""
        return self.context >= LONG

    @classmethod
    def parse(cls, text: str) -> Point:
        """`8x1k` or `8x1024`. Raises InvalidInput."""
        found = re.fullmatch(r"(\d+)x(\d+)(k?)", text.strip().lower(), re.ASCII)
        batch, context = (
            (int(found[1]), int(found[2]) * (1024 if found[3] else 1)) if found else (0, 0)
        )
        if not batch or not context:
            raise InvalidInput(
                "points",
                repr(text),
                "BATCHxCONTEXT, both at least 1, as 8x1k or 8x1024, with commas between them",
            )
        return cls(batch, context)


CEILINGS = {
    "of_bandwidth": "bandwidth_tb_s",
    "of_flops": "matmul_tflop_s",
    "of_matmul": "matmul_tflop_s",
}
"""By figure of a row, the ceiling that it is a share of."""


@dataclass(frozen=True)
class Setup:
    """The options of a run.

    backend: of torch.compile; any other than Inductor is for tests. ceilings: of
    `attnops.tune.clock.ceilings`. engines: names of other engines, each with the Python of its
    environment.
    """

    device: torch.device
    quick: bool = False
    model: str = ""
    layers: int = 0
    points: tuple[Point, ...] = ()
    ways: tuple[str, ...] = ()
    engines: tuple[tuple[str, str], ...] = ()
    backend: str = "inductor"
    ceilings: Mapping[str, float] = field(default_factory=dict, hash=False)

    @property
    def on_gpu(self) -> bool:
        """True on CUDA."""
        return self.device.type == "cuda"

    @property
    def size(self) -> str:
        """`full` on a GPU and `small` on a CPU, with `quick` "quick" and "toy": suites choose their
        cases by it."""
        return (
            ("quick" if self.quick else "full")
            if self.on_gpu
            else ("toy" if self.quick else "small")
        )

    @property
    def dtype(self) -> torch.dtype:
        """Of models and inputs: bfloat16 on GPUs, float32 on CPUs."""
        return torch.bfloat16 if self.on_gpu else torch.float32

    def shares(self, us: float, **work: float) -> dict[str, float]:
        """By figure the bytes or operations that are done in `us`, 0 where unknown, as a share of
        the ceiling measured in this run."""
        return {
            figure: round(done / us / 1e6 / ceiling, 4)
            for figure, done in work.items()
            if done and (ceiling := self.ceilings.get(CEILINGS[figure]))
        }

    def compiled(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """`function` through torch.compile with the run's backend. options: of torch.compile;
        Inductor's go to Inductor alone."""
        inductor = self.backend == "inductor"
        given = {
            name: value
            for name, value in options.items()
            if inductor or name not in ("mode", "options")
        }
        made: Callable[..., Any] = torch.compile(function, backend=self.backend, **given)
        return made


def device_of(name: str) -> torch.device:
    """The device called `cpu` or `cuda`; "" is CUDA if available. Raises InvalidInput."""
    here = torch.cuda.is_available()
    if name not in ("", "cpu", "cuda") or (name == "cuda" and not here):
        raise InvalidInput(
            "device", repr(name), "cpu or cuda" if here else "cpu: torch finds no CUDA device"
        )
    return (
        torch.device("cuda", torch.cuda.current_device())
        if here and name != "cpu"
        else torch.device("cpu")
    )
