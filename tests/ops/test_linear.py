"""Linear layers: `aten` is transformers' own layers bit for bit, and what a compiler makes of it;
leading dims of any number."""

from importlib import import_module

import pytest
import torch

from attnops import ops
from attnops.ops.case_data import BF16, F16, F32
from attnops.testing import Source
from tests.lowering.models import compiled_code, kernel_calls

transformers = pytest.importorskip("transformers")

H, M = 48, 80
ACTIVATIONS = {
    "llama": ("silu", {}),
    "gemma": ("gelu_tanh", {"hidden_activation": "gelu_pytorch_tanh"}),
}


def layers(family, dtype):
    """(norm, what to add to its gain, MLP, activation) of a family, with random weights."""
    module, name = import_module(f"transformers.models.{family}.modeling_{family}"), family.title()
    activation, more = ACTIVATIONS[family]
    sizes = {
        "hidden_size": H,
        "intermediate_size": M,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = getattr(transformers, f"{name}Config")(**sizes, **more)
    norm, mlp = (getattr(module, f"{name}{part}") for part in ("RMSNorm", "MLP"))
    norm, mlp, source = norm(H, 1e-5).to(dtype), mlp(config).to(dtype), Source(3)
    for p in (*norm.parameters(), *mlp.parameters()):
        p.data = source.normal(*p.shape, dtype=dtype, spread=0.3)
    return norm, float(family == "gemma"), mlp, activation


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma"])
@torch.no_grad()
def test_the_bits_are_those_of_transformers(family, dtype):
    norm, offset, mlp, activation = layers(family, dtype)
    x = Source(4).normal(2, 3, H, dtype=dtype, spread=2.0)
    both = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
    given = {
        "norm_weight": norm.weight,
        "norm_eps": 1e-5,
        "norm_offset": offset,
        "activation": activation,
        "kernel": "aten",
    }
    inner = ops.linear(x, both, **given)
    got = ops.linear(inner, mlp.down_proj.weight, residual=x, kernel="aten")
    want = x + mlp(norm(x))
    # One product of both halves may add up in another order than two.
    torch.testing.assert_close(
        got, want, rtol=2 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps
    )
    n = norm(x)
    assert torch.equal(inner, mlp.act_fn((n @ both.T)[..., :M]) * (n @ both.T)[..., M:])


@pytest.mark.parametrize("lead", [(), (2, 1, 3), (0, 4)], ids=str)
def test_leading_dims(lead):
    x, w, r = torch.randn(*lead, 8), torch.randn(6, 8), torch.randn(*lead, 6)
    want = torch.nn.functional.linear(x, w) + r
    out = torch.full_like(want, float("nan"))
    torch.testing.assert_close(ops.linear(x, w, residual=r), want)
    assert ops.linear(x, w, residual=r, output=out) is out
    torch.testing.assert_close(out, want)


def test_the_compiler_fuses_it_as_if_no_op_was_there():
    x, r, gain, w = torch.randn(2, 3, H), torch.randn(2, 3, M), torch.rand(H), torch.randn(2 * M, H)

    def layer(x, r):
        return (
            ops.linear(x + 1, w, norm_weight=gain, norm_eps=1e-5, activation="silu", residual=r) * 2
        )

    with torch.no_grad():
        got, code = compiled_code(lambda: torch.compile(layer, fullgraph=True)(x, r))
    torch.testing.assert_close(got, layer(x, r))
    assert not kernel_calls(code)
    body = code[code.index("def call(") :]
    assert body.count("extern_kernels.mm(") == 1
    assert body.count("        cpp_fused_") == 2, "one before the product and one after it"
