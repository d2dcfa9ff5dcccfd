"""The scan of Mamba-2 in transformers models through `attnops.ops.mamba2_scan`: what takes the
place of the two functions that its modules call by name.

Their results have the dtype of the tokens, as those of the package mamba_ssm; transformers' own of
many tokens are float32.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from math import inf, isinf
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attnops.hf.models.chosen import Sizes
from attnops.hf.models.functions import (
    Function,
    Make,
    Texts,
    count_of,
    is_served,
    kept_of,
    last_of_rows,
    numbers,
    requests_of,
    state_of,
    texts_of,
)
from attnops.ops.recurrent.scan import mamba2_scan

ATTRIBUTES = ("num_heads", "n_groups", "head_dim", "ssm_state_size", "conv1d")
NO_LIMITS = (0.0, inf)
FUSED = "mamba2_split_conv1d_scan_combined"
"""What modules in training ask first: convolution, scan, norm and projection by mamba_ssm."""


def sizes_of(module: Any) -> Sizes:
    """Those of the op of a module."""
    heads = (("q_heads", module.num_heads), ("kv_heads", module.n_groups))
    return *heads, ("head_dim", module.ssm_state_size), ("v_head_dim", module.head_dim)


def _scan(own: Function, view: Any = None) -> Function:
    """In place of `mamba2_chunk_scan`, see `Make`."""

    @functools.wraps(own)
    def run(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = NO_LIMITS,
        return_final_states: bool = False,
        **more: Any,
    ) -> Any:
        x, (shortest, longest) = hidden_states, dt_limit
        rows, tokens, heads, width = x.shape
        texts = None if view is not None else texts_of(more, rows, tokens)
        # transformers' code of many tokens has no gate, and does not read one.
        left = more.get("z") is not None or shortest < 0 or longest <= 0
        if view is None and (left or not _serves(x, B, C, texts)):
            more |= {"dt_limit": dt_limit, "return_final_states": return_final_states}
            more |= {"initial_states": initial_states, "dt_softplus": dt_softplus}
            return own(x, dt, A, B, C, chunk_size, D=D, dt_bias=dt_bias, **more)
        state = state_of(view, initial_states, x, count_of(rows, texts), heads, width, B.shape[3])
        requests = requests_of(view, x, rows, tokens, initial_states is None, texts) | kept_of(view)
        # transformers calls the other function for a next token, which has no limits.
        is_next = view is not None and requests["max_seqlen_q"] == 1 and not view.fresh
        limits = NO_LIMITS if is_next or "accepted" in requests else dt_limit
        given = x, dt, A, B, C, D, dt_bias
        output = _scanned(given, state, limits, dt_softplus=dt_softplus, **requests)
        if not return_final_states:
            return output
        return output, last_of_rows(state, rows, tokens, texts)

    return run


def _update(own: Function, view: Any = None) -> Function:
    """In place of `mamba2_selective_state_update`, whose steps have no limits, see `Make`."""

    @functools.wraps(own)
    def run(
        state: Tensor,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        z: Tensor | None = None,
        **more: Any,
    ) -> Tensor:
        x = hidden_states
        by_head = _is_by_head(A, 1, 2) and all(_is_by_head(y, -1) for y in (dt, D, dt_bias))
        takes_state = state.dtype == torch.float32 and dt_softplus
        if view is None and not (takes_state and by_head and _serves(x, B, C)):
            own_result: Tensor = own(
                state, x, dt, A, B, C, D=D, dt_bias=dt_bias, dt_softplus=dt_softplus, z=z, **more
            )
            return own_result
        given = _by_head(x, dt, A, B, C, D, dt_bias)
        requests = requests_of(view, x, x.shape[0], 1, fresh=False) | kept_of(view)
        moved = state if view is None else view.states.state
        output = _scanned(given, moved, NO_LIMITS, dt_softplus=dt_softplus, **requests)
        return output if z is None else output * F.silu(z)

    return run


def _scanned(
    given: tuple[Any, ...], state: Tensor, limits: tuple[float, float], **requests: Any
) -> Tensor:
    """The scan of tokens `[..., heads, head dim]`. given: x, dt, A, B, C, D and dt_bias, with one
    number of a head."""
    x, dt, a, b, c, d, dt_bias = given
    shortest, longest = limits
    output = mamba2_scan(
        x.flatten(0, -3),
        dt.flatten(0, -2),
        a.float(),
        b.flatten(0, -3),
        c.flatten(0, -3),
        state,
        d=d,
        dt_bias=dt_bias,
        dt_min=shortest,
        dt_max=0.0 if isinf(longest) else longest,
        **requests,
    )
    return output.view(x.shape)


def _by_head(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    dt_bias: Tensor | None,
) -> tuple[Any, ...]:
    """The arguments of one token, whose numbers of a head are spread over its dims, with one number
    of a head."""
    rest = (None if y is None else y[:, 0] for y in (d, dt_bias))
    return x, dt[..., 0], a[:, 0, 0], b, c, *rest


def _is_by_head(x: Tensor | None, *dims: int) -> bool:
    """Is it one number along these dims?"""
    return x is None or all(x.stride(dim) == 0 or x.shape[dim] == 1 for dim in dims)


def _serves(x: Tensor, b: Tensor, c: Tensor, texts: Texts | None = None) -> bool:
    """x: `[..., heads, head dim]`. b, c: `[..., groups, state size]`."""
    (heads, width), (groups, size) = x.shape[-2:], b.shape[-2:]
    sizes = (("q_heads", heads), ("kv_heads", groups), ("head_dim", size), ("v_head_dim", width))
    return x.dtype == b.dtype == c.dtype and is_served("mamba2_scan", x, sizes, texts=texts)


def not_fused(*_: Any, **__: Any) -> None:
    """In place of `FUSED` without mamba_ssm. transformers' own gives None, too, but that of 5.24
    raises where several texts share a row."""


OURS: Mapping[str, Make] = {
    "mamba2_chunk_scan": _scan,
    "mamba2_selective_state_update": _update,
}
"""By the name in transformers' files."""


def inputs(name: str) -> dict[str, Any]:
    """What a trial of the function of this name gives it: more tokens than a chunk has, and a
    state."""
    rows, tokens, heads, width, groups, size = 2, 70, 4, 6, 2, 8
    state, rate = numbers(rows, heads, width, size), -numbers(heads).exp()
    skip, bias = numbers(heads).cos(), numbers(heads)
    if name == "mamba2_selective_state_update":
        return {
            "state": state,
            "hidden_states": numbers(rows, heads, width).cos(),
            "dt": numbers(rows, heads, 1).expand(-1, -1, width),
            "A": rate[:, None, None].expand(-1, width, size),
            "B": numbers(rows, groups, size).cos(),
            "C": numbers(rows, groups, size),
            "D": skip[:, None].expand(-1, width),
            "dt_bias": bias[:, None].expand(-1, width),
            "dt_softplus": True,
            "z": numbers(rows, heads, width),
        }
    return {
        "hidden_states": numbers(rows, tokens, heads, width).cos(),
        "dt": numbers(rows, tokens, heads),
        "A": rate,
        "B": numbers(rows, tokens, groups, size).cos(),
        "C": numbers(rows, tokens, groups, size),
        "chunk_size": 32,
        "D": skip,
        "dt_bias": bias,
        "initial_states": state,
        "dt_softplus": True,
        "dt_limit": (0.3, 1.2),
        "return_final_states": True,
    }
