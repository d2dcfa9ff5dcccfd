"""`aten`: layers that carry a state, as torch ops: the gated delta rule by chunks of 64 tokens, as
transformers works it out, and the convolution lowered in place.

Within a chunk a token's new value depends on those before it. The new values solve a triangular
system, https://arxiv.org/abs/2412.06464. The state before the chunk is on its right side.
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

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
CONV_GRADIENT = formulas.causal_conv1d_backward
NONE = frozenset[str]()
ON_CPU = Invariant((device("cpu"),))
LAUNCH_US = 5.0


def gated_delta_rule(call: GatedDeltaRule) -> None:
    """By chunks; requests are rows as long as the longest."""
    if formulas.is_blank(call):
        return
    rows, there = formulas.rows_of(call)
    whole = -(-call.max_seqlen_q // CHUNK) * CHUNK - call.max_seqlen_q

    def chunked(x: Tensor) -> Tensor:
        """`[B, tokens, Hv, ...]` as `[B, Hv, chunks, CHUNK, ...]`."""
        x = F.pad(x.movedim(1, -1), (0, whole)).unflatten(-1, (-1, CHUNK))
        return x.movedim((-2, -1), (2, 3))

    q, k, v, decay, beta = map(chunked, formulas.inputs_of(call, rows, there))
    passed = decay.cumsum(-1)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    between = (passed[..., None] - passed[..., None, :]).masked_fill(later, float("-inf")).exp()
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


def rule_cost_us(p: Problem) -> float:
    """Launches before the chunks, and of each chunk; not measured."""
    return LAUNCH_US * (40 + 7 * chunks_of(p)) + 4.0 * rule_us(p)


def conv_cost_us(p: Problem) -> float:
    """Launches of torch's own ops, or what a compiler fuses of them; not measured."""
    launches = 4 if p.step.compiled else 40
    return launches * (2.5 + conv_us(p))


register(
    Kernel(
        "aten",
        "gated_delta_rule",
        gated_delta_rule,
        dtypes=FLOATS,
        cost_us=rule_cost_us,
        about="torch's own products, by chunks of 64 tokens",
    )
)
for _op, _conv in (
    ("causal_conv1d", formulas.causal_conv1d),
    ("causal_conv1d_backward", CONV_GRADIENT),
):
    register(
        Kernel(
            "aten",
            _op,
            _conv,
            CONV_TAKES,
            FLOATS,
            cost_us=conv_cost_us,
            inline=Inline(),
            about="torch's own ops; the compiler fuses them",
        )
    )
for _op, _run, _takes, _us, _invariant in (
    ("gated_delta_rule", by_request(formulas.gated_delta_rule), NONE, rule_cost_us, ON_CPU),
    ("causal_conv1d", by_request(formulas.causal_conv1d), CONV_TAKES, conv_cost_us, ON_CPU),
    ("causal_conv1d_backward", CONV_GRADIENT, CONV_TAKES, conv_cost_us, Invariant()),
):
    register(
        Kernel(
            "reference",
            _op,
            _run,
            _takes,
            FLOATS,
            cost_us=lambda p, us=_us: 1000.0 + 10.0 * us(p),  # type: ignore[misc]
            judge=True,
            invariant=_invariant,
            about="plain torch, float32 accumulation, token after token",
        )
    )
