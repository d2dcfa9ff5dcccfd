"""Causal convolutions of transformers models through `attnops.ops.causal_conv1d`: what takes the
place of the two functions that modules call by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from attnops.hf.models.functions import is_served, numbers, starts_of
from attnops.ops.recurrent.conv import causal_conv1d

Function = Callable[..., Any]


def _convolved(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor | None:
    """The convolution of `x` `[B, C, tokens]`; None where transformers' own serves it."""
    asks = (*(("bias",) if bias is not None else ()), *(("activation",) if activation else ()))
    kept = activation in (None, "silu") and x.dtype == weight.dtype == state.dtype
    if not (kept and is_served("causal_conv1d", x, (("in_features", x.shape[1]),), asks)):
        return None
    rows, channels, tokens = x.shape
    output = causal_conv1d(
        x.transpose(1, 2).reshape(rows * tokens, channels),
        weight,
        state,
        starts_of(x, rows, tokens),
        bias,
        max_seqlen_q=tokens,
        activation=activation or "",
        padded=False,
    )
    return output.view(rows, tokens, channels).transpose(1, 2)


def _conv(own: Function) -> Function:
    """In place of `causal_conv1d_fn`."""

    @functools.wraps(own)
    def run(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **more: Any,
    ) -> Tensor:
        x = hidden_states
        state = x.new_zeros((*x.shape[:2], weight.shape[1] - 1))
        found = (
            None
            if more.get("seq_idx") is not None
            else _convolved(x, state, weight, bias, activation)
        )
        if found is None:
            found = own(x, weight, bias, activation, **more)
        return found

    return run


def _conv_update(own: Function) -> Function:
    """In place of `causal_conv1d_update`."""

    @functools.wraps(own)
    def run(
        hidden_states: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        found = None
        if conv_state.is_contiguous() and conv_state.shape[2] >= weight.shape[1] - 1:
            found = _convolved(hidden_states, conv_state, weight, bias, activation)
        if found is None:
            found = own(hidden_states, conv_state, weight, bias, activation)
        return found

    return run


def over(view: Any) -> dict[str, Function]:
    """The two functions of a step in a graph, whose requests are those of `view`. They write its
    states."""

    def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        rows, channels, tokens = x.shape
        output = causal_conv1d(
            x.transpose(1, 2).reshape(rows * tokens, channels),
            weight,
            view.states.conv,
            view.batch.cu_seqlens_q,
            bias,
            max_seqlen_q=view.batch.max_seqlen_q,
            activation=activation or "",
            fresh=view.fresh,
            padded=False,
        )
        return output.view(rows, tokens, channels).transpose(1, 2)

    def conv(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> Tensor:
        return convolved(x, weight, bias, activation)

    def conv_update(
        x: Tensor,
        state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        return convolved(x, weight, bias, activation)

    return {"causal_conv1d_fn": conv, "causal_conv1d_update": conv_update}


OURS: Mapping[str, Callable[[Function], Function]] = {
    "causal_conv1d_fn": _conv,
    "causal_conv1d_update": _conv_update,
}
"""By the name in transformers' files."""


def inputs(name: str) -> dict[str, Any]:
    """What a trial gives the function of this name."""
    updates = name == "causal_conv1d_update"
    return {
        "hidden_states": numbers(2, 5, 1 if updates else 7),
        **({"conv_state": numbers(2, 5, 4).cos()} if updates else {}),
        "weight": numbers(5, 4),
        "bias": numbers(5),
        "activation": "silu",
    }
