"""torch's product alone, without what is around it: it has another result, which is not
compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch


def product(c: Any, compiler: Callable[..., Any]) -> Callable[[], Any]:
    """The product of a call's input with its weight."""
    return partial(torch.nn.functional.linear, c.x, c.weight)


VENDORS: dict[str, Mapping[str, Callable[[Any, Callable[..., Any]], Callable[[], Any]]]] = {
    "linear": {"product": product}
}
