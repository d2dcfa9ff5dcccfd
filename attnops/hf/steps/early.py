"""A prompt that graphs have starts on a stream of its own, while transformers prepares its call of
the model.

What the model will be called with is guessed, from the arguments of `generate()` and from a call
like it, and so is that the model is as it was, but for its weights. The model's call looks at the
model, finds its graphs and packs its tokens as ever. It takes the logits where graphs and tokens
are those that ran, and else runs the prompt again over the same pages.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig

from attnops.graphs.streams import LastStream
from attnops.hf.cache.idle_pages import Pool, give_back
from attnops.hf.cache.model_pages import ModelPages
from attnops.hf.cache.names import named
from attnops.hf.cache.page_sizes import Sizes
from attnops.hf.cache.paged_cache import PagedModelCache
from attnops.hf.generation import on_host, running_generation
from attnops.hf.steps.captures import Over, remember
from attnops.hf.steps.chunks import Part

if TYPE_CHECKING:
    from attnops.hf.steps.decode import Decoder
    from attnops.hf.steps.model_state import Glance

MISSES = 2
"""Prompts of one kind of call that started early in vain, one after the other. Later ones do not
start early."""

_IDS = ("inputs", "input_ids")
_PLAIN = (bool, int, float, str, type(None))


class Asked(NamedTuple):
    """A call of `generate()`.

    kind: its arguments but for tokens and mask, as far as calls of one kind tend to ask for the
    same. ids: int64 `[B, S]`. mask: `[B, S]`, or None.
    """

    kind: Hashable
    ids: Tensor
    mask: Tensor | None


class Room(NamedTuple):
    """Of a kind of call: the positions of its pages beyond the prompt, and `Sizes.drafts`."""

    beyond: int
    drafts: int


@dataclass(eq=False)
class Early:
    """A prompt that was started.

    cache: new, and for this call alone. It does not count the tokens as seen.
    stream: of its pages. parts, over: the chunks, and the graphs that have them.
    tokens: of `unpadded`. logits: of each chunk.
    waits: has the call yet to ask for the cache? right: has the model taken the logits? None: it
        was not asked to.
    """

    cache: PagedModelCache
    stream: LastStream
    parts: list[Part]
    over: list[Over | None]
    tokens: Tensor
    logits: list[Tensor]
    waits: bool = True
    right: bool | None = None

    def lend(self, sizes: Sizes) -> PagedModelCache | None:
        """The cache, for a call with pages of these sizes. None where it does not fit: its pages
        are idle then."""
        if not self.waits:
            return None
        own = self.cache.state.pages.sizes
        roomy = own.rows >= sizes.rows and own.length >= sizes.length
        if not roomy or own[2:] != sizes[2:]:
            self.end()
            return None
        self.waits = False
        return self.cache

    def follow(self) -> None:
        """Let work to come on the current stream follow it, and read its logits."""
        self.stream.use()
        self.stream.reads(*self.logits)

    def end(self) -> None:
        """Let work to come follow it. Its pages go back where the call has not got them."""
        self.cache.state.follow_early()
        if self.waits:
            self.waits = False
            give_back(self.cache)

    def ran(self, parts: list[Part], over: Sequence[Over | None], tokens: Tensor) -> bool:
        """Did it run these chunks through these graphs? The host waits for the tokens alone."""
        same = parts == self.parts and all(a is b for a, b in zip(over, self.over, strict=True))
        self.right = same and torch.equal(tokens, self.tokens)
        return self.right


class EarlyPrompts:
    """What is known of the calls of one model.

    count: prompts that started early and whose logits were taken.
    """

    def __init__(self) -> None:
        self.count = 0
        self._rooms: dict[Hashable, Room] = {}
        self._misses: dict[Hashable, int] = {}
        self._why = ""  # of the last miss
        self._believes = True

    def forget(self) -> None:
        """Forget the calls so far: prompts of every kind may start early again."""
        self._rooms.clear()
        self._misses.clear()
        self._believes = True

    def notes(self) -> tuple[str, ...]:
        """How many kinds of call no longer start their prompts early, for the report."""
        kinds = sum(misses >= MISSES for misses in self._misses.values())
        if not kinds:
            return ()
        what = f"kinds of generate() whose prompts no longer start early, until release(): {kinds}"
        return (f"{what}; {MISSES} in a row started in vain, the last of all for {self._why}",)

    def room(self, asked: Asked) -> Room | None:
        """That of the last such call; None where a prompt of its kind is not to start early."""
        if self._misses.get(asked.kind, 0) >= MISSES:
            return None
        return self._rooms.get(asked.kind)

    def learn(self, asked: Asked, sizes: Sizes) -> None:
        """Note the pages of a call whose prompt ran in graphs."""
        room = Room(sizes.length - asked.ids.shape[1], sizes.drafts)
        remember(self._rooms, asked.kind, room)

    def believed(self, glance: Glance | None) -> Glance | None:
        """A glance at the model by which a prompt starts where all tensors are in place. None where
        the model is looked at in full first, as after a prompt in vain: a caller may switch its
        adapters at every call."""
        return glance if self._believes and glance is not None and glance.in_place() else None

    def ended(self, asked: Asked, early: Early) -> None:
        """Note whether a prompt that started early was the right one."""
        if early.right:
            self.count += 1
            remember(self._misses, asked.kind, 0)
        elif early.right is None:
            self.missed(asked, "a call whose prompt the model's own layers ran")
        else:
            self._believes = False
            self.missed(asked, "a call of the model with other tokens, or of a model that changed")

    def missed(self, asked: Asked, why: str) -> None:
        """Note that a prompt started in vain."""
        self._why = why
        remember(self._misses, asked.kind, self._misses.get(asked.kind, 0) + 1)


def asked_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Asked | None:
    """None for a call whose prompt cannot be told from its arguments, and for a loop of the
    caller's own, which may write the weights first."""
    given = dict(kwargs)
    found = [args[0]] if args else []
    found += [given.pop(name) for name in _IDS if given.get(name) is not None]
    mask = given.pop("attention_mask", None)
    own = given.get("custom_generate") is not None
    if own or len(found) != 1 or not _is_prompt(found[0], mask):
        return None
    [ids] = found
    more = (*args[1:], *given.values())
    if any(isinstance(value, Tensor) for value in more):
        return None
    kind = ids.shape[0], mask is None, tuple(given), tuple(map(_shown, more))
    return Asked(kind, ids, mask)


def _is_prompt(ids: Any, mask: Any) -> bool:
    """Are these the tokens of a batch, and their mask or None?"""
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype != torch.int64 or not ids.numel():
        return False
    return mask is None or (isinstance(mask, Tensor) and mask.shape == ids.shape)


def _shown(value: Any) -> Any:
    """A plain value itself, the fields of a config, or the name of another object's class."""
    if isinstance(value, GenerationConfig):
        return tuple(map(_shown, vars(value).values()))
    return value if type(value) in _PLAIN else type(value).__name__


def started(decoder: Decoder, asked: Asked, cache: PagedModelCache) -> Early | None:
    """Start a prompt over a new cache. None where graphs do not have all of it, and where another
    thread has its turn."""
    given = {
        "input_ids": asked.ids,
        "attention_mask": asked.mask,
        "position_ids": _positions(asked.mask),
        "logits_to_keep": 1,
        **named(cache),
    }
    if not decoder.turn.acquire(blocking=False):
        return None
    try:
        graphs = decoder.graphs_of_prompt(given)
        return None if graphs is None else decoder.prompts.early(given, *graphs)
    finally:
        decoder.turn.release()


def _positions(mask: Tensor | None) -> Tensor | None:
    """As `generate()` makes them of a mask; None where no row has padding."""
    if mask is None or on_host(mask).all():
        return None
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def lent(
    sizes: Sizes, pool: Pool, over: Callable[[ModelPages], PagedModelCache]
) -> PagedModelCache:
    """A cache for the `generate()` that runs, of these sizes at least: that over which its prompt
    started, where it fits, else one of the pool. Arguments and errors as of `Pool.lend`."""
    running = running_generation()
    if running is None:
        return pool.lend(over, sizes)
    running.asked = sizes
    early: Early | None = running.early
    cache = None if early is None else early.lend(sizes)
    return pool.lend(over, sizes) if cache is None else cache
