"""Lightning attention through `attnops.ops.mamba2_scan`: what takes the place of the forward of its
modules, which call no function by name.

It is linear attention that forgets at one rate a head, its slope s. A token with q, k and v does

    S = exp(-s) * S + outer(v, k)
    output = S @ q

https://arxiv.org/abs/2401.04658. So it is the scan of Mamba-2 with v as x, k as b and q as c, with
steps of 1 and the rates -s. transformers keeps S transposed.
"""

from __future__ import annotations

import functools
import inspect
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnops.core.select import use
from attnops.hf.models.chosen import Sizes
from attnops.hf.models.functions import (
    Function,
    Texts,
    cache_among,
    count_of,
    is_served,
    kept_of,
    last_of_rows,
    numbers,
    requests_of,
    state_of,
    texts_of,
)
from attnops.hf.models.states import PartOfRows, Requests, States
from attnops.hf.models.trial import Trial, alone, answer
from attnops.ops.recurrent.scan import mamba2_scan

NAME, OP = "lightning_attention", "mamba2_scan"
ATTRIBUTES = ("num_attention_heads", "head_dim", "slope_rate", "diagonal_decay", "norm")


def is_one(cls: Any) -> bool:
    """Has a class such modules? Their code asks their model's own class of cache for the state."""
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    return {"get_linear_cache", "slope_rate"} <= {*getattr(code, "co_names", ())}


def sizes_of(module: Any) -> Sizes:
    """Those of the op of a module."""
    heads, width = module.num_attention_heads, module.head_dim
    return ("q_heads", heads), ("kv_heads", heads), ("head_dim", width), ("v_head_dim", width)


def rates(module: Any) -> Tensor:
    """float32 `[H]`, at which the heads forget."""
    slopes: Tensor = module.slope_rate
    return -slopes.flatten().float()


def attention(own: Function, view: Any = None) -> Function:
    """In place of the forward `own` of a module, see `Make`. See `_serves` for calls that are
    left."""

    @functools.wraps(own)
    def run(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if view is not None:
            return _attended(self, hidden_states, attention_mask, view)
        cache = cache_among((*args, *kwargs.values()))
        texts = texts_of(kwargs, *hidden_states.shape[:2])
        if not _serves(self, hidden_states, cache, texts):
            return own(self, hidden_states, position_embeddings, attention_mask, *args, **kwargs)
        output, states = _attended(self, hidden_states, attention_mask, None, texts)
        if cache is not None:
            cache.set_linear_cache(self.layer_idx, states.to(output.dtype))
        return output, states

    return run


def _serves(module: Any, x: Tensor, cache: Any, texts: Texts | None) -> bool:
    """It serves first tokens that have no gradient, and texts that share a row, whose states
    transformers' own code does not keep apart. cache: of transformers' own, or None."""
    if cache is not None and cache.get_linear_cache(module.layer_idx) is not None:
        return False
    if texts is None and torch.is_grad_enabled():
        return False
    return is_served(OP, x, sizes_of(module), texts=texts)


def _attended(
    module: Any, hidden_states: Tensor, mask: Tensor | None, view: Any, texts: Texts | None = None
) -> tuple[Tensor, Tensor]:
    """The output `[B, tokens, hidden]`, and the states of its rows as transformers has them.

    mask: `[B, tokens]`, 0 for padding. view, texts: see `requests_of`.
    """
    rows, tokens, _ = hidden_states.shape
    heads, width = module.num_attention_heads, module.head_dim
    mixed = module.act_fn(module.qkv_proj(hidden_states))
    if mask is not None:
        mixed = mixed * mask[:, :, None].to(mixed.dtype)
    query, key, value = mixed.view(rows * tokens, heads, 3 * width).split(width, 2)
    state = state_of(view, None, value, count_of(rows, texts), heads, width, width)
    # What is left of a token at its own place: 1, which no launch has to write.
    steps = module.diagonal_decay[0, :, 0, 0].to(value.dtype).expand(rows * tokens, heads)
    output = mamba2_scan(
        value,
        steps,
        rates(module),
        key,
        query,
        state,
        **kept_of(view),
        **requests_of(view, value, rows, tokens, True, texts),
    )
    output = module.norm(output.view(rows, tokens, heads * width))
    output = F.sigmoid(module.output_gate(hidden_states)) * output
    return module.out_proj(output), last_of_rows(state, rows, tokens, texts).mT


# Recognition --------------------------------------------------------------------------------------


@functools.cache
def is_like(cls: Any, own: Function) -> bool:
    """Does the forward `own` of a class compute on a CPU what ours does, for rows with padding and
    for the tokens after these?"""
    with alone(), torch.autocast("cpu", enabled=False):
        module, held = answer(_small, cls), _Held()
        if module is None:
            return False
        states = States(torch.empty(2, 0, 0), torch.empty(2, 3, 4, 4))
        padding = torch.tensor([[1] * 11, [0] * 4 + [1] * 7])
        for tokens, mask in ((11, padding), (2, None)):
            x, starts = numbers(2, tokens, 5), torch.arange(3, dtype=torch.int32) * tokens
            if (found := answer(own, module, x, None, mask, held)) is None:
                return False
            trial = Trial(None, {"output": found[0], "state": held.state})
            view = PartOfRows(states, Requests(starts, tokens), fresh=mask is not None)
            with use({OP: "reference"}):
                got = dict(zip(trial.want, _attended(module, x, mask, view), strict=True))
            if not all(trial.is_met(name, y, 1e-4, 1e-5) for name, y in got.items()):
                return False
    return True


def _small(cls: Any) -> Any:
    """What the forward of a class reads of a module, of few numbers: blocks of 4 tokens."""
    heads, width, hidden = 3, 4, 5
    made = SimpleNamespace(
        layer_idx=1,
        num_hidden_layers=4,
        num_attention_heads=heads,
        head_dim=width,
        block_size=4,
        act_fn=nn.SiLU(),
        norm=lambda x: x * numbers(heads * width),
        qkv_proj=lambda x: x @ numbers(hidden, 3 * heads * width),
        output_gate=lambda x: x @ numbers(hidden, heads * width).cos(),
        out_proj=lambda x: x @ numbers(heads * width, hidden),
    )
    made.slope_rate = cls.get_slope_rate(made)
    decays = cls.decay_factors(made, made.slope_rate)
    made.query_decay, made.key_decay, made.diagonal_decay = decays
    return made


class _Held:
    """A cache of one layer, as the code asks one of its model's own class."""

    state: Any = None

    def get_linear_cache(self, _: int) -> Any:
        return self.state

    def set_linear_cache(self, _: int, state: Tensor) -> None:
        self.state = state
