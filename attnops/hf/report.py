"""The report of a patched transformers model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from attnops.adapters import report


@dataclass(frozen=True)
class Took:
    """How a `generate()` of a patched model ran.

    cache: "paged", or "hf" for transformers' own or the caller's.
    decode: "piecewise" or "breakable", the graphs of its last step; "hf" without graphs.
    why: the reason why it had no pages or no graphs, "" where it had both or the options ask for neither.
    loop: the reason why no graph chose the tokens of the steps in graphs, "" where one did.
    """

    cache: str
    decode: str
    why: str = ""
    loop: str = ""

    def __str__(self) -> str:
        loop = f"; tokens chosen without a graph: {self.loop}" if self.loop else ""
        return f"cache={self.cache}, decode={self.decode}" + (f": {self.why}" if self.why else "") + loop


@dataclass(frozen=True)
class Report(report.Report):
    """Every attention module of a model with its status, the options in force, and notes for the user."""

    implementation: str = ""
    mask: str = "auto"
    cache: str = "hf"

    def _options(self) -> str:
        return f"{super()._options()}, mask={self.mask}, cache={self.cache}"


def switch(configs: Iterable[Any], name: str) -> None:
    """Let models of these configs attend by the implementation of this name."""
    for config in configs:
        config._attn_implementation_internal = name


@contextmanager
def evaluating(model: nn.Module, configs: Iterable[Any] = ()) -> Iterator[None]:
    """Within the block the model is in eval mode. The mode of each module and the attention of the configs are restored."""
    modes = [(module, module.training) for module in model.modules()]
    before = [(config, config._attn_implementation_internal) for config in configs]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        for config, name in before:
            switch((config,), name)
