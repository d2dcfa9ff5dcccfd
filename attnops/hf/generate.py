"""`generate()` of a patched transformers model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from attnops.adapters.handle import MARK
from attnops.core.errors import one_line
from attnops.hf import not_fast
from attnops.hf.cache import names as cache_names
from attnops.hf.cache.idle_pages import give_back
from attnops.hf.generation import Generation, growing
from attnops.hf.models.methods import Method
from attnops.hf.page_model import PagedMode
from attnops.hf.steps.early import Asked, Early, Room, asked_of, started
from attnops.hf.steps.eligibility import is_stock, several_processes
from attnops.hf.steps.speculate import reads_states

if TYPE_CHECKING:
    from attnops.hf.patching import Patched

NO_CACHE = "generate() made no cache for this model"


def generate(method: Method, *args: Any, **kwargs: Any) -> Any:
    """`generate()` of a patched model: the model's own, with the promise that masks only grow (see
    attnops.hf.generation)."""
    handle: Patched = method.owner.__dict__[MARK]
    kwargs = cache_names.renamed(kwargs)
    handle._settle()
    handle._tell()
    paged = handle._paged
    with growing(method.owner) as generation, _early(paged, generation, args, kwargs):
        generation.custom = kwargs.get("custom_generate") is not None
        result: Any = None
        chosen = paged is not None and paged.chosen
        try:
            if paged is not None and paged.decode.mode != "hf":
                owner, anew = method.owner, paged.begin_anew
                kwargs = paged.loop.kwargs(paged.decoder, anew, owner, args, kwargs)
            result = method.original(*args, **kwargs)
            if chosen and generation.why is None and not generation.custom:
                not_fast.warn(method.owner, not_fast.PAGES, NO_CACHE)
            return result
        except torch.OutOfMemoryError:
            handle.release()  # for the next try
            raise
        finally:
            if paged is not None:
                paged.loop.end(generation)
                _take_back(paged, generation, result)
            rounds = generation.rounds
            if handle.decode.speculate is not None and not rounds:
                rounds = "nothing was drafted: its loop or its cache is transformers' own"
            took, worth = handle._taken(generation), generation.tokens_a_round
            handle._took = replace(took, rounds=rounds, tokens_a_round=worth)


@contextmanager
def _early(
    paged: PagedMode | None,
    generation: Generation,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Iterator[None]:
    """Within the block of a call its prompt runs already, where a call like it ran its prompt in
    graphs. Not in a generate() of the caller's own, which may write the weights first; and not of
    several processes, where collectives of a prompt in vain would meet those of another step."""
    follows = is_stock(generation.owner, "generate") and not several_processes()
    asked = asked_of(args, kwargs) if follows else None
    # A prompt that starts early keeps no hidden states, and a draft head reads them.
    if paged is None or asked is None or reads_states(paged.loop.head, generation, args, kwargs):
        yield
        return
    room = paged.early.room(asked)
    if room is not None:
        _start(paged, generation, asked, room)
    yield  # an error, after which nothing is noted, may come before the prompt
    if generation.early is not None:
        paged.early.ended(asked, generation.early)
    if generation.asked is not None and generation.layers == "captured":
        paged.early.learn(asked, generation.asked)


def _start(paged: PagedMode, generation: Generation, asked: Asked, room: Room) -> None:
    """Start the prompt of a call over pages of its own."""
    rows, columns = asked.ids.shape
    try:
        with torch.no_grad():
            generation.looked = paged.early.believed(paged.decoder().glance)
            cache = paged.lend_early(rows, columns + room.beyond, room.drafts)
            generation.early = cache.state.early = started(paged.decoder(), asked, cache)
    except Exception as error:  # the call itself raises it, or is the slower one
        paged.early.missed(asked, one_line(error))
    generation.looked = None  # the call looks at all of the model


def _take_back(paged: PagedMode, generation: Generation, result: Any) -> None:
    """Take the pages of a call back, but for those that the caller keeps with its result."""
    early: Early | None = generation.early
    if early is not None:
        early.end()
    for cache in generation.lent:
        if cache_names.cache_of(result) is not cache:
            give_back(cache)
        elif paged.chosen:
            setattr(result, cache_names.NAME, paged.unpaged(cache))
    paged.pool.trim()
