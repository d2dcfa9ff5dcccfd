"""What `decode="piecewise"` does to the weights, and that it is undone."""

import copy

import pytest
import torch
from torch import nn

from attnops.hf import tiny
from attnops.nn import pack_linears
from tests.hf.decoding import CALL, beside, graphed


def storages(model):
    """Bytes of all storages that weights lie in."""
    return sum(
        {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in model.parameters()
        }.values()
    )


def alone(*weights):
    return all(weight.untyped_storage().nbytes() == weight.nbytes for weight in weights)


def test_weights_lie_together_while_patched():
    model = tiny.model("llama")
    before, bytes_before = copy.deepcopy(model.state_dict()), storages(model)
    q, k = (getattr(model.model.layers[0].self_attn, name).weight for name in ("q_proj", "k_proj"))
    with beside(model, "piecewise") as pair:
        assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
        pair.same(*CALL)
    assert alone(q, k) and storages(model) == bytes_before
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    for mode, pack in (("breakable", True), ("piecewise", False)):
        with beside(model, mode, pack=pack):
            assert storages(model) == bytes_before and alone(q)


def test_what_was_packed_before_stays_packed():
    model = tiny.model("llama")
    packed = pack_linears(model)
    graphed(model, "piecewise").unpatch()
    assert packed.holds()


@pytest.mark.parametrize("other", [nn.Sequential, lambda own: nn.Identity(), None])
def test_a_module_that_was_replaced_hinders_no_unpatch(other):
    model = tiny.model("llama")
    handle = graphed(model, "piecewise")
    attention = model.model.layers[0].self_attn
    if other is None:
        del attention.q_proj
    else:
        attention.q_proj = other(attention.q_proj)
    assert not handle._paged.packed.holds()
    handle.unpatch()
    assert not handle.active and "generate" not in vars(model)
    assert alone(attention.k_proj.weight, attention.v_proj.weight)


def test_a_packing_that_fails_leaves_the_model_unpatched(monkeypatch):
    model = tiny.model("llama")
    before = set(vars(model)), model.config._attn_implementation

    def fails(model):
        raise torch.OutOfMemoryError("attnops: a test's")

    monkeypatch.setattr("attnops.hf.page_model.pack_linears", fails)
    with pytest.raises(torch.OutOfMemoryError):
        graphed(model, "piecewise")
    assert (set(vars(model)), model.config._attn_implementation) == before
    assert not any(module._forward_pre_hooks for module in model.modules())
    monkeypatch.undo()
    with graphed(model, "piecewise") as handle:
        assert handle._paged.packed.holds()
