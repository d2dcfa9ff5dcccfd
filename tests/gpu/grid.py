"""Which cases of a grid a GPU run takes for a kernel: all of them, or a pairwise cover where each
case is compiled or built anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from attnops.core.kernel import Kernel
from attnops.core.problem import LEAVES, Problem, altered, leaf
from attnops.testing import Case, Source
from tests.pairwise import cover

ATTENTION = (
    "attention",
    "paged_attention",
    "varlen_attention",
    "mla_attention",
    "attention_backward",
    "varlen_attention_backward",
)
COVERED = {
    "flex": 4,
    "triton": 3,
    "fa4": 4,
    "xqa": 1,
    "flashinfer": 1,
    "flashinfer_mla_fa2": 1,
    "flashinfer_mla_fa3": 1,
}
"""Kernels of the attention ops that compile or build for nearly every case, and over how many tests
their cases are spread."""
PAIRS = "every pair of its values ran in another case"
UNBUILT = "its FlashInfer module is none of those that the suite builds"


@dataclass
class Share:
    """What one test runs. cases: with their seeds. refused: the first reason. left_out: labels by
    why."""

    cases: list[tuple[int, Case]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)


def shares(kernel: Kernel) -> int:
    """Over how many tests the cases of a kernel are spread."""
    return COVERED.get(kernel.name, 1) if kernel.op in ATTENTION else 1


def values(problem: Problem) -> dict[str, object]:
    """What tells two Problems apart for a compiler."""
    return {n: leaf(problem, n) for n in LEAVES if n not in ("op", "target", "workspace")}


def share_of(
    kernel: Kernel,
    cases: Sequence[Case],
    source: Callable[[int], Source],
    part: int = 0,
    parts: int = 1,
    built: Callable[[Problem, int], bool] = lambda problem, queries: True,
) -> Share:
    """The part-th of `parts` shares. What is refused or left out is counted with the first.

    Args:
        source: makes the Source of a seed, on the device to run on.
        built: for a FlashInfer kernel, whether the module of a Problem with so many queries a
            request is one that the suite builds.
    """
    out, taken = Share(), dict[int, Problem]()
    for seed, case in enumerate(cases):
        call = case.build(source(seed))
        # With the workspace, and for a kernel that reads one the plan, that check_kernel will
        # bring.
        problem = altered(call.problem, workspace=1 << 62)
        if (refused := kernel.refusals(problem)) and kernel.refusals(altered(problem, plan="host")):
            out.refused.append(f"{case}: {'; '.join(map(str, refused))}")
        elif all(t.numel() for t in call.tensors().values()) and not built(
            problem, call.arguments.get("max_seqlen_q", 0)
        ):
            out.left_out.setdefault(UNBUILT, []).append(case.label)
        else:
            taken[seed] = problem
    chosen = list(taken)
    if kernel.op in ATTENTION and kernel.name in COVERED:
        chosen = cover({seed: values(problem) for seed, problem in taken.items()})
        if left := [cases[seed].label for seed in taken if seed not in set(chosen)]:
            out.left_out[PAIRS] = left
    out.cases = [(seed, cases[seed]) for seed in chosen[part::parts]]
    if part:
        out.refused, out.left_out = [], {}
    return out
