"""A decode step as a call: which calls of a model are one, and what it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from attnops.cache.paged import ordinary
from attnops.core.errors import InvalidInput, fail
from attnops.core.private_torch import count_function_modes
from attnops.core.record import name, need
from attnops.graphs import stale
from attnops.hf import not_fast
from attnops.hf.attention.descriptor import tracing
from attnops.hf.cache import names as cache_names
from attnops.hf.cache.paged_cache import PagedModelCache, State
from attnops.hf.steps.around import function_modes
from attnops.hf.steps.compiled_layers import place, run_model, starts, verifying
from attnops.hf.steps.hidden import Outputs

Kind = Literal["one row", "more rows", "prompt"]

# Of a config: further results of every call.
_FURTHER = ("output_hidden_states", "output_attentions")


class Nodes(int):
    """The tokens of a row in a step that verifies them as the nodes of a tree."""


class StepInputs(NamedTuple):
    """What a step is called with.

    input_ids, position_ids: int64 `[B, N]`.
    lengths: of a step that verifies drafts, int64 `[B]`: the tokens that each row has in its pages.
    Rows keep different numbers of drafts. None: one token a row, behind those that the cache
    counts.
    parents: int32 `[B, N]`, as in `tree_mask`: each token sees the row's tokens in its pages, its
    ancestors and itself. None: tokens see those before them.
    """

    input_ids: Tensor
    position_ids: Tensor | None
    lengths: Tensor | None = None
    parents: Tensor | None = None

    @property
    def rows(self) -> int:
        return self.input_ids.shape[0]

    @property
    def queries(self) -> int:
        """Tokens of a row in a step that verifies, `Nodes` of a tree; 0 for one that does not."""
        if self.lengths is None:
            return 0
        count = self.input_ids.shape[1]
        return count if self.parents is None else Nodes(count)

    def arguments(self, live: Tensor) -> dict[str, Tensor]:
        """Those of `step_of`, or of `verifying`. live: `[B]`."""
        assert self.position_ids is not None
        if self.lengths is None:
            return {"input_ids": self.input_ids, "position_ids": self.position_ids, "live": live}
        tree = {} if self.parents is None else {"parents": self.parents.reshape(-1)}
        return {
            "tokens": self.input_ids.reshape(-1),
            "positions": self.position_ids.reshape(-1),
            "lengths": self.lengths,
            "live": live,
            **tree,
        }


# Arguments of generate() at a step of one token. Masks are known, the last four have one meaning
# for one token, and tokenizers are for stopping criteria, though transformers hands them on to the
# model.
KNOWN = (
    "input_ids",
    "position_ids",
    cache_names.NAME,
    "attention_mask",
    "tokenizer",
    "assistant_tokenizer",
    "use_cache",
    "return_dict",
    "logits_to_keep",
    "cache_position",
)


def state_of(cache: Any) -> State:
    if not isinstance(cache, PagedModelCache):
        fail(InvalidInput, cache_names.NAME, type(cache).__name__, "a cache of Patched.new_cache")
    return cache.state


def modes_now() -> tuple[Any, ...]:
    """What is looked at before every step. No name of a function mode: there is none in nearly
    every call."""
    return (*stale.in_force(), function_modes() if count_function_modes() else ())


def positions(state: State, rows: int) -> Tensor:
    """`[B, 1]`, of the next token of each row."""
    state.pages.use()
    with torch.no_grad(), ordinary():
        found: Tensor = (state.pages.seen - state.pages.pad[:rows])[:, None]
    return found


def is_prompt(given: dict[str, Any], least: int) -> bool:
    """Are these arguments of a model at least so many tokens of each row, for a cache of ours, and
    no gradient?"""
    ids = given.get("input_ids")
    tokens = (
        isinstance(ids, Tensor)
        and ids.dim() == 2
        and ids.dtype == torch.int64
        and ids.shape[1] >= least
        and not tracing(ids)
    )
    return (
        tokens
        and not torch.is_grad_enabled()
        and isinstance(cache_names.cache_in(given), PagedModelCache)
    )


def kind_of(rows: int) -> Kind:
    return "one row" if rows == 1 else "more rows"


def could_serve(given: dict[str, Any], cache: Any) -> bool:
    """Is this call of the model one token more for the rows of its cache?"""
    one = is_one_token(given.get("input_ids"))
    return one and isinstance(cache, PagedModelCache) and cache.state.filled


def serves(given: dict[str, Any], cache: Any) -> bool:
    """Could a graph serve this call, and does the call ask for logits only?"""
    if not could_serve(given, cache) or not cache.state.whole:
        return False
    ids = given["input_ids"]
    return (
        ids.dtype == torch.int64
        and are_positions(given.get("position_ids"), ids)
        and not more(given)
    )


def more(given: dict[str, Any]) -> list[str]:
    """The names of those arguments of the model by which it may return more than logits, or other
    ones."""
    return [name for name, value in given.items() if name not in KNOWN and not is_nothing(value)]


def against_result(given: dict[str, Any], config: Any) -> Iterator[str]:
    """Each reason, in the result that a prompt of a model with this config asks for, to run the
    model's own layers."""
    if given.get("logits_to_keep") != 1:
        yield "more than the last logits are asked for"
    if given.get("return_dict") is False or given.get("use_cache") is False:
        yield "it asks for another form of result"
    if any(getattr(config, name, None) for name in _FURTHER):
        yield "the model's config asks for more than logits"


def state_of_step(input_ids: Tensor, cache: PagedModelCache, position_ids: Tensor | None) -> State:
    """The state of the cache that a step is asked for with. Raises InvalidInput where it cannot be
    one."""
    state, most = state_of(cache), cache.max_batch
    if (
        not is_one_token(input_ids)
        or not 1 <= input_ids.shape[0] <= most
        or input_ids.dtype != torch.int64
    ):
        fail(
            InvalidInput,
            "input_ids",
            shown(input_ids),
            f"int64 [B, 1] with B of at most {most}, the rows of the cache",
        )
    if not are_positions(position_ids, input_ids):
        fail(
            InvalidInput,
            "position_ids",
            shown(position_ids),
            f"int64 [{input_ids.shape[0]}, 1], or None",
        )
    need(
        state.whole,
        cache_names.NAME,
        "empty or half written",
        "a cache with a prompt in it, whose last step was whole",
    )
    return state


def warn_of(model: Any, names: Sequence[str]) -> None:
    """Warn of arguments that keep steps out of graphs, unless the caller asks for what they
    return."""
    unasked = [name for name in names if not name.startswith("output_")]
    if names and len(unasked) == len(names):
        why = f"they get {', '.join(names)}, and graphs take tokens and positions alone"
        not_fast.warn(model, not_fast.GRAPHS, why)


def is_nothing(value: Any) -> bool:
    """Does an argument ask for nothing? Of a text alone, transformers 5.24 hands a model of images
    an empty dict of what they encode to."""
    return value is None or value is False or (isinstance(value, dict) and not value)


def is_one_token(ids: Any) -> bool:
    return isinstance(ids, Tensor) and ids.dim() == 2 and ids.shape[1] == 1


def are_positions(given: Any, ids: Tensor) -> bool:
    return given is None or (given.shape, given.dtype) == (ids.shape, torch.int64)


def shown(given: Any) -> str:
    return f"{name(given.dtype)} {list(given.shape)}"


def plain_step(
    forward: Callable[..., Any],
    input_ids: Tensor,
    cache: PagedModelCache,
    position_ids: Tensor | None,
    argument: str,
) -> Tensor:
    """The logits of a step by the model's own forward. argument: the name of the model's cache."""
    if position_ids is None:
        position_ids = positions(cache.state, input_ids.shape[0])
    with torch.no_grad():
        return run_model(forward, argument, input_ids, position_ids, cache).logits


def plain_verify(
    owner: Any, forward: Callable[..., Any], inputs: StepInputs, cache: PagedModelCache
) -> Outputs:
    """A step of the model `owner` that verifies, by its own forward."""
    assert inputs.lengths is not None
    step = verifying(step_of(forward, cache_names.argument_of(owner)))
    state = cache.state
    try:
        out: Outputs = step(**inputs.arguments(torch.ones_like(inputs.lengths)), cache=cache)
        return out
    finally:
        # Pages forget the tokens of a step that an error ended, and states do not.
        begun = set(state.begun)
        state.end_step()
        state.begun |= begun


def step_of(forward: Callable[..., Any], argument: str) -> Callable[..., Any]:
    """argument: the name of the model's cache."""

    def step(
        input_ids: Tensor,
        position_ids: Tensor,
        live: Tensor,
        cache: PagedModelCache,
        lengths: Tensor | None = None,
        parents: Tensor | None = None,
    ) -> Any:
        """live: int64 `[B]`, 1 for a row of the batch, 0 for one that fills the bucket. lengths,
        parents: see `StepInputs`."""
        state = cache.state
        if lengths is not None:
            place(state.pages, lengths, live)
        state.start, state.real = starts(state.pages, live, input_ids.shape[1])
        state.verified = None if lengths is None else state.start
        state.parents = parents
        out = run_model(forward, argument, input_ids, position_ids, cache)
        state.start = state.real = state.parents = None
        return out

    return step
