"""Patched models under tools that record them, which see the code that attnops replaced."""

import pytest
import torch
from torch import nn

import attnops
from tests.adapters.helpers import Calls, Layer
from tests.adapters.test_vision import START, VISION
from tests.helpers import ready_process, torch_process

VIT = """
from torchvision.models.feature_extraction import create_feature_extractor
from torchvision.models.vision_transformer import VisionTransformer
torch.manual_seed(0)
sizes = {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32}
vit = VisionTransformer(image_size=16, patch_size=8, **sizes).eval()
torch.nn.init.normal_(vit.heads.head.weight)
images, others = torch.randn(2, 3, 16, 16), torch.randn(3, 3, 16, 16)
want = vit(others)
attnops.patch(vit)
features = create_feature_extractor(vit, ["heads"])
TOOLS = {
    "script": lambda: torch.jit.script(vit),
    "trace": lambda: torch.jit.trace(vit, images),
    "fx": lambda: torch.fx.symbolic_trace(vit),
    "features": lambda: lambda images: create_feature_extractor(vit, ["heads"])(images)["heads"],
}
for name, make in TOOLS.items():
    recorded = make()
    torch.testing.assert_close(recorded(others), want)
    if name in ("script", "trace"):
        assert "attnops::" not in str(recorded.inlined_graph), name
        torch.jit.save(recorded, PATH)
print("done")
"""
LOAD = """
import torch, sys
print(torch.jit.load(PATH)(torch.ones(1, 3, 16, 16)).shape, "attnops" in sys.modules)
"""


ADDRESSES = """
import gc
import torch, attnops
from torch.jit._builtins import _get_builtin_table

alive = {id(x) for x in gc.get_objects()}
print([name for address, name in _get_builtin_table().items() if name.startswith("attnops::") and address not in alive])
"""  # noqa: E501


def test_torch_jit_knows_no_op_by_the_address_of_what_is_gone():
    """Another object may get that address, which torch.jit.script then takes for the op."""
    assert torch_process(ADDRESSES) == "[]\n"


@pytest.mark.slow
def test_a_vit_of_torchvision(tmp_path):
    if not VISION.exists():
        pytest.skip(f"torchvision is not in {VISION}, where `make` puts it")
    path = f"PATH = {str(tmp_path / 'vit.pt')!r}\n"
    assert ready_process("\n".join([START, path, VIT])).endswith("done\n")
    assert torch_process(path + LOAD) == "torch.Size([1, 1000]) False\n"


class Traced(Layer):
    """As Layer, in code that torch.jit.script compiles."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(attended.transpose(1, 2).flatten(2))


def encoder():
    layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def own():
    return nn.Sequential(Traced(), Traced())


TOOLS = {
    "script": lambda model, x: torch.jit.script(model),
    "trace": lambda model, x: torch.jit.trace(model, x),
    "fx": lambda model, x: torch.fx.symbolic_trace(model),
}
X, OTHER = torch.randn(2, 5, 32), torch.randn(3, 7, 32)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit")
@pytest.mark.parametrize("kernel", [None, "reference"])
@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("make", [encoder, own])
def test_recorded_models(make, tool, kernel):
    torch.manual_seed(0)
    model = make().eval()
    if tool == "fx" and isinstance(model, nn.TransformerEncoder):
        # It does not trace an encoder.
        model = nn.Sequential(*(Attends(layer.self_attn) for layer in model.layers))
    want = model(OTHER)
    handle = attnops.patch(model, kernel=kernel)
    recorded = TOOLS[tool](model, X)
    with Calls() as calls:
        torch.testing.assert_close(model(OTHER), want)
    assert calls.names == ["attnops::attention"] * 2  # the model stays patched
    handle.unpatch()
    with Calls() as calls:
        torch.testing.assert_close(recorded(OTHER), want)
    assert not [name for name in calls.names if name.startswith("attnops")]


class Attends(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


@pytest.mark.sweep(2)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("make", [encoder, own])
def test_a_file_of_onnx(make, dynamo, tmp_path):
    reason = "onnxscript (extra dev), which torch.onnx needs, is not installed"
    pytest.importorskip("onnxscript", reason=reason)
    reference = pytest.importorskip("onnx.reference", reason=reason)
    model, path = make().eval(), str(tmp_path / "model.onnx")
    want = model(X)
    with attnops.patch(model):
        torch.onnx.export(model, (X,), path, dynamo=dynamo, verbose=False, input_names=["x"])
    [got] = reference.ReferenceEvaluator(path).run(None, {"x": X.numpy()})
    torch.testing.assert_close(torch.from_numpy(got), want)


class Tagged(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kdim", [None, 24])
def test_classes_of_tensors_are_torchs(need_weights, batch_first, kdim):
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(32, 4, batch_first=batch_first, kdim=kdim, vdim=kdim)
    memory = OTHER.mean(-1, keepdim=True).expand(3, 7, kdim or 32)
    query = OTHER.as_subclass(Tagged)
    want = attention(query, memory, memory, need_weights=need_weights)
    with attnops.patch(attention), Calls() as calls:
        got = attention(query, memory, memory, need_weights=need_weights)
    torch.testing.assert_close(got, want)
    assert isinstance(got[0], Tagged)
    assert not [name for name in calls.names if name.startswith("attnops")]
