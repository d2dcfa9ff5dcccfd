"""The cases of the experts of a mixture, and of their routing."""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.ops.case_data import BF16, F16, F32, F64, I32, Given, Grid, Rows, Scene, at

SMALL, WIDE = (24, 20, 28), (144, 72, 136)
FEW = (*SMALL, 6, 2)
OSS = {
    "bias": True,
    "along": True,
    "interleaved": True,
    "alpha": 1.702,
    "limit": 0.9,
    "offset": 1.0,
}
ODD, BIAS, ALONG = {"odd": True}, {"bias": True}, {"along": True}
EXPERTS: Rows = {
    **at(
        (3, FEW),
        {
            "plain": {},
            "bias": BIAS,
            "gelu": {"activation": "gelu"},
            "gelu_tanh": {"activation": "gelu_tanh"},
            "interleaved": {"interleaved": True},
            "limit": {"limit": 0.5},
            "alpha": {"alpha": 1.702},
            "offset": {"offset": 1.0},
            "along": ALONG,
            "all": OSS,
            "int32": {"index": I32},
        },
    ),
    "odd": (7, (*SMALL, 6, 3), ODD),
    "no_tokens": (0, FEW),
    "one_number": (1, (1, 1, 1, 1, 1)),
    "one_expert": (3, (*SMALL, 1, 1)),
    "float64": (3, FEW, F64, OSS),
    "float32_one_token": (1, (*WIDE, 6, 3), OSS),
    "float32_one_token-odd": (2, (*SMALL, 6, 3), {**OSS, **ODD}),
    **{
        f"{name}-{tokens}_tokens": (tokens, (*WIDE, 8, 3), BF16, {"weights": BF16}, *more)
        for tokens in (1, 2, 17, 64, 65)
        for name, more in (("bfloat16", (ODD,)), ("bfloat16_all", (OSS,)))
    },
    "float16": (2, (*WIDE, 20, 4), F16, BIAS),
    "float16_one_token": (1, (*WIDE, 20, 4), F16, ALONG),
    "bfloat16_many": (2, (*SMALL, 40, 12), BF16),
}

SHAPED = {n: OSS[n] for n in ("bias", "alpha", "limit", "offset")}
MXFP4: Rows = {
    "plain": (3, (64, 64, 16, 3, 2)),
    "all": (3, (64, 64, 32, 3, 2), SHAPED),
    "one_token": (1, (576, 1024, 16, 3, 3), SHAPED),
    "one_token-odd": (2, (64, 64, 16, 4, 3), ODD),
    "odd": (9, (64, 128, 16, 4, 3), {**SHAPED, **ODD, "index": I32}),
    "no_tokens": (0, (64, 64, 16, 3, 2)),
    "float64": (3, (64, 64, 16, 3, 2), F64),
    **{
        f"bfloat16-{tokens}_tokens": (
            tokens,
            (1088, 64, 16, 3, 2),
            BF16,
            {"weights": BF16, **SHAPED},
        )
        for tokens in (1, 17, 65)
    },
}

SIGMOID, NORMAL, SHIFTED = {"scoring": "sigmoid"}, {"normalize": True}, {"bias": F32}
V2 = {"groups": 4, "top_groups": 2, "scale": 16.0}
V3 = {
    **SIGMOID,
    **NORMAL,
    **SHIFTED,
    "groups": 4,
    "top_groups": 2,
    "group_best": 2,
    "eps": 1e-20,
    "scale": 2.5,
}
TIES, EXTREME, APART = {"ties": True}, {"odd": True}, {"along": True}
FEW_OF_24 = (3, 24, 4)
ROUTES: Rows = {
    **at(
        FEW_OF_24,
        {
            "plain": {},
            "sigmoid": SIGMOID,
            "normalize": NORMAL,
            "scale": {"scale": 2.5},
            "eps": NORMAL | {"eps": 0.1},
            "eps_sigmoid": NORMAL | SIGMOID | {"eps": 0.1},
            "bias": SHIFTED,
            "bias_sigmoid": SHIFTED | SIGMOID,
            "groups": V2,
            "group_best": V2 | SIGMOID | {"group_best": 3},
            "all_groups": V3 | {"top_groups": 4},
        },
    ),
    "all": (5, 24, 4, V3),
    "groups_of_one": (3, 6, 2, {"groups": 6, "top_groups": 3}),
    "no_tokens": (0, 24, 4, V3),
    "one_expert": (3, 1, 1),
    "every_expert": (3, 7, 7, NORMAL),
    "along": (5, 24, 4, APART | V3),
    "float64": (*FEW_OF_24, F64, V3),
    "float16": (3, 33, 5, F16, {"weights": F16}),
    "float16_bias": (*FEW_OF_24, F16, V3 | {"bias": F16}),
    **{
        f"{name}-{kind}": (9, 24, 6, more | rule)
        for name, more in (("ties", TIES), ("odd", EXTREME))
        for kind, rule in (
            ("plain", {}),
            ("normalize", NORMAL),
            ("sigmoid", SIGMOID),
            ("groups", V2),
            ("all", V3),
        )
    },
    "ties-bfloat16": (9, 128, 8, BF16, TIES | NORMAL),
    "odd-bfloat16": (9, 128, 8, BF16, EXTREME | NORMAL),
    "qwen3": (5, 128, 8, BF16, NORMAL | {"weights": BF16}),
    "gpt_oss": (5, 32, 4, BF16, NORMAL | {"weights": BF16}),
    "deepseek_v3": (5, 256, 8, V3 | {"groups": 8, "top_groups": 4}),
    "deepseek_v2": (5, 160, 6, V2 | {"groups": 8, "top_groups": 3}),
    "mixtral": (1, 8, 2, BF16, NORMAL),
    "most": (2, 512, 32, BF16, SIGMOID | NORMAL),
    "too_many": (2, 514, 33, SIGMOID),
}


def _mixture(
    scene: Scene,
    sizes: tuple[int, int, int, int, int],
    bias: bool = False,
    along: bool = False,
    odd: bool = False,
    weights: torch.dtype = F32,
) -> Given:
    """sizes: In, Inner, Out, the experts, and those that each token chooses.

    along: rows of a weight are next to each other in memory. odd: some tokens choose one expert
    twice, or a number that is no expert.
    """
    source, tokens, (columns, inner, outs, count, k) = scene.source, scene.sizes["T"], sizes
    scene.sizes |= {
        "In": columns,
        "Inner": inner,
        "Half": inner // 2,
        "Out": outs,
        "E": count,
        "K": k,
    }
    rows = [source.permutation(count)[:k] for _ in range(tokens)]
    if odd:
        rows = [
            [(row[0], count, -1, count + 7)[i % 4], *row[1:]] if i % 3 else [row[-1], *row[1:]]
            for i, row in enumerate(rows)
        ]
    chosen = source.ints(rows, scene.index).reshape(tokens, k)
    made: Given = {
        "top_k_index": chosen,
        "top_k_weights": weights,
        "gate_up_bias": bias,
        "down_bias": bias,
    }
    unused = torch.tensor([e not in chosen for e in range(count)], device=source.device)
    # Weights of four bits are read, whatever they are.
    scene.free |= {
        a.name: unused for a in scene.spec.args if a.dims.startswith("E,") and a.dtypes == "x"
    }
    scene.free["top_k_weights"] = (chosen < 0) | (chosen >= count)
    if along:
        made |= {
            n: _along(scene, *shape)
            for n, shape in (("gate_up", (2 * inner, columns)), ("down", (outs, inner)))
        }
    return made


def _along(scene: Scene, rows: int, columns: int) -> Tensor:
    made = scene.source.normal(
        scene.sizes["E"], rows, columns, dtype=scene.f.dtype, spread=columns**-0.5
    )
    return made.transpose(1, 2).contiguous().transpose(1, 2)


def _routed(scene: Scene, ties: bool = False, odd: bool = False, along: bool = False) -> Given:
    """ties: many experts are equal. odd: some logits are -inf, and some 0 or -0. along: the logits
    of an expert are next to each other in memory.
    """
    source, tokens, count = scene.source, scene.sizes["T"], scene.sizes["E"]

    def numbers(*shape: int, dtype: torch.dtype) -> Tensor:
        made = source.normal(*shape, dtype=dtype, spread=2.0)
        return made.round() if ties else made

    logits = numbers(tokens, count, dtype=scene.f.dtype)
    if odd:
        for value in (float("-inf"), -0.0, 0.0):
            logits[:, 1:].masked_fill_(
                source.chance(tokens, count - 1, p=0.3), value
            )  # all at -inf would have no weights
    bias = scene.given.get("bias")
    made = {
        "logits": logits.T.contiguous().T if along else logits,
        "weights": scene.given.get("weights", F32),
    }
    return made if bias is None else made | {"bias": numbers(count, dtype=bias) / 4}


CASES = {
    "experts": Grid("T sizes dtype", EXPERTS, _mixture),
    "mxfp4_experts": Grid("T sizes dtype", MXFP4, _mixture),
    "route": Grid("T E K dtype", ROUTES, _routed),
}
