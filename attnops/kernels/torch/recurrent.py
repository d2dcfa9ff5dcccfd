"""`aten`: layers that carry a state, as torch ops: the gated delta rule and the scan of Mamba-2 by
chunks of 64 tokens, as transformers works them out, and the convolution lowered in place.

Within a chunk of the rule a token's new value depends on those before it. The new values solve a
triangular system, https://arxiv.org/abs/2412.06464. The state before the chunk is on its right
side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from attnops.core.kernel import Inline, Invariant, Kernel, device, register
from attnops.core.problem import Problem
from attnops.kernels.shared.recurrent import CHUNK, CONV_TAKES, chunks_of, conv_us, rule_us
from attnops.kernels.torch.by_request import by_request
from attnops.ops.recurrent import reference as formulas

if TYPE_CHECKING:
    from attnops.ops.recurrent.record import GatedDeltaRule
    from attnops.ops.recurrent.scan import Mamba2Scan

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LAUNCH_US = 5.0


def gated_delta_rule(call: GatedDeltaRule) -> None:
    """By chunks; requests are rows as long as the longest."""
    if formulas.is_blank(call):
        return
    rows, there = formulas.rows_of(call)
    q, k, v, decay, beta = map(_chunked, formulas.inputs_of(call, rows, there))
    passed = decay.cumsum(-1)
    between = _between(passed)
    system = (k * beta[..., None]) @ k.mT * between
    seen = q @ k.mT * between
    keys = k * (beta * passed.exp())[..., None]
    solve = torch.linalg.solve_triangular
    values = solve(system, v * beta[..., None], upper=False, unitriangular=True)
    keys = solve(system, keys, upper=False, unitriangular=True)

    q = q * passed.exp()[..., None]
    k = k * (passed[..., -1:] - passed).exp()[..., None]
    left = passed[..., -1].exp()[..., None, None]
    state, outputs = formulas.state_before(call).to(k.dtype), list[Tensor]()
    for i in range(k.shape[2]):
        new = values[:, :, i] - keys[:, :, i] @ state
        outputs.append(q[:, :, i] @ state + seen[:, :, i] @ new)
        state = state * left[:, :, i] + k[:, :, i].mT @ new
    found = torch.cat(outputs, 2)[:, :, : call.max_seqlen_q]
    formulas.put(call, found.transpose(1, 2), rows, there)
    call.state.copy_(state)


def mamba2_scan(call: Mamba2Scan) -> None:
    """By chunks; requests are rows as long as the longest."""
    if formulas.is_blank(call):
        return
    rows, there = formulas.rows_of(call)
    x, dt, b, c = map(_chunked, formulas.scan_inputs(call, rows, there))
    passed = (dt * call.a.to(dt.dtype)[:, None, None]).cumsum(-1)
    values = x * dt[..., None]
    inside = (c @ b.mT * _between(passed)) @ values
    if call.d is not None:
        inside = inside + x * call.d.to(x.dtype)[:, None, None, None]
    c = c * passed.exp()[..., None]
    stays = (values * (passed[..., -1:] - passed).exp()[..., None]).mT @ b
    left = passed[..., -1].exp()[..., None, None]
    state, outputs = formulas.state_before(call).to(b.dtype), list[Tensor]()
    for i in range(b.shape[2]):
        outputs.append(c[:, :, i] @ state.mT + inside[:, :, i])
        state = state * left[:, :, i] + stays[:, :, i]
    found = torch.cat(outputs, 2)[:, :, : call.max_seqlen_q]
    formulas.put(call, found.transpose(1, 2), rows, there)
    call.state.copy_(state)


def _chunked(x: Tensor) -> Tensor:
    """`[B, tokens, Hv, ...]` as `[B, Hv, chunks, CHUNK, ...]`, with 0 past the tokens."""
    x = F.pad(x.movedim(1, -1), (0, -x.shape[1] % CHUNK)).unflatten(-1, (-1, CHUNK))
    return x.movedim((-2, -1), (2, 3))


def _between(passed: Tensor) -> Tensor:
    """How much of what a token (last dim) writes is left for another (the dim before) of its chunk.
    passed: the logarithm of what is left of the state before the chunk, `[..., CHUNK]`."""
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=passed.device).triu(1)
    return (passed[..., None] - passed[..., None, :]).masked_fill(later, float("-inf")).exp()


def rule_cost_us(p: Problem) -> float:
    """Launches before the chunks, and of each chunk; not measured."""
    return LAUNCH_US * (40 + 7 * chunks_of(p)) + 4.0 * rule_us(p)


def conv_cost_us(p: Problem) -> float:
    """Launches of torch's own ops, or what a compiler fuses of them; not measured."""
    launches = 4 if p.step.compiled else 40
    return launches * (2.5 + conv_us(p))


for _rule in (gated_delta_rule, mamba2_scan):
    register(
        Kernel(
            "aten",
            _rule.__name__,
            _rule,
            dtypes=FLOATS,
            cost_us=rule_cost_us,
            about="torch's own products, by chunks of 64 tokens",
        )
    )
register(
    Kernel(
        "aten",
        "causal_conv1d",
        formulas.causal_conv1d,
        CONV_TAKES,
        FLOATS,
        cost_us=conv_cost_us,
        inline=Inline(),
        about="torch's own ops; the compiler fuses them",
    )
)
for _op, _run, _takes, _us in (
    ("gated_delta_rule", formulas.gated_delta_rule, frozenset[str](), rule_cost_us),
    ("mamba2_scan", formulas.mamba2_scan, frozenset[str](), rule_cost_us),
    ("causal_conv1d", formulas.causal_conv1d, CONV_TAKES, conv_cost_us),
):
    register(
        Kernel(
            "reference",
            _op,
            by_request(_run),
            _takes,
            FLOATS,
            cost_us=lambda p, us=_us: 1000.0 + 10.0 * us(p),  # type: ignore[misc]
            judge=True,
            invariant=Invariant((device("cpu"),)),
            about="plain torch, float32 accumulation, token after token",
        )
    )
