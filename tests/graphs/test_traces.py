"""What a trace took for given stays with it."""

import gc
import weakref

import pytest
import torch

from attnops.core.errors import NotCapturable
from attnops.graphs import Buckets, piecewise
from tests.graphs.helpers import both_modes, close, graphed

DEPENDS = {
    "a tensor": lambda x: (x * 2, x[x > 0]),
    "a number": lambda x: {"a": x.sum().item()},
    "a whole number": lambda x: x.long().sum().item(),
    "a size": lambda x: x.nonzero().shape[0],
}


@pytest.mark.parametrize("what", DEPENDS)
def test_results_that_depend_on_data_are_refused(what):
    """A caller would be given those of the capture at every step."""
    step = graphed(piecewise, DEPENDS[what], Buckets(tokens=(4,)), tokens=("x",))
    with pytest.raises(
        NotCapturable, match="the model returns it, and its size or value depends on data"
    ):
        step(torch.ones(4))


def test_pieces_of_two_traces_are_compiled_each():
    """The first 8 of more rows, and of fewer: the same operations on sizes of the same names, and
    not the same code."""

    def known(module, examples):
        # As Inductor does: sizes that follow from what is known of the others are written into the
        # code.
        rows = module.graph.output_node().args[0][0].meta["example_value"].shape[0]
        fixed = int(rows) if str(rows).isdigit() else None

        def run(*given):
            out = module(*given)
            assert fixed is None or out[0].shape[0] == fixed
            return out

        return run

    def forward(tokens):
        if tokens.shape[0] > 8:
            torch._check(True)
        return (tokens * 2)[:8]

    step = graphed(piecewise, forward, Buckets(tokens=(4, 16)), returns="whole", inner=known)
    close(step(torch.ones(16)), forward(torch.ones(16)))
    # A slice that may be shorter than asked has a size of its own there, as if from data.
    if torch.__version__ < "2.12":
        with pytest.raises(NotCapturable, match="its size or value depends on data"):
            step(torch.ones(4))
        return
    close(step(torch.ones(4)), forward(torch.ones(4)))
    assert step.runner.traces == {"mixed": 2}


@both_modes
def test_a_model_dies_with_its_step(mode):
    """Dynamo keeps what it compiled."""
    model = torch.nn.Linear(4, 4)
    step = graphed(mode, model, Buckets(tokens=(2,)), tokens=("input",))
    step(torch.ones(2, 4))
    weights = weakref.ref(model.weight)
    del model, step
    gc.collect()
    assert weights() is None
