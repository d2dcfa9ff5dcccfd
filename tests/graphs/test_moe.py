"""Layers of experts: in the graph where their kernels take whole batches, outside where routing asks for values."""

import pytest
from torch import nn

from attnops.core.errors import NotCapturable
from attnops.graphs import Buckets, breakable, outside, piecewise
from tests.graphs.helpers import Pair
from tests.graphs.models import HIDDEN, decoder

pytest.importorskip("transformers")

BUCKETS = Buckets(decode=(2, 4), tokens=(16,), requests=4)


class Experts(nn.Module):
    """A block of experts of transformers, which wants a batch dim."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        out = self.block(x[None])
        return (out[0] if isinstance(out, tuple) else out)[0]


def model_of(family, how, marked=False):
    from attnops.hf import tiny

    model = tiny.model(family, hidden_size=HIDDEN, num_hidden_layers=1)
    model.set_experts_implementation(how)
    [layer] = model.model.layers
    if marked:
        layer.mlp.experts.forward = outside(layer.mlp.experts.forward)
    return decoder(1, mlp=lambda: Experts(layer.mlp))


FAMILIES = pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])


@pytest.mark.sweep(3)
@FAMILIES
@pytest.mark.parametrize("mode", [piecewise, breakable])
def test_grouped_experts_lie_in_the_graph(mode, family):
    pair = Pair(mode, BUCKETS, model=model_of(family, "grouped_mm"))
    if mode is breakable:
        pair.agree("abc", [2, 5, 3])
    for names in ("abc", "b", "ca"):
        pair.agree(names)
    assert set(pair.step.report().modes.values()) == {"whole"}


@pytest.mark.sweep(3)
@FAMILIES
@pytest.mark.parametrize("mode", [piecewise, breakable])
def test_experts_one_by_one_lie_outside(mode, family):
    pair = Pair(mode, BUCKETS, model=model_of(family, "eager", marked=True))
    for names in ("abc", "b", "ca"):
        pair.agree(names)
    [breaks] = {r.breaks for r in pair.step.report().rows}
    assert [b.op.rpartition(".")[2] for b in breaks] == ["forward"] and "Experts" in breaks[0].op


@pytest.mark.parametrize("mode", [piecewise, breakable])
def test_unmarked_they_are_refused(mode):
    with pytest.raises(NotCapturable):
        Pair(mode, BUCKETS, model=model_of("mixtral", "eager")).go("a")
