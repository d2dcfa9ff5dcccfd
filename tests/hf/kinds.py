"""What tests of pages share: models whose pages hold keys and values or latents, and how their
layers attended."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.hf.helpers import LATENT, counted, over_pages


def both(name: str) -> pytest.MarkDecorator:
    """A model of ordinary attention, and one whose pages hold latents."""
    return pytest.mark.parametrize("name", [name, "deepseek_v3"])


class Calls:
    """Counts of the calls of layers.

    later: over pages. first: to the tokens of a prompt alone. beside: to copies of a window.
    """

    def __init__(self, found: dict[str, int]) -> None:
        self._found = found

    def _sum(self, *names: str) -> int:
        return sum(self._found.get(name, 0) for name in names)

    @property
    def later(self) -> int:
        return self._sum("paged", "absorbed")

    @property
    def first(self) -> int:
        return self._sum("alone", "expanded")

    @property
    def beside(self) -> int:
        return self._sum("beside")


@contextmanager
def attending(name: str) -> Iterator[Calls]:
    """Within the block: the calls of the layers of this model."""
    with counted() if name in LATENT else over_pages() as found:
        yield Calls(found)


def pages_of(cache: Any, layer: int = 0) -> tuple[torch.Tensor, ...]:
    """The pages of a layer: of keys and values, or of latents alone."""
    pages = cache.pages_of(layer)
    return pages if isinstance(pages, tuple) else (pages,)


def everything(model: Any) -> dict[str, Any]:
    """What a module tree holds besides weights: attributes, hooks, classes, the attention of
    configs."""
    found = {}
    for path, m in model.named_modules():
        hooks = len(m._forward_hooks), len(m._forward_pre_hooks)
        attention = getattr(getattr(m, "config", None), "_attn_implementation", None)
        found[path] = set(vars(m)), hooks, type(m), attention
    return found
