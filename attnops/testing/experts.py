"""The problem grids of the experts of a mixture."""

from __future__ import annotations

from typing import Any

import torch

from attnops.testing.case import Call, Case, Rows, Source, table

F16, BF16, F32, F64, I32 = torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32


def experts(
    source: Source, tokens: int, sizes: tuple[int, int, int, int, int], dtype: torch.dtype = F32, *, bias: bool = False,
    along: bool = False, odd: bool = False, index: torch.dtype = torch.int64, weights: torch.dtype = F32, **numbers: Any,
) -> Call:  # fmt: skip
    """`experts` of `tokens` tokens. sizes: In, Inner, Out, the experts, and those that each token chooses.

    along: rows of a weight are next to each other in memory. odd: some tokens choose one expert twice, or a number that is no expert.
    numbers: further arguments of the op.
    """
    columns, inner, outs, count, k = sizes

    def weight(rows: int, width: int) -> torch.Tensor:
        made = source.normal(count, rows, width, dtype=dtype, spread=width**-0.5)
        return made.transpose(1, 2).contiguous().transpose(1, 2) if along else made

    rows = [source.permutation(count)[:k] for _ in range(tokens)]
    if odd:
        rows = [[(row[0], count, -1, count + 7)[i % 4], *row[1:]] if i % 3 else [row[-1], *row[1:]] for i, row in enumerate(rows)]
    chosen = source.ints(rows, index).reshape(tokens, k)
    arguments: dict[str, Any] = {
        "x": source.normal(tokens, columns, dtype=dtype), "gate_up": weight(2 * inner, columns), "down": weight(outs, inner),
        "top_k_index": chosen, "top_k_weights": source.normal(tokens, k, dtype=weights).abs(),
    }  # fmt: skip
    if bias:
        arguments |= {"gate_up_bias": source.normal(count, 2 * inner, dtype=dtype), "down_bias": source.normal(count, outs, dtype=dtype)}
    arguments |= {**numbers, "output": torch.empty(tokens, outs, dtype=dtype, device=source.device)}
    unused = torch.tensor([e not in chosen for e in range(count)], device=source.device)
    weights_of = [n for n in arguments if n.startswith(("gate_up", "down"))]
    free = {n: unused.reshape(-1, *[1] * (arguments[n].dim() - 1)) for n in weights_of}
    return Call("experts", arguments, {**free, "top_k_weights": (chosen < 0) | (chosen >= count)}, writes=("output",))


def mxfp4_experts(
    source: Source, tokens: int, sizes: tuple[int, int, int, int, int], dtype: torch.dtype = F32, **more: Any
) -> Call:  # fmt: skip
    """`mxfp4_experts`, as `experts`. Any byte is two numbers of a weight."""
    (columns, inner, outs, count, _), like = sizes, experts(source, tokens, sizes, dtype, **more)
    arguments = dict(like.arguments)
    for name, rows, width in (("gate_up", 2 * inner, columns), ("down", outs, inner)):
        arguments[name] = source.stored(count, rows, width // 2, dtype=torch.uint8)
        arguments[f"{name}_scales"] = source.stored(count, rows, width // 32, dtype=torch.uint8) % 5 + 244  # 2**-9 to 2**-5
    return Call("mxfp4_experts", arguments, {n: t for n, t in like.free.items() if n not in ("gate_up", "down")}, writes=("output",))


SMALL, WIDE = (24, 20, 28), (144, 72, 136)
FEW = (*SMALL, 6, 2)
OSS = {"bias": True, "along": True, "interleaved": True, "alpha": 1.702, "limit": 0.9, "offset": 1.0}
ODD, BIAS, ALONG = {"odd": True}, {"bias": True}, {"along": True}
EXPERTS: Rows = {
    "plain": (3, FEW), "bias": (3, FEW, BIAS), "gelu": (3, FEW, {"activation": "gelu"}),
    "gelu_tanh": (3, FEW, {"activation": "gelu_tanh"}), "interleaved": (3, FEW, {"interleaved": True}),
    "limit": (3, FEW, {"limit": 0.5}), "alpha": (3, FEW, {"alpha": 1.702}), "offset": (3, FEW, {"offset": 1.0}),
    "along": (3, FEW, ALONG), "all": (3, FEW, OSS), "odd": (7, (*SMALL, 6, 3), ODD), "int32": (3, FEW, {"index": I32}),
    "no_tokens": (0, FEW), "one_number": (1, (1, 1, 1, 1, 1)), "one_expert": (3, (*SMALL, 1, 1)),
    "float64": (3, FEW, F64, OSS),
    "float32_one_token": (1, (*WIDE, 6, 3), OSS), "float32_one_token-odd": (2, (*SMALL, 6, 3), {**OSS, **ODD}),
    **{f"{name}-{tokens}_tokens": (tokens, (*WIDE, 8, 3), BF16, {"weights": BF16}, *more) for tokens in (1, 2, 17, 64, 65)
       for name, more in (("bfloat16", (ODD,)), ("bfloat16_all", (OSS,)))},
    "float16": (2, (*WIDE, 20, 4), F16, BIAS), "float16_one_token": (1, (*WIDE, 20, 4), F16, ALONG),
    "bfloat16_many": (2, (*SMALL, 40, 12), BF16),
}  # fmt: skip

SHAPED = {n: OSS[n] for n in ("bias", "alpha", "limit", "offset")}
MXFP4: Rows = {
    "plain": (3, (64, 64, 16, 3, 2)), "all": (3, (64, 64, 32, 3, 2), SHAPED), "one_token": (1, (576, 1024, 16, 3, 3), SHAPED),
    "one_token-odd": (2, (64, 64, 16, 4, 3), ODD), "odd": (9, (64, 128, 16, 4, 3), {**SHAPED, **ODD, "index": I32}),
    "no_tokens": (0, (64, 64, 16, 3, 2)), "float64": (3, (64, 64, 16, 3, 2), F64),
    **{f"bfloat16-{tokens}_tokens": (tokens, (1088, 64, 16, 3, 2), BF16, {"weights": BF16, **SHAPED}) for tokens in (1, 17, 65)},
}  # fmt: skip

EXPERTS_CASES: dict[str, tuple[Case, ...]] = {
    "experts": table("experts", experts, EXPERTS), "mxfp4_experts": table("mxfp4_experts", mxfp4_experts, MXFP4),
}  # fmt: skip
