"""Which calls of a grid an H200 leaves to the reference, and why: all of them, so that a change is seen."""

from collections import Counter
from itertools import product

import pytest

from attnops.bench import reference_calls
from attnops.bench.files import COUNTS
from attnops.problem import Target
from tests.helpers import fresh_process

SIZES = ("1x512", "2x4096")
SAME = ("32/8 d128", "12/12 d64", "16/8 d256")
UNLIKE = "16/16 d192/128"
BACKWARD = ("attention_backward", "varlen_attention_backward")


def expected():
    """By name of the call, the field that aten_flash refuses. Masks are left: Triton's gradient and packed calls with lse take none."""
    calls = product((*BACKWARD, "varlen_attention"), SIZES, (*SAME, UNLIKE), ("bool mask", "additive mask"))
    return {f"{op}: {size}, {heads}, {mask}, trained": "v_head_dim" if heads == UNLIKE else "mask" for op, size, heads, mask in calls}


@pytest.fixture(scope="module")
def left():
    return reference_calls.left_to_reference()


def test_what_an_h200_leaves_to_the_reference(left):
    asked, decided = left
    assert asked > 2500 and {name: d.refused["aten_flash"][0].field for name, d in decided.items()} == expected()
    for name, decision in decided.items():
        assert decision.by_judge == "no kernel can run this call" and not decision.passed_over, name


def test_the_row_of_the_suite(left):
    row = reference_calls.row()
    counts = sorted(Counter(name.partition(":")[0] for name in left[1]).items())
    ops = ", ".join(f"{op} {count}" for op, count in counts)
    assert row["way"] == "NVIDIA H200" and (row["calls"], row["at_reference"], row["by_op"]) == (left[0], len(left[1]), ops)
    assert "at_reference" in COUNTS, "of which more is worse"


def test_a_grid_of_another_gpu_is_answered_anywhere():
    found = reference_calls.problems(Target("cuda", 80, assume=()))
    assert {p.target.arch for p in found.values()} == {80}
    assert fresh_process("import attnops.bench.reference_calls, torch; print(torch.cuda.is_initialized())").strip() == "False"
