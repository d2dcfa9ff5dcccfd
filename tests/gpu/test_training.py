"""Whole training steps in CUDA graphs: captured, replayed with new inputs, and compared with eager
ones, for every gradient kernel."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import attnops
from attnops.core.errors import NoKernel
from attnops.core.kernel import Capture, kernels_of
from tests.gpu.helpers import captured

BATCH, TOKENS, HEADS, KV_HEADS, D = 2, 256, 4, 2, 64
RULES: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": (63, -1)},
    "soft cap": {"softcap": 20.0},
    "sinks": {},
}
OPS = ("attention", "varlen_attention")
STEPS = [
    (op, name)
    for op in OPS
    for name, kernel in kernels_of(f"{op}_backward").items()
    if not kernel.judge
]
REPLAYS = 4
FAR = 0.02  # between two steps of one kernel in bfloat16, whose sums may come in another order


class Layer(nn.Module):
    """Attention between two products, dense or packed."""

    cu: Tensor

    def __init__(self, op: str, rule: str) -> None:
        super().__init__()
        self.op, self.rules = op, RULES[rule]
        self.qkv = nn.Linear(HEADS * D, (HEADS + 2 * KV_HEADS) * D)
        self.out = nn.Linear(HEADS * D, HEADS * D)
        self.sinks = nn.Parameter(torch.randn(HEADS)) if rule == "sinks" else None
        self.register_buffer(
            "cu", torch.tensor([0, TOKENS // 3, BATCH * TOKENS], dtype=torch.int32)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, D)).split([HEADS, KV_HEADS, KV_HEADS], -2)
        if self.op == "attention":
            o = attnops.attention(q, k, v, causal=True, sinks=self.sinks, **self.rules)
        else:
            q, k, v = (t.flatten(0, 1) for t in (q, k, v))
            longest: dict[str, int] = {
                "max_seqlen_q": BATCH * TOKENS,
                "max_seqlen_k": BATCH * TOKENS,
            }
            given: dict[str, Any] = {"causal": True, "sinks": self.sinks, **longest, **self.rules}
            o = attnops.varlen_attention(q, k, v, self.cu, self.cu, **given)
        return x + self.out(o.reshape(x.shape))


def gradients(run: Any, parameters: list[Tensor], x: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(run(x).float().square().mean(), parameters)


def compare(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for a, b in zip(got, want, strict=True):
        assert torch.isfinite(a).all() and float((a.float() - b.float()).norm()) <= FAR * float(
            b.float().norm()
        )


def cases(
    op: str, kernel: str, rule: str
) -> tuple[Layer, list[Tensor], list[tuple[Tensor, tuple[Tensor, ...]]]]:
    """A layer, its parameters, and inputs with the gradients of eager steps; skips what the kernel
    refuses."""
    torch.manual_seed(0)
    layer = Layer(op, rule).cuda().bfloat16()
    parameters: list[Tensor] = list(layer.parameters())
    given = [
        torch.randn(BATCH, TOKENS, HEADS * D, device="cuda", dtype=torch.bfloat16)
        for _ in range(REPLAYS)
    ]
    try:
        wanted = [tuple(g.clone() for g in gradients(layer, parameters, x)) for x in given]
    except NoKernel as error:
        pytest.skip(str(error).replace("\n", " ")[:200])
    return layer, parameters, list(zip(given, wanted, strict=True))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("op", "kernel"), STEPS)
def test_steps_compiled_with_cuda_graphs(op: str, kernel: str, rule: str) -> None:
    """mode="reduce-overhead": the forward is one CUDA graph, and the backward another."""
    with attnops.use(kernel={f"{op}_backward": kernel}):
        layer, parameters, steps = cases(op, kernel, rule)
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
        for x, want in (*steps[:1], *steps[:1], *steps):  # the first calls warm up and record
            torch.compiler.cudagraph_mark_step_begin()
            compare(tuple(g.clone() for g in gradients(compiled, parameters, x)), want)
    assert not counters["inductor"]["cudagraph_skips"]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("op", "kernel"), STEPS)
def test_steps_captured_eagerly(op: str, kernel: str, rule: str) -> None:
    """One CUDA graph of a whole step."""
    if kernels_of(f"{op}_backward")[kernel].capture is not Capture.WHOLE:
        pytest.skip("declared uncapturable")
    with attnops.use(kernel={f"{op}_backward": kernel}):
        layer, parameters, steps = cases(op, kernel, rule)
        held = steps[0][0].clone()
        graph, got = captured(partial(gradients, layer, parameters, held))
    for x, want in steps:
        held.copy_(x)
        for g in got:
            g.fill_(float("nan"))
        graph.replay()
        compare(got, want)
