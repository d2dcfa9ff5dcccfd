"""Layers of experts: in the graph where their kernels take whole batches, outside where routing asks for values."""

import pytest
from torch import nn

from attnops.core.errors import NotCapturable
from attnops.graphs import Buckets, breakable, outside
from tests.graphs.helpers import Pair, both_modes
from tests.graphs.models import HIDDEN, decoder

pytest.importorskip("transformers", reason="its layers are those of transformers")
from attnops.hf import tiny

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
    model = tiny.model(family, hidden_size=HIDDEN, num_hidden_layers=1)
    model.set_experts_implementation(how)
    [layer] = model.model.layers
    if marked:
        layer.mlp.experts.forward = outside(layer.mlp.experts.forward)
    return decoder(1, mlp=lambda: Experts(layer.mlp))


@pytest.mark.sweep(3)
@pytest.mark.parametrize("how", ["grouped_mm", "eager"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@both_modes
def test_experts(mode, family, how):
    """Grouped they lie in the graph. One by one they lie outside, if they are marked so."""
    pair = Pair(mode, BUCKETS, model=model_of(family, how, marked=how == "eager"))
    if mode is breakable:
        pair.agree("abc", [2, 5, 3])
    for names in ("abc", "b", "ca"):
        pair.agree(names)
    report = pair.step.report()
    assert set(report.modes.values()) == {"whole" if how == "grouped_mm" else "piecewise"}
    [breaks] = {r.breaks for r in report.rows}
    assert [b.op.rpartition(".")[2] for b in breaks] == ["forward"] * (how == "eager")


@both_modes
def test_unmarked_they_are_refused(mode):
    with pytest.raises(NotCapturable):
        Pair(mode, BUCKETS, model=model_of("mixtral", "eager")).go("a")
