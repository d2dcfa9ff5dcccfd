"""`piecewise(passes=)`: what changes the trace before it is cut; with linears over packed weights made one."""

import pytest
import torch
from torch.nn import functional as F

from attnops.graphs import piecewise
from attnops.lowering import merge_linears_pass
from attnops.nn import pack_linears
from tests.graphs.helpers import Pair
from tests.graphs.models import BOUNDARY, decoder


def linears(pair, kind):
    """How many each piece holds that is compiled."""
    parts = pair.step.programs[kind].split.parts
    return [n for part in parts if (n := sum(node.target is F.linear for node in part.module.graph.nodes))]


@pytest.mark.full
@pytest.mark.parametrize("kernel", [None, BOUNDARY], ids=["whole", "split"])
def test_fused_steps_agree(kernel):
    model = decoder(2, kernel=kernel)
    pack_linears(model)
    pair = Pair(piecewise, model=model, passes=(merge_linears_pass,))
    pair.agree("abc", [5, 3, 7])
    pair.agree("abc")
    pair.agree("ab")
    pair.agree("dbc", [4, 1, 1])
    assert linears(pair, "decode") == linears(pair, "mixed") == [1, 3, 3]
    plain = Pair(piecewise, model=model)
    plain.agree("a")
    assert linears(plain, "decode") == [3, 5, 3]


def test_pieces_are_still_compiled_once():
    model = decoder(4, kernel=BOUNDARY)
    pack_linears(model)
    pair = Pair(piecewise, model=model, passes=(merge_linears_pass,))
    pair.agree("ab")
    report = pair.step.report()
    assert (report.compiled["decode"], report.parts["decode"]) == (3, 5)


def test_a_bucket_captured_after_a_weight_moved():
    model = decoder(1)
    pack_linears(model)
    pair = Pair(piecewise, model=model, passes=(merge_linears_pass,))
    pair.agree("ab")
    weight = model.layers[0].k_proj.weight
    weight.data = torch.randn_like(weight)
    pair.step.free()  # what is captured reads the old weights, as of any model
    pair.agree("ab")
    assert linears(pair, "decode") == [3, 3] and pair.step.traces["decode"] == 2


def test_passes_run_in_order_once_a_trace():
    seen = []
    pair = Pair(piecewise, passes=(lambda gm: seen.append("first"), lambda gm: seen.append("second")))
    pair.agree("ab")
    pair.agree("ab")
    pair.agree("abc", [1, 1, 2])
    assert seen == ["first", "second"] * 2
