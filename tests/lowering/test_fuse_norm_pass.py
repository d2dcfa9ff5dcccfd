"""A norm that no linear takes in becomes one call with its gate and its residual, and gives the
model's own bits; anything else is left, with a reason."""

from contextlib import nullcontext
from importlib import import_module

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import attnops
from attnops.core.op import not_lowered
from attnops.core.problem import Target, pretend
from attnops.hf import tiny
from attnops.lowering import fuse_norm_linear_pass, fuse_norm_pass, merge_linears_pass
from attnops.lowering.products import Product, summary
from attnops.nn import pack_linears
from attnops.ops.linear.norm import RMS_NORM
from attnops.ops.linear.record import LINEAR
from tests.lowering.models import Passing
from tests.lowering.test_fuse_norm_linear_pass import (
    autocast,
    by_power,
    gemma,
    gpt_oss,
    llama,
    other_orders,
    root,
    torchs,
)

K = 16
F32, BF16 = torch.float32, torch.bfloat16
SM90 = Target("cuda", 90, assume=("triton",))


def rounded_before(m, x, r=None):
    """Its gain is wide, and what it multiplies is not."""
    return (m.gain.to(F32) * llama_scaled(x)).to(x.dtype)


def llama_scaled(x):
    wide = x.to(F32)
    return (wide * root(wide)).to(x.dtype)


NORMS = {
    norm.__name__: norm
    for norm in (llama, gpt_oss, gemma, other_orders, by_power, torchs, rounded_before)
}


class Replacing(Passing):
    """Chooses kernels as on a GPU, and runs the graph with torch's operations in their place.
    norms: all that were found, in order."""

    def __init__(self):
        super().__init__(self._passed)
        self.norms = []

    def _passed(self, gm):
        with pretend(SM90), not_lowered():
            found = fuse_norm_pass(gm)
        for node in gm.graph.find_nodes(op="call_function", target=RMS_NORM.packet.default):
            node.kwargs = {**node.kwargs, "policy": "kernel=rms_norm:aten"}
        gm.recompile()
        self.norms += found
        return found

    @property
    def parts(self):
        return [" + ".join(norm.parts) for norm in self.norms]

    @property
    def calls_of_it(self):
        return sum(self.calls(RMS_NORM.packet.default))


class Layer(nn.Module):
    """Runs `body(layer, x, r)`."""

    def __init__(self, body, dtype=F32, gain=None):
        super().__init__()
        self.gain = nn.Parameter(torch.randn(K, dtype=gain or dtype))
        self.linear, self.body = nn.Linear(K, K, dtype=dtype), body

    def forward(self, x, r):
        return self.body(self, x, r)


def used(model, dtype=F32, shape=(2, 3, K), grad=False):
    """The backend, after a model gave the bits that it gives without."""
    backend, results = Replacing(), []
    x, r = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
    torch._dynamo.reset()
    with torch.set_grad_enabled(grad):
        for run in (torch.compile(model, backend=backend, fullgraph=True), model):
            results.append(run(x.clone(), r.clone()))
    torch.testing.assert_close(*results, rtol=0, atol=0, check_stride=True)
    return backend


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_roundings_are_those_of_the_model(norm, dtype):
    if (norm, dtype) == ("torchs", BF16) and not torch.equal(*of_torch()):
        pytest.skip("torch's own norm rounds otherwise here")
    alone = used(Layer(lambda m, x, r: NORMS[norm](m, x).sin(), dtype), dtype)
    added = used(Layer(lambda m, x, r: r + NORMS[norm](m, x), dtype), dtype)
    assert alone.parts == ["norm"] and added.parts == ["norm + residual"]
    for backend in (alone, added):
        assert backend.calls_of_it == 1 and not backend.norms[0].refusal


def gated(m, x, r, gate_dtype=F32):
    """As Qwen3-Next gates what a layer has read from its state."""
    return (llama(m, x) * nn.functional.silu(r.to(gate_dtype))).to(x.dtype)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_gates(dtype):
    for body, parts in (
        (gated, "norm + gate"),
        (lambda m, x, r: gated(m, x, r) + r, "norm + gate + residual"),
    ):
        backend = used(Layer(body, dtype), dtype)
        assert backend.parts == [parts] and backend.calls_of_it == 1
        assert not backend.norms[0].refusal


@pytest.mark.parametrize(
    ("family", "name"),
    [("qwen3_next", "Qwen3Next"), ("qwen3_5", "Qwen3_5"), ("olmo_hybrid", "OlmoHybrid")],
)
def test_gated_norms_of_transformers(family, name):
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    layer = getattr(module, f"{name}RMSNormGated")(K).to(BF16)
    backend = used(layer, BF16)
    assert backend.parts == ["norm + gate"] and backend.calls_of_it == 1


def test_gates_of_heads():
    """The gate is a part of a wider product."""

    def heads(m, x, r):
        gate = r[..., K : 3 * K].unflatten(-1, (2, K)).reshape(-1, K)
        return gated(m, x[..., : 2 * K].reshape(-1, K), gate).reshape(2, 3, -1)

    backend = used(Layer(heads, BF16), BF16, (2, 3, 4 * K))
    assert backend.parts == ["norm + gate"] and backend.calls_of_it == 1


def of_torch():
    x, gain = torch.randn(64, K).to(BF16), torch.randn(K).to(BF16)
    wide = gain * (x.float() * root(x.float()))
    return wide.to(BF16), nn.functional.rms_norm(x, (K,), gain, 1e-5)


@pytest.mark.parametrize("shape", [(K,), (5, K), (0, K), (2, 1, 3, K)], ids=str)
def test_shapes(shape):
    backend = used(Layer(lambda m, x, r: llama(m, x) + r), shape=shape)
    assert backend.calls_of_it == 1 and backend.parts == ["norm + residual"]


def test_heads_of_a_slice():
    """As the norms of queries and keys behind one product."""

    def heads(m, x, r):
        return llama(m, x[..., : 2 * K].unflatten(-1, (2, K))).transpose(1, 2)

    backend = used(Layer(heads, BF16), BF16, (2, 3, 4 * K))
    assert backend.parts == ["norm"] and backend.calls_of_it == 1


@pytest.mark.parametrize("shape", [(2, 3, 4, K), (1, 3, 4, K), (2, 1, 4, K)], ids=str)
def test_heads_that_are_transposed_stay_transposed(shape):
    """As those of Gemma 3: the strides are those of the model's own code."""
    layer = Layer(lambda m, x, r: llama(m, x.transpose(1, 2)) + r.transpose(1, 2))
    assert used(layer, shape=shape).calls_of_it == 1


def test_columns_that_are_apart_keep_torchs_operations():
    """The rows of such heads, in the order in which they lie, are no rows for the kernel."""
    layer = Layer(lambda m, x, r: llama(m, x[..., ::2].transpose(1, 2)))
    backend = used(layer, shape=(2, 3, 4, 2 * K))
    assert backend.calls_of_it == 0 and [norm.kernel for norm in backend.norms] == ["aten"]


# What is left -------------------------------------------------------------------------------------


def norm_is_read(m, x, r):
    y = llama(m, x)
    return y + r, y


def wide_is_read(m, x, r):
    wide = x.to(F32)
    return m.gain * (wide * root(wide)).to(x.dtype), wide + 1


def root_is_read(m, x, r):
    scale = root(x)
    return m.gain * (x * scale) + r, scale


def in_low_precision(m, x, r):
    return m.gain * (x * root(x))


def stays_wide(m, x, r):
    wide = x.to(F32)
    return m.gain * (wide * root(wide))


def written_between(m, x, r):
    scale = root(x)
    x.add_(0)
    return m.gain * (x * scale)


def residual_is_late(m, x, r):
    y = llama(m, x)
    x.add_(1)
    return y + r


def offset_is_wide_alone(m, x, r):
    return ((1.0 + m.gain.to(F32)) * llama_scaled(x)).to(x.dtype)


def gate_is_read(m, x, r):
    act = nn.functional.silu(r)
    return llama(m, x) * act, act


def gate_is_late(m, x, r):
    y = llama(m, x)
    act = nn.functional.silu(r)
    r.add_(1)
    return y * act


def gain_is_no_parameter(m, x, r):
    return (m.gain * 2) * (x * root(x))


def with_gradients(m, x, r):
    with torch.enable_grad():
        return llama(m, x)


def of_columns_apart(m, x, r):
    return llama(m, x.reshape(2, K, 3).transpose(1, 2))


def twice(m, x, r):
    return (y := llama(m, x)) + y


LEFT = {
    "norm is read": (norm_is_read, F32, ["norm"], "", 1),
    "sum with itself": (twice, F32, ["norm"], "", 1),
    "wide is read": (wide_is_read, BF16, [""], "reads it, too", 0),
    "root is read": (root_is_read, F32, [""], "reads it, too", 0),
    "low precision": (in_low_precision, BF16, [""], f"it is not computed in {F32}", 0),
    "stays wide": (stays_wide, BF16, [""], f"its result is {F32}, its input {BF16}", 0),
    "written between": (written_between, F32, [""], "writes one of its inputs in between", 0),
    "residual behind a write": (residual_is_late, F32, ["norm"], "residual: add_ writes", 1),
    "gate is read": (gate_is_read, F32, ["norm"], "gate: act is written or read beside it", 1),
    "gate is written": (
        lambda m, x, r: llama(m, x) * nn.functional.silu(r, inplace=True),
        F32,
        ["norm"],
        "gate: silu is written or read beside it",
        1,
    ),
    "gate behind a write": (gate_is_late, F32, ["norm"], "gate: add_ writes", 1),
    "gate of few bits": (
        lambda m, x, r: gated(m, x, r, BF16),
        BF16,
        ["norm"],
        f"gate: it is not computed in {F32}",
        1,
    ),
    "gate of a row": (
        lambda m, x, r: gated(m, x, r[:1]),
        F32,
        ["norm"],
        "gate: of another shape or dtype",
        1,
    ),
    "wide gate": (
        lambda m, x, r: llama(m, x) * nn.functional.silu(r.to(F32)),
        BF16,
        ["norm"],
        "gate: of another shape or dtype",
        1,
    ),
    "offset": (offset_is_wide_alone, BF16, [""], f"rounded to {BF16} before its gain", 0),
    "gain": (gain_is_no_parameter, F32, [], "", 0),
    "broadcast": (
        lambda m, x, r: llama(m, x) + r[:1],
        F32,
        ["norm"],
        "residual: of another shape or dtype",
        1,
    ),
    "wide sum": (
        lambda m, x, r: llama(m, x) + r.double(),
        F32,
        ["norm"],
        "residual: of another shape or dtype",
        1,
    ),
    "strides": (of_columns_apart, F32, ["norm"], "its result would have other strides", 0),
    "grad mode": (with_gradients, F32, [], "", 0),
    "autocast": (lambda m, x, r: autocast(m, llama(m, x)), F32, [], "", 0),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left(name):
    body, dtype, parts, why, calls = LEFT[name]
    layer = Layer(body, dtype)
    layer.square = layer.linear
    backend = used(layer, dtype)
    assert backend.parts == parts and all(why in norm.refusal for norm in backend.norms)
    assert backend.calls_of_it == calls
    assert all(bool(norm.kernel) == bool(calls) for norm in backend.norms)


def test_gains_of_another_dtype_and_class():
    backend = used(Layer(lambda m, x, r: gpt_oss(m, x), BF16, F32), BF16)
    assert backend.norms[0].refusal == f"norm: of {BF16} by a gain of {F32}"
    layer = Layer(lambda m, x, r: llama(m, x))
    layer.gain = nn.Parameter(TwoTensor(layer.gain.data, layer.gain.data), requires_grad=False)
    assert "TwoTensor" in used(layer).norms[0].refusal


def test_grad_mode_and_outside_of_a_compiler():
    assert not used(Layer(lambda m, x, r: llama(m, x) + r), grad=True).norms
    later = Passing(lambda gm: None)
    with torch.no_grad():
        torch.compile(Layer(lambda m, x, r: llama(m, x)), backend=later)(*torch.randn(2, 3, K))
        assert fuse_norm_pass(*later.graphs) == ()


# Kernels and policies -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "lowered", "kernel"),
    [("cpu", False, "aten"), ("h200", False, "triton"), ("h200", True, "aten")],
)
def test_torchs_operations_stay_where_they_are_the_fastest(target, lowered, kernel):
    """On a CPU, and where a compiler fuses them."""
    found, graphs = [], []

    def backend(gm, _):
        there = pretend(Target.parse(target, ("triton",))) if target != "cpu" else nullcontext()
        with there:
            found.extend(fuse_norm_pass(gm))
        graphs.append(gm)
        return lambda *given: (torch.zeros(()),)

    torch._dynamo.reset()
    x = torch.randn(8, K)
    with torch.no_grad(), nullcontext() if lowered else not_lowered():
        torch.compile(Layer(lambda m, x, r: llama(m, x) + r), backend=backend)(x, x)
    [norm] = found
    assert (norm.parts, norm.kernel) == (("norm", "residual"), kernel)
    calls = graphs[0].graph.find_nodes(op="call_function", target=RMS_NORM.packet.default)
    assert len(calls) == (kernel == "triton")


def test_another_policy_compiles_anew():
    backend, x = Passing(fuse_norm_pass), torch.randn(3, K)
    compiled = torch.compile(Layer(lambda m, x, r: llama(m, x) + r), backend=backend)
    with torch.no_grad():
        for _ in range(2):
            compiled(x, x)
            with attnops.use(kernel={"rms_norm": "reference"}):
                compiled(x, x)
    assert backend.calls(RMS_NORM.packet.default) == [0, 1]
    assert [norm.kernel for found in backend.found for norm in found] == ["aten", "reference"]


def test_a_kernel_that_cannot_run_is_a_reason():
    backend, x = Passing(fuse_norm_pass), torch.randn(3, K)
    compiled = torch.compile(Layer(lambda m, x, r: llama(m, x) + r), backend=backend)
    with torch.no_grad(), attnops.use(kernel={"rms_norm": "triton"}):
        compiled(x, x)
    [[norm]] = backend.found
    assert norm.refusal.startswith("triton: target=cpu") and not norm.kernel


# Layers of models ---------------------------------------------------------------------------------

AROUND = ["norm + residual"] * 2
FAMILIES = {
    # The norms of queries and keys, then those after attention and MLP.
    "gemma2": AROUND,
    "gemma3": ["norm", "norm", *AROUND],
    "glm4": AROUND,
    "olmo2": ["norm", "norm", *AROUND],
    # All norms are the linears'.
    "llama": [],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_models(family):
    """Linears take their norms first."""
    layers = {"layer_types": ["sliding_attention"]} if family in ("gemma2", "gemma3") else {}
    model = tiny.model(family, num_hidden_layers=1, **layers)
    backend, ids = Replacing(), torch.arange(6).view(2, 3)

    def run(gm, inputs):
        with pretend(SM90), not_lowered():
            merge_linears_pass(gm)
            fuse_norm_linear_pass(gm)
        for node in gm.graph.find_nodes(op="call_function", target=LINEAR.packet.default):
            node.kwargs = {**node.kwargs, "policy": "kernel=linear:aten"}
        return backend(gm, inputs)

    torch._dynamo.reset()
    with torch.no_grad():
        want = model(ids).logits
        attnops.patch(model)
        pack_linears(model)
        model.model.layers[0].compile(backend=run, fullgraph=True)
        torch.testing.assert_close(model(ids).logits, want, rtol=1e-5, atol=1e-5)
    assert backend.parts == FAMILIES[family] and backend.calls_of_it == len(FAMILIES[family])
    assert {norm.kernel for norm in backend.norms} <= {"triton"}


def test_norms_count_apart_from_linears():
    norms = used(Layer(lambda m, x, r: llama(m, x) + r)).norms
    linear = Product("weight", ("linear",), "aten")
    assert summary([linear, *norms, *norms]) == (
        "linears of compiled layers, 1 of 1 recognised: 1 linear by aten",
        "norms of compiled layers, 1 of 1 recognised: 1 norm + residual by triton",
    )


@pytest.mark.parametrize(
    ("family", "name", "wide", "offset"),
    [
        ("llama", "Llama", False, 0.0),
        ("glm4", "Glm4", False, 0.0),
        ("olmo2", "Olmo2", True, 0.0),
        ("gemma2", "Gemma2", False, 1.0),
        ("gemma3", "Gemma3", False, 1.0),
    ],
)
@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16], ids=str)
@torch.no_grad()
def test_the_op_has_the_bits_of_transformers(family, name, wide, offset, dtype):
    module = import_module(f"transformers.models.{family}.modeling_{family}")
    norm = getattr(module, f"{name}RMSNorm")(K, eps=1e-6).to(dtype)
    norm.weight.data = torch.randn(K).to(dtype)
    x, r = (3 * torch.randn(2, 2, 5, K)).to(dtype)
    given = {"offset": offset, "wide_gain": wide, "residual": r, "kernel": "aten"}
    assert torch.equal(attnops.ops.rms_norm(x, norm.weight, 1e-6, **given), r + norm(x))
