"""Causal convolutions of transformers models through `attnops.ops.causal_conv1d`: what takes the
place of the two functions that modules call by name."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attnops.hf.models.functions import (
    Function,
    Make,
    Texts,
    count_of,
    is_served,
    kept_of,
    numbers,
    requests_of,
    texts_of,
)
from attnops.ops.recurrent.conv import causal_conv1d


def _serves(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    texts: Texts | None = None,
) -> bool:
    """x: `[B, C, tokens]`."""
    asks = (*(("bias",) if bias is not None else ()), *(("activation",) if activation else ()))
    alike = x.dtype == weight.dtype or torch.is_autocast_enabled(x.device.type)
    known = activation in (None, "silu") and alike
    return known and is_served("causal_conv1d", x, (("in_features", x.shape[1]),), asks, texts)


def _convolved(
    view: Any,
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    fresh: bool,
    texts: Texts | None = None,
) -> Tensor:
    """The convolution of `x` `[B, C, tokens]`. view, texts: see `requests_of`."""
    rows, channels, tokens = x.shape
    output = causal_conv1d(
        x.transpose(1, 2).reshape(rows * tokens, channels),
        weight.to(x.dtype),  # autocast leaves parameters wide
        state,
        bias=None if bias is None else bias.to(x.dtype),
        activation=activation or "",
        **kept_of(view, conv=True),
        **requests_of(view, x, rows, tokens, fresh, texts),
    )
    return output.view(rows, tokens, channels).transpose(1, 2)


def _conv(own: Function, view: Any = None) -> Function:
    """In place of `causal_conv1d_fn`, see `Make`."""

    @functools.wraps(own)
    def run(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **more: Any,
    ) -> Tensor:
        x = hidden_states
        rows, channels, tokens = x.shape
        texts = None if view is not None else texts_of(more, rows, tokens)
        if view is None and not _serves(x, weight, bias, activation, texts):
            result: Tensor = own(x, weight, bias, activation, **more)
            return result
        if view is not None:
            state = view.states.conv
        else:
            state = x.new_empty((count_of(rows, texts), channels, weight.shape[1] - 1))
        return _convolved(view, x, state, weight, bias, activation, fresh=True, texts=texts)

    return run


def _conv_update(own: Function, view: Any = None) -> Function:
    """In place of `causal_conv1d_update`, see `Make`."""

    @functools.wraps(own)
    def run(
        hidden_states: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        x = hidden_states
        takes_state = (
            conv_state.dtype == x.dtype
            and conv_state.is_contiguous()
            and conv_state.shape[2] >= weight.shape[1] - 1
        )
        if view is None and not (takes_state and _serves(x, weight, bias, activation)):
            result: Tensor = own(x, conv_state, weight, bias, activation)
            return result
        moved = conv_state if view is None else view.states.conv
        return _convolved(view, x, moved, weight, bias, activation, fresh=False)

    return run


OURS: Mapping[str, Make] = {
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
