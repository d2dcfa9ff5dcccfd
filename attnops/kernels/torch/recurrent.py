"""`aten`: layers that carry a state, as torch ops: the gated delta rule and the scan of Mamba-2 by
chunks of 64 tokens, as transformers works them out, and the convolution lowered in place.

Within a chunk of the rule a token's new value depends on those before it. The new values solve a
triangular system, https://arxiv.org/abs/2412.06464. The state before the chunk is on its right
side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from attnops.core.kernel import Inline, Invariant, Kernel, device, register
from attnops.core.problem import Problem
from attnops.core.tensors import compact
from attnops.kernels.shared.recurrent import (
    CHUNK,
    CONV_TAKES,
    KEPT_OF_CONVS,
    KEPT_OF_RULES,
    KEPT_OF_SCANS,
    chunks_of,
    conv_us,
    rule_us,
)
from attnops.kernels.torch.by_request import by_request, by_state
from attnops.ops.recurrent import reference as formulas, scan_gradient_reference as of_scan

if TYPE_CHECKING:
    from attnops.ops.recurrent.record import GatedDeltaRule, GatedDeltaRuleBackward
    from attnops.ops.recurrent.scan import Mamba2Scan, Mamba2ScanBackward

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
CONV_GRADIENT = formulas.causal_conv1d_backward
NONE, KEEPING = frozenset[str](), CONV_TAKES | KEPT_OF_CONVS
ON_CPU = Invariant((device("cpu"),))
LAUNCH_US = 5.0


class Chunks(NamedTuple):
    """What tokens are whatever the state before their chunk, `[B, Hv, chunks, CHUNK, ...]`.

    fades: what is left at a token of the state before the chunk; left: at the last token. stays:
    what is left of a token at the chunk's end. between: what is left at a row's token of a
    column's.
    system: its strictly lower part and 1 on the diagonal, times the new values, is what a token
    adds. seen: the weights of new values in the output. values - keys @ state: the new values.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    fades: Tensor
    stays: Tensor
    left: Tensor
    between: Tensor
    system: Tensor
    seen: Tensor
    keys: Tensor
    values: Tensor


solve = torch.linalg.solve_triangular


def solved(call: Any, rows: Tensor, there: Tensor) -> Chunks:
    """The chunks of a call."""
    q, k, v, decay, beta = map(_chunked, formulas.inputs_of(call, rows, there))
    passed = decay.cumsum(-1)
    fades = passed.exp()[..., None]
    stays = (passed[..., -1:] - passed).exp()[..., None]
    between = _between(passed)
    beta = beta[..., None]
    system = (k * beta) @ k.mT * between
    seen = q @ k.mT * between
    values = solve(system, v * beta, upper=False, unitriangular=True)
    keys = solve(system, k * beta * fades, upper=False, unitriangular=True)
    left = fades[..., -1:, :]
    return Chunks(q, k, v, beta, fades, stays, left, between, system, seen, keys, values)


def gated_delta_rule(call: GatedDeltaRule) -> None:
    """By chunks; requests are rows as long as the longest."""
    if formulas.is_blank(call):
        return
    rows, there = formulas.rows_of(call)
    c = solved(call, rows, there)
    q, k = c.q * c.fades, c.k * c.stays
    state, outputs = formulas.state_before(call).to(k.dtype), list[Tensor]()
    for i in range(k.shape[2]):
        new = c.values[:, :, i] - c.keys[:, :, i] @ state
        outputs.append(q[:, :, i] @ state + c.seen[:, :, i] @ new)
        state = state * c.left[:, :, i] + k[:, :, i].mT @ new
    found = torch.cat(outputs, 2)[:, :, : call.max_seqlen_q]
    formulas.put(call, found.transpose(1, 2), rows, there)
    call.state.copy_(state)


def gated_delta_rule_backward(call: GatedDeltaRuleBackward) -> tuple[Tensor, ...]:
    """By chunks: the states before them in turn, their gradients in turn from the last, and then
    all tokens at once."""
    rows, there = formulas.rows_of(call)
    after = call.grad_after
    if formulas.is_blank_gradient(call):
        return formulas.rule_gradients(call, [], after, rows, there)
    c = solved(call, rows, there)
    state = formulas.state_of(call).to(c.q.dtype)
    of_output = _chunked(formulas.padded(call.grad_output, rows, there, state.dtype))
    q, k, straight = c.q * c.fades, c.k * c.stays, c.seen.mT @ of_output
    states, afters = list[Tensor](), list[Tensor]()
    for i in range(k.shape[2]):
        states.append(state)
        new = c.values[:, :, i] - c.keys[:, :, i] @ state
        state = state * c.left[:, :, i] + k[:, :, i].mT @ new
    after = after.to(state.dtype)
    for i in reversed(range(k.shape[2])):
        afters.append(after)
        of_new = straight[:, :, i] + k[:, :, i] @ after
        after = after * c.left[:, :, i] + q[:, :, i].mT @ of_output[:, :, i]
        after = after - c.keys[:, :, i].mT @ of_new
    found = _of_tokens(c, torch.stack(states, 2), torch.stack(afters[::-1], 2), of_output)
    longest = call.max_seqlen_q
    by_token = [x.flatten(2, 3)[:, :, :longest].transpose(1, 2) for x in found]
    return formulas.rule_gradients(call, by_token, after, rows, there)


def _of_tokens(c: Chunks, state: Tensor, after: Tensor, of_output: Tensor) -> list[Tensor]:
    """Gradients of query, key, value, decay and beta. state, after: before each chunk, and the
    gradient of that after it."""
    new = c.values - c.keys @ state
    of_new = c.seen.mT @ of_output + c.k * c.stays @ after
    of_right = solve(c.system.mT, of_new, upper=True, unitriangular=True)
    of_system = -(of_right @ new.mT).tril(-1)
    of_seen = (of_output @ new.mT).tril()
    error = c.v - c.fades * (c.k @ state)
    grams = c.k @ c.k.mT * c.between
    of_beta = (of_right * error).sum(-1) + (of_system * grams).sum(-1)
    reads = c.fades * (of_output @ state.mT)
    holds = c.beta * c.fades * (of_right @ state.mT)
    keeps = c.stays * (new @ after.mT)
    by_query, by_key = of_seen * c.between, of_system * c.beta * c.between
    of_q = reads + by_query @ c.k
    of_k = by_query.mT @ c.q + (by_key + by_key.mT) @ c.k - holds + keeps
    pairs = of_seen * c.seen + of_system * c.system
    before, kept = (reads * c.q - holds * c.k).sum(-1), (keeps * c.k).sum(-1)
    of_decay = _of_decay(pairs, before, kept, c.left[..., 0], state * after)
    return [of_q, of_k, c.beta * of_right, of_decay, of_beta]


def _of_decay(pairs: Tensor, before: Tensor, kept: Tensor, left: Tensor, held: Tensor) -> Tensor:
    """The gradients of tokens' decays, `[..., CHUNK]`, each a sum of what passes the token.

    Each of these is something that fades, times its gradient. pairs: of a column's token at a
    row's. before: of the state before the chunk at each token. kept: of each token at the chunk's
    end. left: of the state before the chunk at its end `[..., 1]`. held: that state times the
    gradient of the state after the chunk.
    """
    # Differences of longer sums would lose small gradients of heads that forget at once.
    inside = _from_here_on(pairs, -2).tril(-1).sum(-1)
    earlier = F.pad(kept.cumsum(-1)[..., :-1], (1, 0))
    whole = left * held.sum((-2, -1))[..., None]
    return inside + _from_here_on(before, -1) + earlier + whole


def _from_here_on(x: Tensor, dim: int) -> Tensor:
    """At each place the sum of what is there and after it."""
    return x.flip(dim).cumsum(dim).flip(dim)


def _gradient(run: Any) -> Any:
    """The reference of a gradient. Under a deterministic policy it takes requests one by one and
    skips those without tokens, whose states have the gradients of the states after."""
    each = by_request(run)

    def whole(call: Any) -> tuple[Tensor, ...]:
        *found, of_state = each(call)
        is_empty = (call.cu_seqlens_q.diff() == 0)[:, None, None, None]
        return (*found, compact(torch.where(is_empty, call.grad_after, of_state)))

    return whole


class Written(NamedTuple):
    """The tokens of a scan by chunks, `[B, Hv, chunks, CHUNK, ...]`. Names as in `Chunks`.

    values: step * x, which outer(values, b) writes. seen: their weights in the output.
    """

    x: Tensor
    b: Tensor
    c: Tensor
    values: Tensor
    fades: Tensor
    stays: Tensor
    left: Tensor
    between: Tensor
    seen: Tensor


def written(call: Any, rows: Tensor, there: Tensor) -> Written:
    """The chunks of a scan."""
    x, dt, b, c = map(_chunked, formulas.scan_inputs(call, rows, there))
    passed = (dt * call.a.to(dt.dtype)[:, None, None]).cumsum(-1)
    fades = passed.exp()[..., None]
    stays = (passed[..., -1:] - passed).exp()[..., None]
    between = _between(passed)
    values, seen = x * dt[..., None], c @ b.mT * between
    return Written(x, b, c, values, fades, stays, fades[..., -1:, :], between, seen)


def mamba2_scan(call: Mamba2Scan) -> None:
    """By chunks; requests are rows as long as the longest."""
    if formulas.is_blank(call):
        return
    rows, there = formulas.rows_of(call)
    w = written(call, rows, there)
    inside = w.seen @ w.values
    if call.d is not None:
        inside = inside + w.x * call.d.to(w.x.dtype)[:, None, None, None]
    c, added = w.c * w.fades, (w.values * w.stays).mT @ w.b
    state, outputs = formulas.state_before(call).to(c.dtype), list[Tensor]()
    for i in range(c.shape[2]):
        outputs.append(c[:, :, i] @ state.mT + inside[:, :, i])
        state = state * w.left[:, :, i] + added[:, :, i]
    found = torch.cat(outputs, 2)[:, :, : call.max_seqlen_q]
    formulas.put(call, found.transpose(1, 2), rows, there)
    call.state.copy_(state)


def mamba2_scan_backward(call: Mamba2ScanBackward) -> tuple[Tensor, ...]:
    """By chunks: the states before them in turn, their gradients in turn from the last, and then
    all tokens at once."""
    rows, there = formulas.rows_of(call)
    after = call.grad_after
    if formulas.is_blank_gradient(call):
        return of_scan.scan_gradients(call, [], after, rows, there)
    w = written(call, rows, there)
    state, after = formulas.state_of(call).to(w.c.dtype), after.to(w.c.dtype)
    of_output = _chunked(formulas.padded(call.grad_output, rows, there, state.dtype))
    added, asked = (w.values * w.stays).mT @ w.b, of_output.mT @ (w.c * w.fades)
    states, afters = list[Tensor](), list[Tensor]()
    for i in range(added.shape[2]):
        states.append(state)
        state = state * w.left[:, :, i] + added[:, :, i]
    for i in reversed(range(added.shape[2])):
        afters.append(after)
        after = after * w.left[:, :, i] + asked[:, :, i]
    found = _of_written(w, torch.stack(states, 2), torch.stack(afters[::-1], 2), of_output)
    longest = call.max_seqlen_q
    by_token = [y.flatten(2, 3)[:, :, :longest].transpose(1, 2) for y in found]
    return of_scan.scan_gradients(call, by_token, after, rows, there)


def _of_written(w: Written, state: Tensor, after: Tensor, of_output: Tensor) -> list[Tensor]:
    """What `scan_gradients` wants of tokens. state, after: before each chunk, and the gradient of
    that after it."""
    of_seen = of_output @ w.values.mT
    pairs, of_scores = of_seen * w.seen, of_seen * w.between
    reads, keeps = w.fades * (of_output @ state), w.stays * (w.values @ after)
    of_values = w.seen.mT @ of_output + w.stays * (w.b @ after.mT)
    before, kept = (reads * w.c).sum(-1), (keeps * w.b).sum(-1)
    of_decay = _of_decay(pairs, before, kept, w.left[..., 0], state * after)
    return [of_values, of_scores.mT @ w.c + keeps, of_scores @ w.b + reads, of_decay]


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


RULE_GRADIENT = _gradient(formulas.gated_delta_rule_backward)
SCAN_GRADIENT = _gradient(of_scan.mamba2_scan_backward)
for _op, _rule in (
    ("gated_delta_rule", gated_delta_rule),
    ("gated_delta_rule_backward", gated_delta_rule_backward),
    ("mamba2_scan", mamba2_scan),
    ("mamba2_scan_backward", mamba2_scan_backward),
):
    register(
        Kernel(
            "aten",
            _op,
            _rule,
            dtypes=FLOATS,
            cost_us=rule_cost_us,
            stopgap=True,
            about="torch's own products, by chunks of 64 tokens",
        )
    )
for _op, _conv, _inline in (
    ("causal_conv1d", formulas.causal_conv1d, Inline()),
    # The compiler of torch 2.11 refused it inlined, on a GPU.
    ("causal_conv1d_backward", CONV_GRADIENT, None),
):
    register(
        Kernel(
            "aten",
            _op,
            _conv,
            CONV_TAKES,
            FLOATS,
            cost_us=conv_cost_us,
            inline=_inline,
            stopgap=True,
            about="torch's own ops; the compiler fuses those of the forward pass",
        )
    )
for _op, _run, _takes, _us, _invariant in (
    ("gated_delta_rule", by_state(formulas.gated_delta_rule), KEPT_OF_RULES, rule_cost_us, ON_CPU),
    ("gated_delta_rule_backward", RULE_GRADIENT, NONE, rule_cost_us, ON_CPU),
    ("mamba2_scan", by_state(formulas.mamba2_scan), KEPT_OF_SCANS, rule_cost_us, ON_CPU),
    ("mamba2_scan_backward", SCAN_GRADIENT, NONE, rule_cost_us, ON_CPU),
    ("causal_conv1d", by_state(formulas.causal_conv1d), KEEPING, conv_cost_us, ON_CPU),
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
