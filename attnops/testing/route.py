"""The problem grid of the routing of a mixture."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.testing.case import Call, Case, Rows, Source, table

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def route(
    source: Source, tokens: int, count: int, top_k: int, dtype: torch.dtype = F32, *, bias: torch.dtype | None = None, ties: bool = False,
    odd: bool = False, along: bool = False, weights: torch.dtype = F32, **rule: Any,
) -> Call:  # fmt: skip
    """`route` of `tokens` tokens to `top_k` of `count` experts. rule: further arguments of the op.

    bias: its dtype. ties: many experts are equal. odd: some logits are -inf, and some 0 or -0. along: the logits of an expert are next
    to each other in memory.
    """

    def numbers(*shape: int, dtype: torch.dtype) -> Tensor:
        made = source.normal(*shape, dtype=dtype, spread=2.0)
        return made.round() if ties else made

    logits = numbers(tokens, count, dtype=dtype)
    if odd:
        for value in (float("-inf"), -0.0, 0.0):
            logits[:, 1:].masked_fill_(source.chance(tokens, count - 1, p=0.3), value)  # all at -inf would have no weights
    if along:
        logits = logits.T.contiguous().T
    given: dict[str, Any] = {"logits": logits, **rule}
    if bias is not None:
        given["bias"] = numbers(count, dtype=bias) / 4
    empty = {n: torch.empty(tokens, top_k, dtype=d, device=source.device) for n, d in (("weights", weights), ("index", torch.int64))}
    return Call("route", {**given, **empty}, writes=("weights", "index"))


SIGMOID, NORMAL, BIAS = {"scoring": "sigmoid"}, {"normalize": True}, {"bias": F32}
V2 = {"groups": 4, "top_groups": 2, "scale": 16.0}
V3 = {**SIGMOID, **NORMAL, **BIAS, "groups": 4, "top_groups": 2, "group_best": 2, "eps": 1e-20, "scale": 2.5}
TIES, ODD, ALONG = {"ties": True}, {"odd": True}, {"along": True}
ROUTES: Rows = {
    "plain": (3, 24, 4), "sigmoid": (3, 24, 4, SIGMOID), "normalize": (3, 24, 4, NORMAL), "scale": (3, 24, 4, {"scale": 2.5}),
    "eps": (3, 24, 4, NORMAL | {"eps": 0.1}), "eps_sigmoid": (3, 24, 4, NORMAL | SIGMOID | {"eps": 0.1}), "bias": (3, 24, 4, BIAS),
    "bias_sigmoid": (3, 24, 4, BIAS | SIGMOID), "groups": (3, 24, 4, V2), "group_best": (3, 24, 4, V2 | SIGMOID | {"group_best": 3}),
    "all": (5, 24, 4, V3), "all_groups": (3, 24, 4, V3 | {"top_groups": 4}), "groups_of_one": (3, 6, 2, {"groups": 6, "top_groups": 3}),
    "no_tokens": (0, 24, 4, V3), "one_expert": (3, 1, 1), "every_expert": (3, 7, 7, NORMAL), "along": (5, 24, 4, ALONG | V3),
    "float64": (3, 24, 4, F64, V3), "float16": (3, 33, 5, F16, {"weights": F16}), "float16_bias": (3, 24, 4, F16, V3 | {"bias": F16}),
    **{f"{name}-{kind}": (9, 24, 6, more | rule) for name, more in (("ties", TIES), ("odd", ODD))
       for kind, rule in (("plain", {}), ("normalize", NORMAL), ("sigmoid", SIGMOID), ("groups", V2), ("all", V3))},
    "ties-bfloat16": (9, 128, 8, BF16, TIES | NORMAL), "odd-bfloat16": (9, 128, 8, BF16, ODD | NORMAL),
    "qwen3": (5, 128, 8, BF16, NORMAL | {"weights": BF16}), "gpt_oss": (5, 32, 4, BF16, NORMAL | {"weights": BF16}),
    "deepseek_v3": (5, 256, 8, V3 | {"groups": 8, "top_groups": 4}), "deepseek_v2": (5, 160, 6, V2 | {"groups": 8, "top_groups": 3}),
    "mixtral": (1, 8, 2, BF16, NORMAL), "most": (2, 512, 32, BF16, SIGMOID | NORMAL), "too_many": (2, 514, 33, SIGMOID),
}  # fmt: skip

ROUTE_CASES: dict[str, tuple[Case, ...]] = {"route": table("route", route, ROUTES)}
