"""RotaryEmbedding: YaRN as its paper has it, interleaved pairs, and the numbers a kernel is given instead."""

import math

import pytest
import torch

from attnops.core.errors import InvalidInput
from attnops.nn import RotaryEmbedding

D, THETA = 16, 1000.0
YARN = {"scaling": "yarn", "factor": 8.0, "original_max_position": 64, "beta_fast": 6.0, "beta_slow": 0.5}


def frequencies(truncate=True, factor=8.0, known=64, fast=6.0, slow=0.5):
    """Section 3.2 of YaRN, one pair at a time."""

    def pair(turns):
        return D * math.log(known / (turns * 2 * math.pi)) / (2 * math.log(THETA))

    low, high = pair(fast), pair(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, D - 1)
    out = []
    for i in range(D // 2):
        kept = 1 - min(max((i - low) / (high - low), 0), 1)
        plain = THETA ** (-2 * i / D)
        out.append(plain / factor * (1 - kept) + plain * kept)
    return torch.tensor(out, dtype=torch.float64)


def turned(x, positions, turns, interleaved, factor=1.0):
    """RoPE as multiplication by complex numbers. x `[T, H, D]`."""
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    angle = positions[:, None].double() * turns
    z = torch.complex(a, b) * torch.polar(torch.full_like(angle, factor), angle)[:, None]
    return torch.stack([z.real, z.imag], -1).flatten(-2) if interleaved else torch.cat([z.real, z.imag], -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("more", "factor"),
    [({}, 0.1 * math.log(8) + 1), ({"attention_factor": 0.7}, 0.7), ({"mscale": 2.0, "mscale_all_dim": 2.0}, 1.0),
     ({"mscale": 1.0, "mscale_all_dim": 0.5}, (0.1 * math.log(8) + 1) / (0.05 * math.log(8) + 1)),
     ({"truncate": False}, 0.1 * math.log(8) + 1)],
    ids=str,
)  # fmt: skip
def test_yarn(more, factor, interleaved):
    rope = RotaryEmbedding(D, THETA, **YARN, **more, interleaved=interleaved)
    q, k, at = torch.randn(5, 3, D).double(), torch.randn(5, 1, D).double(), torch.tensor([0, 1, 60, 200, 511])
    turns = frequencies(more.get("truncate", True))
    for got, x in zip(rope(q, k, at), (q, k), strict=True):
        torch.testing.assert_close(got, turned(x, at, turns, interleaved, factor), rtol=1e-9, atol=1e-9)
    cos, sin = rope.cos_sin(at, q.float())
    assert (cos.dtype, cos.shape) == (torch.float32, (5, D // 2))
    angle = at[:, None] * turns
    torch.testing.assert_close(cos.double(), angle.cos() * factor, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(sin.double(), angle.sin() * factor, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("scaling", ["none", "linear"])
def test_interleaved_pairs(scaling):
    factor = 1.0 if scaling == "none" else 4.0
    rope = RotaryEmbedding(D, THETA, scaling=scaling, factor=factor, interleaved=True)
    q, at = torch.randn(2, 5, 3, D).double(), torch.tensor([[0, 3, 9, 1, 7], [2, 2, 0, 5, 4]])
    turns = THETA ** (-torch.arange(0, D, 2).double() / D) / factor
    for row in range(2):
        torch.testing.assert_close(rope(q, q, at)[0][row], turned(q[row], at[row], turns, True))


def test_the_softmax_scale():
    assert RotaryEmbedding(D).softmax_scale() == 1.0
    assert RotaryEmbedding(D, **YARN).softmax_scale() == 1.0
    assert RotaryEmbedding(D, **YARN, mscale=1.0, mscale_all_dim=0.5).softmax_scale() == (0.05 * math.log(8) + 1) ** 2
    assert RotaryEmbedding(D, **YARN | {"factor": 1.0}, mscale_all_dim=0.5).softmax_scale() == 1.0


def test_the_repr():
    assert repr(RotaryEmbedding(D, **YARN, interleaved=True)) == (
        "RotaryEmbedding(16, theta=10000.0, scaling='yarn', factor=8.0, interleaved=True)"
    )


BAD = [
    ({"scaling": "yarn"}, "original_max_position", "None", "an int"),
    ({**YARN, "original_max_position": 0}, "original_max_position", "0", "int >= 1"),
    ({**YARN, "theta": 1.0}, "theta", "1.0", "> 1.0"),
    ({**YARN, "factor": 0.5}, "factor", "0.5", ">= 1.0"),
    ({**YARN, "beta_slow": 0.0}, "beta_slow", "0.0", ">="),
    ({**YARN, "beta_fast": 0.1}, "beta_fast", "0.1", ">= 0.5"),
    ({**YARN, "mscale": -1.0}, "mscale", "-1.0", ">= 0.0"),
    ({**YARN, "mscale_all_dim": "1"}, "mscale_all_dim", "'1'", "a number"),
    ({**YARN, "attention_factor": float("nan")}, "attention_factor", "nan", "a number"),
    ({"mscale": 1.0}, "mscale", "1.0", "unless scaling is 'yarn'"),
    ({"original_max_position": 64}, "original_max_position", "64", "unless scaling is 'yarn'"),
    ({"scaling": "linear", "factor": 2.0, "attention_factor": 1.0}, "attention_factor", "1.0", "unless scaling is 'yarn'"),
]


@pytest.mark.parametrize(("given", "field", "got", "want"), BAD, ids=[f"{i}-{b[1]}" for i, b in enumerate(BAD)])
def test_bad_inputs(given, field, got, want):
    with pytest.raises(InvalidInput) as caught:
        RotaryEmbedding(D, **given)
    assert caught.value.field == field
    assert got in str(caught.value.got) and want in caught.value.want
