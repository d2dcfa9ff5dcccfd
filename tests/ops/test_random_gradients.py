"""2,000 random gradients: the reference against autograd of the plain formula in float64, and every
kernel that runs here against it."""

import random
from collections import Counter

import pytest
import torch

from attnops.core.kernel import kernels_of
from attnops.testing import Source, check_kernel
from tests.formula import agrees, gradients
from tests.fuzz import OPS, SHORT, drawn, features

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
BLOCK, BLOCKS = 100, 20


@pytest.mark.sweep(21)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_random_gradients(block):
    taken = Counter()
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        draw = random.Random(seed)
        call = drawn(draw, Source(seed), features(draw, FLOATS, (1, 4, 8, 16)), SHORT)
        agrees(call)
        for kernel in kernels_of(call.op).values():
            figures = check_kernel(kernel, call)
            assert figures.worst <= 1.0, f"seed {seed}: {figures}"
            taken[call.op, kernel.name] += not figures.refused
    assert (
        all(taken[op, "reference"] > BLOCK // 4 for op in OPS)
        and taken["attention_backward", "aten_flash"]
    ), taken


@pytest.mark.parametrize(
    "change",
    [{"attention_chunk": 4}, {"window_left": 1}, {"softcap": 0.5}, {"scale": 0.3}],
    ids=str,
)
@pytest.mark.parametrize("op", OPS)
def test_the_formula_tells_rules_apart(op, change):
    draw = random.Random(3)
    call = drawn(draw, Source(3), features(draw, (torch.float64,), (8,)), SHORT[3:], op, least=5)
    other = gradients(call.with_(**change))
    assert any(not torch.allclose(x, other[n]) for n, x in gradients(call).items() if x.numel())
