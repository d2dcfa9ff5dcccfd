"""Warns of a model that could have had pages or CUDA graphs and does not get them
(`attnops.core.errors.NotFast`).

What the caller chose needs no warning: a cache of their own, beam search, hooks, `decode="hf"`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from attnops.core.errors import NotFast, warn_once


class Loss(NamedTuple):
    """What a model does not get. instead: the option of `patch` that asks for no more, "" without
    one."""

    what: str
    instead: str


PAGES = Loss("pages and no CUDA graphs", 'cache="hf"')
GRAPHS = Loss("CUDA graphs for its decode steps", 'decode="hf"')
COMPILED = Loss("compiled CUDA graphs for its decode steps", 'decode="breakable"')
CHOICE = Loss("CUDA graph for the choice of its tokens", "")


def warn(model: Any, loss: Loss, why: str, *, passing: bool = False) -> None:
    """Warn, once a process for each class of model and for what it does not get.

    Args:
        model: the transformers model.
        loss: PAGES, GRAPHS, COMPILED or CHOICE.
        why: the reason, with what would be wanted instead.
        passing: the next call tries again. A loss that stays has a warning of its own.
    """
    kind = type(model)
    text = f"attnops: generate() of {kind.__name__} has no {loss.what}: {why}."
    text += " Its results are right, and it is slower."
    if loss.instead:
        text += f" attnops.patch(model, {loss.instead}) asks for no more, and does not warn."
    lasts = "for a call" if passing else "until release()"
    warn_once(NotFast, f"{kind.__module__}.{kind.__qualname__}: {loss.what} {lasts}", text)
