"""RotaryEmbedding: YaRN as its paper has it, interleaved pairs, and the numbers a kernel is given
instead."""

import math

import pytest
import torch

from attnops.nn import RotaryEmbedding
from tests.modules import close, turned

D, THETA = 16, 1000.0
YARN = {
    "scaling": "yarn",
    "factor": 8.0,
    "original_max_position": 64,
    "beta_fast": 6.0,
    "beta_slow": 0.5,
}


def frequencies(truncate):
    """Section 3.2 of YaRN, one pair at a time."""
    low, high = (
        D * math.log(64 / (turns * 2 * math.pi)) / (2 * math.log(THETA)) for turns in (6.0, 0.5)
    )
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    out = []
    for i in range(D // 2):
        slow = min(max((i - max(low, 0)) / (min(high, D - 1) - max(low, 0)), 0), 1)
        plain = THETA ** (-2 * i / D)
        out.append(plain / 8.0 * slow + plain * (1 - slow))
    return torch.tensor(out, dtype=torch.float64)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("more", "factor"),
    [
        ({}, 0.1 * math.log(8) + 1),
        ({"attention_factor": 0.7}, 0.7),
        ({"mscale": 2.0, "mscale_all_dim": 2.0}, 1.0),
        (
            {"mscale": 1.0, "mscale_all_dim": 0.5},
            (0.1 * math.log(8) + 1) / (0.05 * math.log(8) + 1),
        ),
        ({"truncate": False}, 0.1 * math.log(8) + 1),
    ],
    ids=str,
)
def test_yarn(more, factor, interleaved):
    rope = RotaryEmbedding(D, THETA, **YARN, **more, interleaved=interleaved)
    q = torch.randn(5, 3, D).double()
    k = torch.randn(5, 1, D).double()
    at = torch.tensor([0, 1, 60, 200, 511])
    turns = frequencies(more.get("truncate", True))
    for got, x in zip(rope(q, k, at), (q, k), strict=True):
        close(got, turned(x, at, turns, interleaved, factor), 1e-9)
    cos_sin, angle = torch.stack(rope.cos_sin(at, q.float())), at[:, None] * turns
    assert cos_sin.dtype == torch.float32
    close(cos_sin.double(), torch.stack([angle.cos(), angle.sin()]) * factor, 1e-3)


def test_llama3():
    """The rule of Llama 3.1, one wavelength at a time."""
    known, factor, slow, fast = 64, 8.0, 1.0, 4.0
    turns = []
    for i in range(D // 2):
        plain = THETA ** (-2 * i / D)
        within = known * plain / (2 * math.pi)
        if within < slow:
            turns.append(plain / factor)
        elif within > fast:
            turns.append(plain)
        else:
            smooth = (within - slow) / (fast - slow)
            turns.append((1 - smooth) * plain / factor + smooth * plain)
    rope = RotaryEmbedding(
        D,
        THETA,
        scaling="llama3",
        factor=factor,
        original_max_position=known,
        beta_slow=slow,
        beta_fast=fast,
    )
    q, at = torch.randn(5, 3, D).double(), torch.tensor([0, 1, 60, 200, 511])
    close(rope(q, q, at)[0], turned(q, at, torch.tensor(turns, dtype=torch.float64)), 1e-9)


@pytest.mark.parametrize("scaling", ["none", "linear"])
def test_interleaved_pairs(scaling):
    factor = 1.0 if scaling == "none" else 4.0
    rope = RotaryEmbedding(D, THETA, scaling=scaling, factor=factor, interleaved=True)
    q, at = torch.randn(2, 5, 3, D).double(), torch.tensor([[0, 3, 9, 1, 7], [2, 2, 0, 5, 4]])
    turns = THETA ** (-torch.arange(0, D, 2).double() / D) / factor
    for row in range(2):
        close(rope(q, q, at)[0][row], turned(q[row], at[row], turns, True))


def test_the_softmax_scale():
    assert RotaryEmbedding(D).softmax_scale() == 1.0
    assert RotaryEmbedding(D, **YARN).softmax_scale() == 1.0
    assert (
        RotaryEmbedding(D, **YARN, mscale=1.0, mscale_all_dim=0.5).softmax_scale()
        == (0.05 * math.log(8) + 1) ** 2
    )
    assert RotaryEmbedding(D, **YARN | {"factor": 1.0}, mscale_all_dim=0.5).softmax_scale() == 1.0
