"""attnops under tools that record code: the recording gives the same numbers, or is refused."""

import contextlib

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

import attnops
from attnops import ops
from attnops.core.errors import InvalidInput, NotRecordable, find
from attnops.core.op import OPS
from attnops.nn import (
    Attention,
    LatentAttention,
    MultiheadAttention,
    RotaryEmbedding,
    SelfAttention,
)
from tests.adapters.helpers import Calls as Ops
from tests.ops.calls import FUNCTIONS as PUBLIC, good

CU = torch.tensor([0, 2, 5], dtype=torch.int32)
FUNCTIONS = [name for name in PUBLIC if not name.startswith("plan_")]
"""The public functions of ops, but for plans, which are made outside of models."""


class Calls(nn.Module):
    """A module around a function of one tensor."""

    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, query):
        return self.call(query)


def heads(x):
    return x.unflatten(-1, (4, 8))


class Around(nn.Module):
    """A module of attention, called with its input as query, key and value."""

    def __init__(self, attention, **more):
        super().__init__()
        self.attention, self.more = attention, more

    def forward(self, x):
        out = self.attention(*(x if self.more else heads(x),) * 3, **self.more)
        return out[0] if self.more else out


def attention(x):
    return attnops.attention(*(heads(x),) * 3)


def varlen_attention(x):
    return attnops.varlen_attention(*(heads(x[0]),) * 3, CU, CU, max_seqlen_q=3, max_seqlen_k=3)


def encoder():
    layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)
    made = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    made.layers[0].self_attn = MultiheadAttention(32, 4, batch_first=True)
    return made.eval()


LATENT = {
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "rope": RotaryEmbedding(4, interleaved=True),
}
MODULES = {
    "attention": lambda: Calls(attention),
    "varlen_attention": lambda: Calls(varlen_attention),
    "Attention": lambda: Around(Attention(4, head_dim=8)),
    "SelfAttention": lambda: SelfAttention(32, 4, 2, qk_norm=True, rope=RotaryEmbedding(8)),
    "LatentAttention": lambda: LatentAttention(32, 4, **LATENT),
    "MultiheadAttention": lambda: Around(
        MultiheadAttention(32, 4, batch_first=True), need_weights=False
    ),
    "TransformerEncoder": encoder,
}
X, OTHER = torch.randn(2, 5, 32), torch.randn(3, 7, 32)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit.trace")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_a_trace_holds_the_op_for_tensors_of_any_sizes(name, grad):
    module = MODULES[name]()
    with torch.set_grad_enabled(grad):
        traced = torch.jit.trace(module, X)
        assert "attnops::" in str(traced.inlined_graph)
        for x in (X, OTHER):
            torch.testing.assert_close(traced(x), module(x))


@pytest.mark.parametrize("name", [name for name in MODULES if name != "TransformerEncoder"])
def test_symbolic_traces_are_refused(name):
    """torch.fx traces no TransformerEncoder, whatever its attention is."""
    with pytest.raises(InvalidInput, match=r"make the module a leaf of the Tracer"):
        torch.fx.symbolic_trace(MODULES[name]())


@pytest.mark.parametrize("name", [name for name in MODULES if name[0].isupper()])
def test_scripts_of_modules_are_refused(name):
    with pytest.raises(NotRecordable, match=r"got torch.jit.script, want torch.export"):
        torch.jit.script(MODULES[name]())


def scripted(x: torch.Tensor):
    return attnops.attention(x, x, x)


def test_scripts_of_functions_are_refused():
    with pytest.raises(RuntimeError, match=r"attention: got torch.jit.script, want torch.export"):
        torch.jit.script(scripted)


@torch.no_grad()
@pytest.mark.parametrize("name", FUNCTIONS)
def test_vmap_maps_what_writes_nothing(name):
    """By a loop over the batch, which is torch's; what writes into its arguments is refused."""
    call, arguments = PUBLIC[name], good(name)
    field = next(n for n, value in arguments.items() if isinstance(value, torch.Tensor))
    batch = torch.stack([arguments[field]] * 2)
    run = torch.vmap(lambda x: call(**(arguments | {field: x})))
    op = OPS.get(name) or OPS[{"merge_states": "merge_many"}[name]]
    writes = any(a.written for a in op.spec.args)
    refused = pytest.raises(NotRecordable, match=r"got torch.vmap")
    with refused if writes else contextlib.nullcontext():
        got = tree_leaves(run(batch))
        want = [torch.stack([each] * 2) for each in tree_leaves(call(**arguments))]
        torch.testing.assert_close(got, want)


# ONNX ---------------------------------------------------------------------------------------------

SAID = {
    "plain": {},
    "scaled": {"scale": 0.3},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (2, -1)},
    "both sides": {"window": (1, 2)},
    "chunk": {"causal": True, "attention_chunk": 3},
    "mask": {"mask": torch.rand(5, 7).gt(0.5)},
    "additive": {"mask": torch.randn(5, 7), "causal": True},
    "range": {"kv_start": torch.tensor([1, 0]), "kv_end": torch.tensor([5, 6]), "causal": True},
}
UNSAID = {
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": torch.zeros(4)},
    "return_lse": {"return_lse": True},
}
Q, K = torch.randn(2, 5, 4, 8), torch.randn(2, 7, 2, 8)


def attend(q, k, **options):
    return attnops.attention(q, k, k, **options)


def recorded(options, key):
    """The graph of a call, as torch.onnx.export would make it."""
    made = make_fx(
        lambda q, k: attend(q, k, **options),
        tracing_mode="fake",
        _allow_non_fake_inputs=True,
    )
    return made(Q, key)


@pytest.fixture
def onnx(monkeypatch):
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("how", SAID)
def test_attention_in_torchs_own_ops(how, grouped, monkeypatch):
    """A query that sees no key gives 0."""
    key = K if grouped else torch.randn(2, 7, 4, 8)
    want = attend(Q, key, **SAID[how])
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    graph = recorded(SAID[how], key)
    assert not [node for node in graph.graph.nodes if "attnops" in str(node.target)]
    torch.testing.assert_close(graph(Q, key), want)


@pytest.mark.parametrize("how", UNSAID)
def test_what_torchs_own_attention_cannot_say_is_refused(how, onnx):
    with pytest.raises(NotRecordable, match=f"attention: got torch.onnx.export with {how}"):
        recorded(UNSAID[how], K)


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "attention"])
def test_other_ops_are_refused(name, onnx):
    refused = pytest.raises(NotRecordable, match=r"got torch.onnx.export, want the model without")
    with refused, Ops():
        PUBLIC[name](**good(name))


def test_a_program_is_decomposed():
    sizes = ({0: Dim("B"), 1: Dim("S", min=2)},)
    program = torch.export.export(SelfAttention(32, 4, 2), (X,), dynamic_shapes=sizes)
    assert "attnops" in str(program.graph)
    decomposed = program.run_decompositions(ops.decompositions())
    assert "attnops" not in str(decomposed.graph)
    torch.testing.assert_close(decomposed.module()(OTHER), program.module()(OTHER))


@pytest.fixture
def exporter():
    reason = "onnxscript (extra dev), which torch.onnx needs, is not installed"
    pytest.importorskip("onnxscript", reason=reason)
    return pytest.importorskip("onnx.reference", reason=reason)


@pytest.mark.sweep(3)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("how", ["causal", "window", "range"])
def test_a_file_of_onnx(how, dynamo, exporter, tmp_path):
    module = Calls(lambda q: attend(q, q[:, :, ::2], **SAID[how]))
    path = str(tmp_path / "model.onnx")
    torch.onnx.export(module, (Q,), path, dynamo=dynamo, verbose=False, input_names=["query"])
    [got] = exporter.ReferenceEvaluator(path).run(None, {"query": Q.numpy()})
    torch.testing.assert_close(torch.from_numpy(got), module(Q))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["softcap", "varlen_attention"])
def test_an_error_of_an_export_leads_to_ours(name, exporter, tmp_path):
    capped = Calls(lambda q: attend(q, q, softcap=3.0))
    module, x = (capped, Q) if name == "softcap" else (MODULES[name](), X)
    path = str(tmp_path / "model.onnx")
    with pytest.raises(Exception, match=r"got torch.onnx.export") as caught:
        torch.onnx.export(module, (x,), path, dynamo=True, verbose=False)
    assert isinstance(find(caught.value), NotRecordable)
