"""Hidden states of a model, which leave its steps and prompts beside the logits, for a draft head
that reads them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnops.hf.cache.model_pages import ModelPages

Modules = Callable[[], Sequence[nn.Module]]
"""Those of a model that a draft head reads, as the model is now."""


class Outputs(NamedTuple):
    """Of a step or of a chunk of a prompt.

    logits: `[B, N, V]`. hidden: `[B, N, W]`, or `[1, T, W]` of packed tokens, what `reading` has
    found; else None.
    """

    logits: Tensor
    hidden: Tensor | None = None

    def copied(self) -> Outputs:
        """The same numbers in memory that no graph writes."""
        return Outputs(self.logits.clone(), None if self.hidden is None else self.hidden.clone())


class Read(NamedTuple):
    """The hidden states of some tokens of a prompt, packed one request after the other.

    counts: int64 `[B]`, tokens of each request. before: int64 `[B]`, those before them in its
    pages; negative where the first ones are padding. hidden: `[T, W]`.
    """

    counts: Tensor
    before: Tensor
    hidden: Tensor


def outputs_of(out: Any) -> Outputs:
    """Of what a model's forward returns."""
    hidden = out.hidden_states
    return Outputs(out.logits, hidden if isinstance(hidden, Tensor) else None)


def reading(
    forward: Callable[..., Any], modules_of: Modules | None, turn: AbstractContextManager[Any]
) -> Callable[..., Any]:
    """The forward of a model whose result has the outputs of these modules as `hidden_states`,
    `[B, S, W]`, beside each other. None: nothing reads them, and it is `forward` itself.

    turn: a thread's, to look at the model and to change its attributes.
    """
    if modules_of is None:
        return forward

    def read(*args: Any, **kwargs: Any) -> Any:
        modules = modules_of()
        with turn, _heard(modules) as found:
            out = forward(*args, **kwargs)
        out.hidden_states = torch.cat([found[module] for module in modules], dim=-1)
        return out

    return read


def noting(forward: Callable[..., Any], pages: ModelPages, into: list[Read]) -> Callable[..., Any]:
    """A `reading` forward, for a prompt or a part of it over these pages. `into` gets what it has
    read, and the result does not have it."""

    def noted(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        hidden, out.hidden_states = out.hidden_states, None
        rows, columns, width = hidden.shape
        counts = pages.seen.new_full((rows,), columns)
        before = pages.seen - columns - pages.pad[:rows]
        into.append(Read(counts, before, hidden.reshape(-1, width)))
        return out

    return noted


@contextmanager
def _heard(modules: Sequence[nn.Module]) -> Iterator[dict[nn.Module, Tensor]]:
    """What the modules return to this thread within the block, by module."""
    found = dict[nn.Module, Tensor]()
    thread = threading.get_ident()
    own = {module: vars(module).get("forward") for module in modules}

    def heard(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        if threading.get_ident() == thread:
            found[module] = out[0] if isinstance(out, tuple) else out
        return out

    try:
        # Attributes of the instances and not hooks: hooks keep a model out of graphs.
        for module in own:
            vars(module)["forward"] = partial(heard, module, module.forward)
        yield found
    finally:
        for module, forward in own.items():
            vars(module).pop("forward", None)
            if forward is not None:
                vars(module)["forward"] = forward
