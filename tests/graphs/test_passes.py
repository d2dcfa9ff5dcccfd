"""`piecewise(passes=)`: what changes the trace before it is cut; with linears over packed weights
made one."""

import torch
from torch.nn import functional as F

from attnops.graphs import piecewise
from attnops.lowering import merge_linears_pass
from attnops.nn import pack_linears
from tests.graphs.helpers import Pair, whole_and_split
from tests.graphs.models import decoder


def linears(pair, kind):
    """How many each piece holds that is compiled."""
    parts = pair.step.runner.programs[kind].split.parts
    return [
        n
        for part in parts
        if (n := sum(node.target is F.linear for node in part.module.graph.nodes))
    ]


@whole_and_split
def test_fused_steps_agree(kernel):
    """Pieces are compiled once. A bucket that is captured after a weight moved is traced anew."""
    model, seen = decoder(3, kernel=kernel), []
    pack_linears(model)
    passes = lambda gm: seen.append("first"), lambda gm: seen.append("second"), merge_linears_pass
    pair = Pair(piecewise, model=model, passes=passes)
    pair.agree("abc", [5, 3, 7])
    pair.agree("abc")
    pair.agree("ab")
    pair.agree("dbc", [4, 1, 1])
    assert linears(pair, "decode") == linears(pair, "mixed") == [1, 3, 3, 3]
    assert pair.step.report().compiled["decode"] == 3 and seen == ["first", "second"] * 2
    weight = model.layers[1].k_proj.weight
    weight.data = torch.randn_like(weight)
    pair.step.free()  # what is captured reads the old weights, as of any model
    pair.agree("ab")
    assert linears(pair, "decode") == [1, 5, 3, 3] and pair.step.runner.traces["decode"] == 2
