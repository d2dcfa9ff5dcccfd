"""Which calls of a grid an H200 leaves to the reference, and why: none, and without one of our kernels these, so that a change is seen."""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import torch

from attnops.core.problem import Extent, Problem, Target, altered
from attnops.core.select import select_by
from attnops.lowering.explain import packages_of_kernels
from attnops.measured import in_force
from attnops.ops.attention.timed import DENSE, PACKED
from attnops.ops.latent.timed import MLA
from attnops.ops.pages.timed import PAGED
from attnops.testing.timed_calls import problem_at, problem_of
from attnops.tune import sweeps_of

BF16 = torch.bfloat16
H200 = Target("cuda", 90, packages_of_kernels(), "NVIDIA H200")
HEADS = {
    "32/8 d128": (32, 8, 128, 128), "12/12 d64": (12, 12, 64, 64), "16/8 d256": (16, 8, 256, 256), "16/16 d192/128": (16, 16, 192, 128),
}  # fmt: skip
RULES: Mapping[str, Mapping[str, Any]] = {
    "causal": {"causal": True}, "not causal": {}, "window": {"causal": True, "window": (1023, 0)},
    "soft cap": {"causal": True, "softcap": True}, "sinks": {"causal": True, "sinks": True, "sinks_dtype": BF16},
    "bool mask": {"mask": "bool"}, "additive mask": {"mask": "additive"},
}  # fmt: skip
SIZES = {"1x512": (1, 512), "2x4096": (2, 4096)}  # requests and tokens of each


def problems() -> dict[str, Problem]:
    """The Problems of the grid on an H200, by name."""
    room = {"decode_attention": 1 << 30}  # without a workspace one kernel of this op remains
    some = [(p.kind, at) for p in sweeps_of("full") for at in p.points() if p.allows(at)]
    timed = [altered(problem_at(shape, at, H200), workspace=room.get(shape.op, 0)) for shape, at in some]
    found = {f"{problem.op}: {problem.summary()}": problem for problem in timed}
    return found | {f"{problem.op}: {name}": problem for some in (_dense, _paged, _sparse) for name, problem in some()}


def _dense() -> Iterator[tuple[str, Problem]]:
    """`attention` and `varlen_attention`, with and without gradients."""
    wide = (DENSE, True, "32/8 d128", "causal", SIZES["2x4096"], torch.float32)
    every = product((DENSE, PACKED), (0, 1), HEADS, RULES, SIZES.values(), (BF16,))
    for like, trained, heads, rule, (batch, length), dtype in (*every, wide):
        if trained or like is PACKED or "mask" in RULES[rule]:
            shape = altered(like, causal=False, **dict(zip(("q_heads", "kv_heads", "head_dim", "v_head_dim"), HEADS[heads], strict=True)))
            timed = problem_of(shape, [length] * batch, [length] * batch, H200)
            problem = altered(timed, dtype=dtype, kv_dtype=dtype, padded=True, **RULES[rule])
            name = f"{batch}x{length}, {heads}, {rule}" + ", float32" * (dtype != BF16) + ", trained" * trained
            yield name, altered(problem, lse=bool(trained))
            if trained:
                yield name, altered(problem, op=f"{shape.op}_backward", grad=True)


def _paged() -> Iterator[tuple[str, Problem]]:
    """Over pages and over latents."""
    shapes: Any = (("", PAGED, {}), (", float8 pages", PAGED, {"kv_dtype": torch.float8_e4m3fn, "kv_scales": True}), ("", MLA, {}))
    found: Any = product(("no", "bool", "additive"), ((8, 1), (8, 4), (1, 512)), shapes)
    for mask, (batch, queries), (remark, shape, more) in found:
        timed = problem_of(shape, [queries] * batch, [4096] * batch, H200)
        problem = altered(timed, mask="none" if mask == "no" else mask, padded=True, holes=True, **more)
        yield f"{batch}x{queries} of 4096, {mask} mask{remark}", problem


def _sparse() -> Iterator[tuple[str, Problem]]:
    """2048 latents a token, bfloat16 or packed in 656 bytes."""
    like = altered(problem_of(altered(MLA, causal=False), [1], [2048], H200), op="sparse_mla_attention", padded=True, holes=True)
    like = altered(like, batch=Extent(0, 0, 0), queries=Extent(0, 0, 0))
    for heads, stored, tokens, sinks in product((16, 64, 128), (BF16, torch.uint8), (1, 64, 4096), (False, True)):
        name = f"{tokens} tokens, {heads} heads, {'packed' if stored == torch.uint8 else 'bfloat16'} latents" + ", sinks" * sinks
        more: Any = {"sinks": True, "sinks_dtype": torch.float32, "asks": frozenset({"topk_length"})} if sinks else {}
        yield name, altered(like, q_heads=heads, kv_dtype=stored, tokens=Extent.of(tokens), **more)


SAME = ("32/8 d128", "12/12 d64", "16/8 d256")
UNLIKE = "16/16 d192/128"


WITHOUT = "deny=varlen_attention:triton"


def expected():
    """By name of the call, the field that aten_flash refuses WITHOUT triton: packed calls with a mask and lse, and no gradient."""
    calls = product(SIZES, (*SAME, UNLIKE), ("bool mask", "additive mask"))
    refused = {heads: "v_head_dim" if heads == UNLIKE else "mask" for heads in (*SAME, UNLIKE)}
    return {f"varlen_attention: {size}, {heads}, {mask}, trained": refused[heads] for size, heads, mask in calls}


def test_what_an_h200_leaves_to_the_reference():
    table, asked = in_force(H200).table, problems()
    left, denied = {}, {name: problem for name, problem in asked.items() if problem.op == "varlen_attention"}
    for policy, some in (("", asked), (WITHOUT, denied)):
        found = ((name, select_by(table, problem, policy)) for name, problem in some.items())
        left[policy] = {name: decision for name, decision in found if decision.kernel is None or decision.by_judge}
    assert len(asked) > 2500 and not left[""]
    assert {name: d.refused["aten_flash"][0].field for name, d in left[WITHOUT].items()} == expected()
    for name, decision in left[WITHOUT].items():
        assert decision.by_judge == "no kernel can run this call" and not decision.passed_over, name
