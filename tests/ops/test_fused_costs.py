"""Plain torch that a compiler fuses has one price in compiled code and another in an eager call.

An eager call launches each of its torch ops.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import attnops
from attnops.core.kernel import kernels_of
from attnops.core.problem import Extent, Problem, Target, altered
from attnops.core.select import DECODE, select
from attnops.kernels.torch.reference import INLINE, LAUNCHES
from attnops.testing import CASES

TARGETS = [Target.parse(name, ("triton",)) for name in ("h100", "h200", "b200")]
RIVALS = {op: run for op, run, *_ in INLINE if "triton" in kernels_of(op)}
MERGES = ("merge_state", "merge_states")


class Launches(TorchDispatchMode):
    """How many torch ops run that are no views."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("op", RIVALS)
def test_a_body_launches_as_many_ops_as_it_is_priced_for(op):
    largest = max(
        (case.call() for case in CASES[op]),
        key=lambda call: sum(t.numel() for t in call.tensors().values()),
    )
    with Launches() as launches:
        RIVALS[op](largest.record)
    assert launches.count >= LAUNCHES


def problem(op, target, tokens, parts=2):
    dtype = torch.bfloat16 if op in MERGES else torch.int32
    heads = {"q_heads": 32, "v_head_dim": 128} if op in MERGES else {"page_size": 64}
    sizes = {"tokens": Extent.of(tokens), "batch": Extent.of(parts)}
    return Problem.of(op, target, dtype=dtype, kv_dtype=dtype, lse=op in MERGES, **heads, **sizes)


@pytest.mark.parametrize("tokens", [1, 64, 8192])
@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.gpu)
@pytest.mark.parametrize("op", RIVALS)
def test_an_eager_call_takes_one_launch(op, target, tokens):
    for parts in (2, 133):
        asked = problem(op, target, tokens, parts)
        assert select(asked).kernel.name == "triton"
        # The choice of a deterministic policy is one for eager and compiled calls.
        both = {
            select(altered(asked, compiled=c), "deterministic").kernel.name for c in (False, True)
        }
        assert len(both) == 1


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.gpu)
def test_compiled_code_fuses_small_merges(target):
    for op in MERGES:
        assert select(altered(problem(op, target, 64), compiled=True)).kernel.name == "reference"
        assert select(altered(problem(op, target, 8192), compiled=True)).kernel.name == "triton"


class Merge(torch.nn.Module):
    def forward(self, output, lse):
        return attnops.merge_state(output, lse, output, lse)[0]


def test_explain_tells_a_compiled_model_from_another():
    given = torch.randn(DECODE[0], 32, 128), torch.randn(DECODE[0], 32)
    for plain in (Merge().eval(), Merge().eval().forward):
        compiled = torch.compile(plain)
        for model, kernel in ((plain, "triton"), (compiled, "reference")):
            found = attnops.explain(model, *given, target="h200", quiet=True)
            assert found.chosen() == (f"merge_state.{kernel}",)
