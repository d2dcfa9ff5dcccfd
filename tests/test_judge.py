"""Which calls of a grid an H200 leaves to the reference, and why: none, and without one of our
kernels these, so that a change is seen."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from attnops.core.foreign import is_foreign
from attnops.core.kernel import kernels_of
from attnops.core.problem import Problem, Target, altered
from attnops.core.select import select_by
from attnops.lowering.explain import packages_of_kernels
from attnops.measured import Sizes, in_force
from attnops.ops.attention.timed import DENSE, PACKED
from attnops.ops.latent.timed import MLA
from attnops.ops.pages.timed import PAGED
from attnops.testing.timed_calls import problem_at, problem_of
from attnops.tune import sweeps_of

H200 = Target("cuda", 90, packages_of_kernels(), "NVIDIA H200")
BFLOAT16, FLOAT32 = (
    {"dtype": dtype, "kv_dtype": dtype} for dtype in (torch.bfloat16, torch.float32)
)
DIMS = ("q_heads", "kv_heads", "head_dim", "v_head_dim")
HEADS = ((32, 8, 128, 128), (12, 12, 64, 64), (16, 8, 256, 256), (16, 16, 192, 128))
CAUSAL: dict[str, Any] = {"causal": True}
RULES: tuple[dict[str, Any], ...] = (
    CAUSAL,
    {},
    {**CAUSAL, "window": (1023, 0)},
    {**CAUSAL, "softcap": True},
    {**CAUSAL, "sinks": True, "sinks_dtype": torch.bfloat16},
    {"mask": "bool"},
    {"mask": "additive"},
)


def timed() -> Iterator[Problem]:
    """The calls that `attnops tune` times."""
    for sweep in sweeps_of("full"):
        # Without a workspace one kernel of this op remains.
        room = 1 << 30 if sweep.kind.op == "decode_attention" else 0
        for at in filter(sweep.allows, sweep.points()):
            yield altered(problem_at(sweep.kind, at, H200), workspace=room)


def dense() -> Iterator[Problem]:
    """`attention` and `varlen_attention`, with and without gradients."""
    every = product(
        (DENSE, PACKED), (False, True), HEADS, RULES, ((1, 512), (2, 4096)), (BFLOAT16,)
    )
    wide = (DENSE, True, HEADS[0], CAUSAL, (2, 4096), FLOAT32)
    for like, trained, heads, rules, (batch, length), dtypes in (*every, wide):
        shape = altered(like, causal=False, **dict(zip(DIMS, heads, strict=True)))
        plain = problem_of(shape, [length] * batch, [length] * batch, H200)
        problem = altered(plain, padded=True, lse=trained, **dtypes, **rules)
        if trained or like is PACKED or "mask" in rules:
            yield problem
        if trained:
            yield altered(problem, op=f"{shape.op}_backward", lse=False, grad=True)


def paged() -> Iterator[Problem]:
    """Over pages and over latents."""
    float8 = altered(PAGED, kv_dtype=torch.float8_e4m3fn, kv_scales=True)
    sizes = ((8, 1), (8, 4), (1, 512))
    for mask, (batch, queries), shape in product(
        ("none", "bool", "additive"), sizes, (PAGED, float8, MLA)
    ):
        plain = problem_of(shape, [queries] * batch, [4096] * batch, H200)
        yield altered(plain, mask=mask, padded=True, holes=True)


def test_what_an_h200_leaves_to_the_reference():
    table, asked = in_force(H200).table, [*timed(), *dense(), *paged()]

    def left(policy, some):
        found = [select_by(table, problem, policy) for problem in some]
        return [decision for decision in found if decision.kernel is None or decision.by_judge]

    assert len(asked) > 2500 and not left("", asked)
    packed = [problem for problem in asked if problem.op == "varlen_attention"]
    without = left("deny=varlen_attention:triton", packed)
    assert len(without) == 16, "packed calls with a mask and lse, and no gradient"
    for decision in without:
        p = decision.problem
        assert p.rules.mask != "none" and p.results.lse
        assert decision.refused["aten_flash"][0].field == (
            "mask" if p.head_dim == p.v_head_dim else "v_head_dim"
        )
        assert decision.by_judge == "no kernel can run this call" and not decision.passed_over


def test_plain_torch_is_never_estimated_below_a_kernel_of_a_cpu():
    """Estimates are those of GPUs. flex is left out: on a CPU its estimate counts its
    compilation."""
    cpu = Target("cpu")
    for sweep in sweeps_of("full"):
        for batch, queries, ratio in ((1, 1, 131072), (64, 1, 131072), (8, 2048, 1), (64, 8192, 4)):
            problem = problem_at(
                altered(sweep.kind, **FLOAT32),
                Sizes(float(batch), float(queries), float(ratio)),
                cpu,
            )
            decision = select_by(None, problem)
            assert decision.kernel is not None
            known = kernels_of(problem.op)
            others = [
                n
                for n in decision.costs
                if n != "flex" and not (known[n].judge or is_foreign(known[n]))
            ]
            assert not (decision.kernel.judge and others), decision
