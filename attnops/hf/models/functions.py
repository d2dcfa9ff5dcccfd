"""What functions that take the place of transformers' own share: whether an op serves a call, its
requests, and the numbers of a trial."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache

from attnops.core.private_torch import FakeTensor
from attnops.core.select import active_policy
from attnops.hf.models.chosen import Sizes, is_ours
from attnops.hf.models.states import Kept, OfStates
from attnops.ops import request_starts, token_rows

Function = Callable[..., Any]
Make = Callable[[Function, Any], Function]
"""Of transformers' function and of a layer's part of a step in a graph, or None outside of graphs:
what takes the place of the function. In a graph it serves every call, and it writes the states of
the step."""


def cache_among(given: Iterable[Any]) -> Any:
    """The cache among a module's arguments, or its part of a step; None without one."""
    return next((x for x in given if isinstance(x, (Cache, OfStates))), None)


class Texts(NamedTuple):
    """Texts that stand one after the other. starts: int32 `[N + 1]`. longest: tokens of one, at
    most."""

    starts: Tensor
    longest: int


TELL_OF_TEXTS = ("cu_seqlens", "cu_seq_lens_q", "seq_idx")
"""The arguments that say where texts begin."""


def texts_of(given: Mapping[str, Any], rows: int, tokens: int) -> Texts | None:
    """The texts in the rows of a call; None if each row is one text.

    given: arguments of the call. transformers hands them from the collator to every layer, and its
    own code reads none of them.
    """
    starts = given.get("cu_seqlens", given.get("cu_seq_lens_q"))
    if starts is None and (numbers := given.get("seq_idx")) is not None:
        starts = request_starts(F.pad(numbers[:, 1:] != numbers[:, :-1], (1, 0), value=True))
    if starts is None:
        return None
    longest = given.get("max_length_q")
    return Texts(starts.to(torch.int32), longest if isinstance(longest, int) else rows * tokens)


def is_served(
    op: str,
    x: Tensor,
    sizes: Sizes,
    asks: tuple[str, ...] = (),
    texts: Texts | None = None,
) -> bool:
    """Does an op answer the call? It does if texts share a row, or if its kernel is not torch's own
    code. x: a tensor of the call. sizes, asks: see `is_ours`."""
    if type(x) not in (Tensor, FakeTensor) or not x.numel():  # explain asks with fake ones
        return False
    if texts is not None:
        return True
    return bool(is_ours(op, active_policy(), x.device, x.dtype, None, sizes, asks))


def requests_of(
    view: Any, x: Tensor, rows: int, tokens: int, fresh: bool, texts: Texts | None = None
) -> dict[str, Any]:
    """Arguments of an op: the requests of a step in a graph, else texts, or rows of as many tokens.

    view: the layer's part of the step; None outside of graphs. x: a tensor of the call. fresh: have
    the rows no tokens before these?
    """
    if view is not None:
        batch = view.batch
        known = {"cu_seqlens_q": batch.cu_seqlens_q, "max_seqlen_q": batch.max_seqlen_q}
        return {**known, "fresh": view.fresh, "padded": False}
    if texts is not None:
        return {"cu_seqlens_q": texts.starts, "max_seqlen_q": texts.longest, "fresh": True}
    ends = (rows + 1) * tokens
    starts = torch.arange(0, ends, tokens, dtype=torch.int32, device=x.device)
    return {"cu_seqlens_q": starts, "max_seqlen_q": tokens, "fresh": fresh, "padded": False}


def kept_of(view: Any, conv: bool = False) -> dict[str, Any]:
    """Arguments of an op for tokens that may be taken back; {} where none may be. view: as
    `requests_of` has it. conv: is it the convolution?"""
    if view is None or view.states.kept is None:
        return {}
    kept: Kept = view.states.kept
    return kept.of_conv() if conv else kept.of_op()


def count_of(rows: int, texts: Texts | None) -> int:
    """The states of a call without any."""
    return rows if texts is None else texts.starts.shape[0] - 1


def state_of(view: Any, initial: Tensor | None, x: Tensor, *shape: int) -> Tensor:
    """The float32 states that an op changes: those of a step in a graph, copies of the initial
    ones, or new ones of this shape, to be filled. x: a tensor of the call."""
    if view is not None:
        states: Tensor = view.states.state
        return states
    if initial is None:
        return x.new_empty(shape, dtype=torch.float32)
    return initial.to(torch.float32, copy=True)


def last_of_rows(state: Tensor, rows: int, tokens: int, texts: Texts | None) -> Tensor:
    """The states after the last token of each row, as transformers' cache keeps them.

    state: those of all texts; of rows where texts is None.
    """
    if texts is None:
        return state
    return state[token_rows(texts.starts, rows * tokens)[tokens - 1 :: tokens]]


def numbers(*shape: int) -> Tensor:
    """Some numbers from -1 to 1, always the same."""
    count = torch.Size(shape).numel()
    return torch.sin(torch.arange(1.0, count + 1).square() * 0.37).view(shape)
