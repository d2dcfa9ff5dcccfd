"""Layers of experts as transformers makes them, for the suite `experts`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor

from attnops.bench import Setup
from attnops.bench.cold import LESS, Task
from attnops.hf.models.experts import Gate, biases_of, gate_of, weights_of
from attnops.ops import OPS
from attnops.ops.experts.bench_points import Mixture
from attnops.testing.calls import Call
from attnops.testing.error_bounds import allowance

TOKENS = {"toy": (1, 8), "small": (1, 8), "quick": (1, 8, 32), "full": (1, 2, 8, 32, 64)}
CALLS, MOST_COPIED = 4, 30_000_000_000
"""Calls of a measurement; bytes of weights that `batched_mm` may copy, above which it is left
out."""


def tasks(setup: Setup, op: str, mixture: Mixture) -> Iterator[Task]:
    """A layer with every number of tokens."""
    module = module_of(setup, mixture)
    for tokens in TOKENS[setup.size]:
        calls = calls_of(setup, op, module, tokens, mixture.sizes[1])
        want, allowed = zip(*map(_exact, calls), strict=True)
        expert = sum(int(t[0].nbytes) for t in weights_of(module))
        touched = sum(len(call.record.top_k_index.unique()) for call in calls)
        peers = stock(module, expert * calls[0].record.top_k_index.numel())
        name = f"{mixture.name} x{tokens}"
        yield Task(
            name,
            calls,
            torch.stack(want),
            torch.stack(allowed),
            touched * expert / len(calls),
            peers,
        )


def _exact(call: Call) -> tuple[Tensor, Any]:
    """(the result in float32, the error allowed of each number)."""
    wide = call.with_(output=call.record.output.float())
    OPS[call.op].reference(wide.record)
    want: Tensor = wide.record.output
    [allowed] = allowance(call, {call.spec.output: want}).values()
    return want, allowed


def module_of(setup: Setup, m: Mixture) -> Any:
    """transformers' module with random weights. Hidden and inner sizes are smaller where the run
    is, and multiples of 16 as theirs."""
    found = import_module(f"transformers.models.{m.kind}.modeling_{m.kind}")
    hidden, width = (max(n // LESS[setup.size] // 16, 1) * 16 for n in (m.hidden, m.sizes[2]))
    config = getattr(import_module("transformers"), f"{m.of}Config")(
        **{m.many: m.sizes[0], m.wide: width}, num_experts_per_tok=m.sizes[1], hidden_size=hidden
    )
    config._experts_implementation = "grouped_mm"
    with torch.device(setup.device):
        module = getattr(found, f"{m.of}Experts")(config).to(setup.dtype).requires_grad_(False)
    source = torch.Generator(setup.device).manual_seed(0)
    for weight in module.parameters():
        weight.normal_(0.0, hidden**-0.5, generator=source)
    return module


def calls_of(setup: Setup, op: str, module: Any, tokens: int, k: int) -> list[Call]:
    """Calls that choose other experts."""
    (gate_up, down), gate = weights_of(module), cast(Gate, gate_of(module))
    take = partial(torch.randn, device=setup.device, dtype=setup.dtype)
    count, outs, _ = down.shape
    gate_up_bias, down_bias = biases_of(module)
    made = Call.of(
        op,
        x=take(tokens, gate_up.shape[2]),
        gate_up=gate_up,
        down=down,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        top_k_weights=take(tokens, k).abs(),
        **gate.given,
    )
    source, found = torch.Generator().manual_seed(0), []
    order = torch.randperm(count, generator=source)
    for i in range(CALLS):
        chosen = [
            order[i * k % (count - k + 1) :][:k]
            if tokens == 1
            else torch.randperm(count, generator=source)[:k]
            for _ in range(tokens)
        ]
        index, output = torch.stack(chosen).to(setup.device), take(tokens, outs)
        found.append(made.with_(top_k_index=index, output=output))
    return found


def stock(module: Any, copied: int) -> dict[str, Callable[[Call], Callable[[], Tensor]]]:
    """transformers' own functions by name: of a call, what runs them. copied: the bytes that
    `batched_mm` would copy."""
    moe = import_module("transformers.integrations.moe")

    def run(function: Callable[..., Tensor], call: Call) -> Callable[[], Tensor]:
        given = call.record
        return partial(function, module, given.x, given.top_k_index, given.top_k_weights)

    names = ("grouped_mm", "batched_mm") if copied <= MOST_COPIED else ("grouped_mm",)
    return {name: partial(run, getattr(moe, f"{name}_experts_forward")) for name in names}
