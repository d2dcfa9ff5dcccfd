"""The routing of a mixture: from the logits of a token to its experts and their weights, as one
op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.core import eager_cache
from attnops.core.checks import check_strided, python_number
from attnops.core.eager_cache import key_for
from attnops.core.errors import InvalidInput, fail
from attnops.core.op import Op, define
from attnops.core.record import FLOATS, KW_ONLY, Call, Sizes, arg, need, record
from attnops.ops import typical
from attnops.ops.experts.route_reference import route as reference

SCORING = ("softmax", "sigmoid")
LEAST = {"E": ">= 1 expert", "K": ">= 1 expert"}


def _rules(call: Any, sizes: Sizes) -> None:
    count, groups = sizes["E"], call.groups
    need(count % groups == 0, "groups", groups, f"a divisor of {count} (E, as logits.shape[1])")
    if groups == 1:
        for field in ("top_groups", "group_best"):
            need(getattr(call, field) == 1, field, getattr(call, field), "1, because groups is 1")
    need(call.top_groups <= groups, "top_groups", call.top_groups, f"<= {groups} (groups)")
    need(
        call.group_best <= count // groups,
        "group_best",
        call.group_best,
        f"<= {count // groups}, the experts of a group",
    )
    most = count // groups * call.top_groups
    need(
        sizes["K"] <= most,
        "index.shape[1]",
        sizes["K"],
        f"<= {most}, the experts of top_groups groups",
    )
    need(call.normalize or not call.eps, "eps", call.eps, "0, because normalize is False")


def _facts(call: Any, sizes: Sizes) -> dict[str, Any]:
    return {"experts": int(sizes["E"]), "top_k": int(sizes["K"])}


@record("route", least=LEAST, rules=_rules, facts=_facts)
class Route(Call):
    """The logits of a router, and how experts are chosen by them."""

    logits: Tensor = arg("T, E", FLOATS)
    bias: Tensor | None = arg("E", FLOATS, default=None)
    _: KW_ONLY
    scoring: str = arg(default="softmax", choices=SCORING)
    groups: int = arg(default=1, least=1)
    top_groups: int = arg(default=1, least=1)
    group_best: int = arg(default=1, least=1)
    normalize: bool = False
    eps: float = arg(default=0.0, least=0)
    scale: float = 1.0
    weights: Tensor = arg("T, K", FLOATS, written=True)
    index: Tensor = arg("T, K", (torch.int64,), written=True)


ROUTE = define(
    Op(
        Route,
        reference,
        about="routing of a mixture: the experts of each token and their weights, from its logits",
        typical=({**typical.BF16, **typical.STEP, "experts": 128, "top_k": 8},),
    )
)


def is_allowed(call: Route, experts: int, top_k: int) -> bool:
    """May a call of so many experts have these numbers, whatever its tensors are?"""
    try:
        _rules(call, {"E": experts, "K": top_k})
    except InvalidInput:
        return False
    return True


def route(
    logits: Tensor,
    top_k: int,
    bias: Tensor | None = None,
    *,
    scoring: str = "softmax",
    groups: int = 1,
    top_groups: int = 1,
    group_best: int = 1,
    normalize: bool = False,
    eps: float = 0.0,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
    kernel: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The experts of each token and their weights. No gradient.

    Each expert has a score s, in float32: `softmax(logits)` or `sigmoid(logits)`. The experts of
    the `top_k` largest `s + bias` are chosen, the largest first. With groups, which are runs of E /
    groups experts, a group's value is the sum of its `group_best` largest `s + bias`, and only
    experts of the `top_groups` largest groups are chosen. The weight of an expert is `scale * s`,
    or with `normalize` `scale * s / (sum + eps)` with the sum of the token's chosen s. The bias
    changes no weight.

    Of equal experts, and of equal groups, the lowest numbers are chosen. Without a bias experts are
    compared by their logits, which differ where rounded scores may be equal. NaN is chosen before
    all numbers, and makes the weights that it enters NaN. Every number of `index` is an expert,
    whatever the logits are.

    Args:
        logits: `[T, E]`, float, the products of tokens and the router's weight.
        top_k: K, at least 1 and at most the experts of `top_groups` groups.
        bias: `[E]`, of any float dtype: added for the choice alone, as DeepSeek-V3 does.
        scoring: `"softmax"` or `"sigmoid"`. `"softmax"` with `normalize` and without `eps` is the
            softmax of the chosen logits (gpt-oss).
        groups: a divisor of E. top_groups: at most `groups`.
        group_best: 1 as DeepSeek-V2 has it, https://arxiv.org/abs/2405.04434, or 2 as V3,
            https://arxiv.org/abs/2412.19437.
        normalize: a token's weights add up to `scale`, but for `eps`.
        eps: added to the sum; 1e-20 in transformers' sigmoid routers. 0 without `normalize`.
        scale: of all weights.
        dtype: of the weights; None: that of `logits`.
        kernel: force a kernel by name for this call.

    Returns:
        (weights `[T, K]`, index int64 `[T, K]`). The index has numbers from 0 to E - 1, of which no
        token has one twice.

    Raises:
        InvalidInput: a shape, dtype, device or number breaks this contract. NoGradient: an input
            requires grad. UnknownKernel, NoKernel.
    """
    eager_cache.tensors(logits=logits)
    check_strided("logits", logits, "T, E")
    if logits.dim() != 2:
        fail(InvalidInput, "logits", f"shape {tuple(logits.shape)}", "[T, E]")
    top_k = python_number(top_k)
    if not isinstance(top_k, int):
        fail(InvalidInput, "top_k", repr(top_k), "a value of type int")
    need(
        1 <= top_k <= logits.shape[1],
        "top_k",
        top_k,
        f"1 to {logits.shape[1]} (E, as logits.shape[1])",
    )
    if dtype is not None and dtype not in FLOATS:
        fail(InvalidInput, "dtype", dtype, " | ".join(map(str, FLOATS)))
    weights = logits.new_empty((logits.shape[0], top_k), dtype=dtype)
    index = logits.new_empty((logits.shape[0], top_k), dtype=torch.int64)
    ROUTE(
        Route(
            logits,
            bias,
            scoring=scoring,
            groups=groups,
            top_groups=top_groups,
            group_best=group_best,
            normalize=normalize,
            eps=eps,
            scale=scale,
            policy=key_for("route", kernel),
            weights=weights,
            index=index,
        )
    )
    return weights, index
