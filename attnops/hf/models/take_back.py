"""Tokens that the layers with states of a model can take back: what they keep of them, and how the
states go on over those that are accepted where no step follows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from attnops.core.select import active_policy
from attnops.hf.models import lightning
from attnops.hf.models.chosen import is_ours
from attnops.hf.models.recurrent import (
    FAMILIES,
    conv_of,
    modules_with_states,
    ops_of,
    weight_of,
)
from attnops.hf.models.states import Memory, StateSizes
from attnops.ops.recurrent.conv import causal_conv1d
from attnops.ops.recurrent.kept_reference import RULE_KEEPS, SCAN_KEEPS
from attnops.ops.recurrent.record import gated_delta_rule
from attnops.ops.recurrent.scan import mamba2_scan

NAMES: dict[str, tuple[str, ...]] = {
    "gated_delta_rule": tuple(RULE_KEEPS.values()),
    "mamba2_scan": tuple(SCAN_KEEPS.values()),
    lightning.NAME: tuple(SCAN_KEEPS.values()),
    "": (),
}
"""What is kept of a token beside the input of its convolution, by family."""


def why_not(model: nn.Module, cache: Any) -> Iterator[str]:
    """Each reason why no token can be taken back now."""
    sizes, taken = cache.state.pages.sizes, modules_with_states(model)
    kind, policy = sizes.device.type, active_policy()
    cast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    for number, place in cache.states.items():
        module, dtype = taken[number][0], sizes.states[place].conv_dtype
        now = cast or weight_of(module).dtype
        if now != dtype:
            yield f"the states of the cache are {dtype}, and those of a call now {now}"
        for op, of in ops_of(module).items():
            if not is_ours(op, policy, sizes.device, dtype, None, of, ("accepted",)):
                yield f"no kernel of {op} that the policy allows can take tokens back"


def begin(model: nn.Module, cache: Any, tokens: int, lengths: Tensor) -> bool:
    """Begin to keep the tokens of steps that verify up to `tokens` of a row. Returns whether memory
    is gone that graphs may hold: there was some for fewer tokens.

    lengths: int64 `[B]`, the tokens of each row that the states have read.
    """
    pages = cache.state.pages
    states, slots = pages.states, 2 * tokens
    had: int = states.slots
    if had < slots:
        taken, sizes = modules_with_states(model), pages.sizes.states
        modules = [taken[number] for number in cache.states]
        memory = [_memory(*each, of) for each, of in zip(modules, sizes, strict=True)]
        before = states.written
        states.keep([NAMES[family] for _, family in modules], memory, slots)
        pages.stream.leave(*before)
        pages.stream.own(*states.written)
        pages.use()
    states.begin(lengths)
    return 0 < had < slots


def _memory(module: nn.Module, family: str, sizes: StateSizes) -> Memory:
    """What is kept of one token."""
    dtype = sizes.conv_dtype
    conv = torch.Size(sizes.conv[:1]), dtype
    if not family:
        return (conv,)
    of = dict(FAMILIES[family].sizes(module))
    keys = torch.Size((of["kv_heads"], of["head_dim"])), dtype
    values = torch.Size((of["q_heads"], of["v_head_dim"])), dtype
    number = torch.Size((of["q_heads"],))
    if FAMILIES[family].op == "mamba2_scan":
        return conv, values, (number, dtype), keys
    return conv, keys, values, (number, torch.float32), (number, dtype)


def settle(model: nn.Module, cache: Any, lengths: Tensor) -> None:
    """Let the states of the first rows go on to `lengths` tokens, int64 `[B]`: over those that were
    accepted since the last step."""
    states, rows = cache.state.pages.states, lengths.shape[0]
    states.accept(lengths, torch.ones_like(lengths, dtype=torch.bool))
    starts = torch.zeros(rows + 1, dtype=torch.int32, device=lengths.device)
    no_tokens: dict[str, Any] = {"cu_seqlens_q": starts, "max_seqlen_q": 0, "padded": False}
    taken = modules_with_states(model)
    for number, place in cache.states.items():
        module, family = taken[number]
        own: Any = states.of(place, rows, keeps=True)
        if (conv := conv_of(module)) is not None:
            weight = conv.weight[:, 0].to(own.conv.dtype)
            given = own.kept.of_conv()
            causal_conv1d(given["kept_x"][0, :0], weight, own.conv, **given, **no_tokens)
        if family:
            _SETTLES[family](module, own, no_tokens)


def _settle_rule(module: Any, own: Any, no_tokens: dict[str, Any]) -> None:
    given = own.kept.of_op()
    key, value, decay, beta = (given[name][0, :0] for name in NAMES["gated_delta_rule"])
    gated_delta_rule(key, key, value, decay, beta, own.state, normalize=True, **given, **no_tokens)


def _settle_scan(module: Any, own: Any, more: dict[str, Any]) -> None:
    more = {"dt_bias": module.dt_bias, "dt_softplus": True, **more}
    _settle_rates(-module.A_log.float().exp(), own, more)


def _settle_lightning(module: Any, own: Any, no_tokens: dict[str, Any]) -> None:
    _settle_rates(lightning.rates(module), own, no_tokens)


def _settle_rates(rates: Tensor, own: Any, more: dict[str, Any]) -> None:
    given = own.kept.of_op()
    x, dt, b = (given[name][0, :0] for name in NAMES["mamba2_scan"])
    mamba2_scan(x, dt, rates, b, b, own.state, **given, **more)


_SETTLES = {
    "gated_delta_rule": _settle_rule,
    "mamba2_scan": _settle_scan,
    lightning.NAME: _settle_lightning,
}
