"""`Setup`: the options of a run, as every suite receives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from attnops.errors import InvalidInput

SIZES = ("toy", "small", "quick", "full")
"""Of a run: CPU with --quick, CPU, GPU with --quick, GPU."""


class Point(NamedTuple):
    """The size of a decode step or prompt: requests, and tokens of each."""

    batch: int
    context: int

    def __str__(self) -> str:
        thousands = self.context >= 1024 and not self.context % 1024
        return f"{self.batch}x{f'{self.context // 1024}k' if thousands else self.context}"

    @classmethod
    def parse(cls, text: str) -> Point:
        """`8x1k` or `8x1024`. Raises InvalidInput."""
        batch, _, context = text.strip().lower().partition("x")
        digits = context.removesuffix("k")
        if not (batch.isascii() and batch.isdigit() and digits.isascii() and digits.isdigit() and int(batch) and int(digits)):
            raise InvalidInput("points", repr(text), "BATCHxCONTEXT, both at least 1, as 8x1k or 8x1024, with commas between them")
        return cls(int(batch), int(digits) * (1024 if context.endswith("k") else 1))


@dataclass(frozen=True)
class Setup:
    """The options of a run.

    Args:
        device: the device to measure.
        quick: fewer and smaller cases.
        model: a bundled shape or tiny model; "" takes the suite's.
        layers: layers of the models; 0 takes the suite's.
        points: sizes of steps; () takes the suite's.
        ways: implementations to measure; () takes the suite's.
        backend: of torch.compile. Any other than Inductor is for tests.
        ceilings: bandwidth and matmul rate of the device, see `attnops.tune.clock.ceilings`.
    """

    device: torch.device
    quick: bool = False
    model: str = ""
    layers: int = 0
    points: tuple[Point, ...] = ()
    ways: tuple[str, ...] = ()
    backend: str = "inductor"
    ceilings: Mapping[str, float] = field(default_factory=dict, hash=False)

    @property
    def on_gpu(self) -> bool:
        """True on CUDA."""
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
        """`function` through torch.compile with the run's backend. mode: Inductor's."""
        options: dict[str, Any] = {"mode": mode} if mode and self.backend == "inductor" else {}
        if self.backend != "inductor":
            more.pop("options", None)
        made: Callable[..., Any] = torch.compile(function, backend=self.backend, **options, **more)
        return made


def device_of(name: str) -> torch.device:
    """The device called `cpu` or `cuda`; "" is CUDA if available. Raises InvalidInput."""
    here = torch.cuda.is_available()
    if name not in ("", "cpu", "cuda") or (name == "cuda" and not here):
        raise InvalidInput("device", repr(name), "cpu or cuda" if here else "cpu: torch finds no CUDA device")
    cuda = name == "cuda" or (not name and here)
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
