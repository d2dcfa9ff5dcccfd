"""`Setup`: what a run of suites was asked for. A suite is a function of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from attnops.errors import InvalidInput

SIZES = ("toy", "small", "quick", "full")
"""A CPU in a hurry, a CPU, a GPU in a hurry, a GPU."""


class Point(NamedTuple):
    """A size of a step: requests, and tokens of each that are there before."""

    batch: int
    context: int

    def __str__(self) -> str:
        thousands = self.context >= 1024 and not self.context % 1024
        return f"{self.batch}x{f'{self.context // 1024}k' if thousands else self.context}"

    @classmethod
    def parse(cls, text: str) -> Point:
        """`8x1k` or `8x1024`. Raises InvalidInput."""
        batch, _, context = text.strip().lower().partition("x")
        scale = 1024 if context.endswith("k") else 1
        digits = context.removesuffix("k")
        if not (batch.isascii() and batch.isdigit() and digits.isascii() and digits.isdigit() and int(batch) and int(digits)):
            raise InvalidInput("points", repr(text), "BATCHxCONTEXT, both at least 1, as 8x1k or 8x1024, with commas between them")
        return cls(int(batch), int(digits) * scale)


def _silent(what: str) -> None: ...


@dataclass(frozen=True)
class Setup:
    """What a suite measures, and how long it may take.

    device: where. quick: smaller sizes, fewer cases. model: a bundled shape or tiny model, "" for those of the suite. layers: of the
    models, 0 for as many as the suite takes. points: sizes of steps, ways: of doing them, () for those of the suite. until_s: of
    `time.monotonic`, when no further case is begun. tell: is told what is being measured. backend: of torch.compile; another than
    Inductor measures nothing of use. ceilings: as `attnops.bench.ceilings.measure` found them.
    """

    device: torch.device
    quick: bool = False
    model: str = ""
    layers: int = 0
    points: tuple[Point, ...] = ()
    ways: tuple[str, ...] = ()
    until_s: float = float("inf")
    backend: str = "inductor"
    ceilings: Mapping[str, float] = field(default_factory=dict)
    tell: Callable[[str], None] = field(default=_silent, compare=False)

    @property
    def on_gpu(self) -> bool:
        """Is it a CUDA device?"""
        return self.device.type == "cuda"

    @property
    def size(self) -> str:
        """One of SIZES, by which suites choose their cases."""
        return ("quick" if self.quick else "full") if self.on_gpu else ("toy" if self.quick else "small")

    @property
    def dtype(self) -> torch.dtype:
        """Of models and inputs: bfloat16 on GPUs, float32 on CPUs."""
        return torch.bfloat16 if self.on_gpu else torch.float32

    def compiled(self, function: Callable[..., Any], *, mode: str = "", **more: Any) -> Callable[..., Any]:
        """`function` through torch.compile with the backend of the run. mode: of Inductor."""
        options: dict[str, Any] = {"mode": mode} if mode and self.backend == "inductor" else {}
        if self.backend != "inductor":
            more.pop("options", None)
        made: Callable[..., Any] = torch.compile(function, backend=self.backend, **options, **more)
        return made

    @property
    def late(self) -> bool:
        """Is the time spent?"""
        return time.monotonic() > self.until_s


def device_of(name: str) -> torch.device:
    """The device of `cpu`, `cuda` or "", which is CUDA where there is one. Raises InvalidInput."""
    here = torch.cuda.is_available()
    if name not in ("", "cpu", "cuda") or (name == "cuda" and not here):
        raise InvalidInput("device", repr(name), "cpu or cuda" if here else "cpu: torch finds no CUDA device")
    kind = name or ("cuda" if here else "cpu")
    return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
