"""Patched transformers models under tools that record them: the recording holds torch's own ops."""

import pytest
import torch
from torch import nn

import attnops
from attnops.core.problem import Target, pretend
from attnops.hf import tiny
from tests.hf.helpers import left_padded, near, tokens

SM90 = Target("cuda", 90, assume=("triton",))
FAMILIES = ("llama", "gemma2", "gpt_oss", "deepseek_v3", "mixtral", "llama4")
"""Plain, with a soft cap, with sinks, with latents, with experts and routers, with chunks."""


class Logits(nn.Module):
    """A model as a function of tensors alone."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, mask):
        return self.model(ids, attention_mask=mask, use_cache=False).logits


def trace(model, *given):
    return torch.jit.trace(Logits(model), given, check_trace=False)


@pytest.fixture(scope="module")
def traceable():
    try:
        trace(tiny.model("llama"), tokens(), left_padded())
    except IndexError:
        pytest.skip("masks of this transformers cannot be traced, without attnops either")


@pytest.mark.sweep(4)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit.trace")
@pytest.mark.usefixtures("traceable")
@pytest.mark.parametrize("target", [None, SM90], ids=["deterministic", "sm90"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_trace_holds_no_op_of_attnops(family, target):
    """Of a model on a GPU neither, where masks are descriptors, and experts and routers kernels.

    A deterministic policy has products of the op linear in the model, but not in the trace.
    """
    model, ids, mask = tiny.model(family), tokens(), left_padded()
    want = model(ids, attention_mask=mask, use_cache=False).logits
    way = attnops.use(deterministic=True) if target is None else pretend(target)
    with attnops.patch(model, cache="hf"), way:
        traced = trace(model, ids, mask)
    assert "attnops::" not in str(traced.inlined_graph)
    seen = mask.bool()
    near(traced(ids, mask)[seen], want[seen])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_a_file_of_onnx(tmp_path):
    reason = "onnxscript (extra dev), which torch.onnx needs, is not installed"
    pytest.importorskip("onnxscript", reason=reason)
    reference = pytest.importorskip("onnx.reference", reason=reason)
    model, path = tiny.model("llama"), str(tmp_path / "model.onnx")
    given = {"ids": tokens(2, 7), "mask": left_padded(2, 7)}
    want = model(given["ids"], attention_mask=given["mask"], use_cache=False).logits
    with attnops.patch(model):
        args, names = tuple(given.values()), list(given)
        torch.onnx.export(Logits(model), args, path, dynamo=True, verbose=False, input_names=names)
    numbers = {name: value.numpy() for name, value in given.items()}
    [got] = reference.ReferenceEvaluator(path).run(None, numbers)
    seen = given["mask"].bool()
    near(torch.from_numpy(got)[seen], want[seen])
