"""Suite `experts`: the experts of a mixture layer at few tokens, by model and number of tokens, beside transformers' own.

`aten`, `triton`: kernels of the op; `deterministic`: the kernel under that policy. `grouped_mm`, `batched_mm`: transformers' functions, on
the module that transformers makes. `automatic`: as in the suite `linear`. A measurement is a CUDA graph of several calls that choose their
experts at random, those of one token without a common one, so that most reads are cold. `of_bandwidth`: the bytes of the experts touched
over the time, as a share of the bandwidth measured in the same run. `error` is the largest one as a share of the error allowed there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from attnops.bench import Setup
from attnops.bench.linear import DETERMINISTIC, LESS, with_choice
from attnops.bench.rows import Case, Row, Way, largest_error, time_if_right
from attnops.core.kernel import Kernel, kernels_of
from attnops.core.record import changed
from attnops.core.select import select
from attnops.hf.experts import Gate, gate_of, weights_of
from attnops.ops import OPS
from attnops.testing.calls import Call
from attnops.testing.error_bounds import allowance
from attnops.tune.clock import Timed, Times, kernels_us


class Mixture(NamedTuple):
    """A layer of experts. kind, name: of transformers' model and classes. sizes: experts, those of a token, their width.

    many, wide: as its config calls the experts and their width.
    """

    kind: str
    name: str
    hidden: int
    sizes: tuple[int, int, int]
    many: str
    wide: str


MODELS = {
    "gpt-oss-20b": Mixture("gpt_oss", "GptOss", 2880, (32, 4, 2880), "num_local_experts", "intermediate_size"),
    "qwen3-30b-a3b": Mixture("qwen3_moe", "Qwen3Moe", 2048, (128, 8, 768), "num_experts", "moe_intermediate_size"),
    "deepseek-v3": Mixture("deepseek_v3", "DeepseekV3", 7168, (256, 8, 2048), "n_routed_experts", "moe_intermediate_size"),
}
TOKENS = {"toy": (1, 8), "small": (1, 8), "quick": (1, 8, 32), "full": (1, 2, 8, 32, 64)}
CALLS, MOST_COPIED = 4, 30_000_000_000
"""Calls of a measurement; bytes of weights that `batched_mm` may copy, above which it is left out."""


def cases(setup: Setup) -> dict[str, Case]:
    """One a model; those of the first two unless the run is full."""
    return {name: partial(measure, setup, name) for name in (MODELS if setup.size == "full" else list(MODELS)[:2])}


@torch.no_grad()
def measure(setup: Setup, model: str) -> list[Row]:
    """A layer with every number of tokens."""
    module, rows = module_of(setup, MODELS[model]), list[Row]()
    for tokens in TOKENS[setup.size]:
        calls = calls_of(setup, module, tokens, MODELS[model].sizes[1])
        rows += with_choice(setup, timed(setup, f"{model} x{tokens}", module, calls), calls[0])
    return rows


def module_of(setup: Setup, m: Mixture) -> Any:
    """transformers' module with random weights. Hidden and inner sizes are smaller where the run is, and multiples of 16 as theirs."""
    found = import_module(f"transformers.models.{m.kind}.modeling_{m.kind}")
    hidden, width = (max(n // LESS[setup.size] // 16, 1) * 16 for n in (m.hidden, m.sizes[2]))
    config = getattr(import_module("transformers"), f"{m.name}Config")(
        **{m.many: m.sizes[0], m.wide: width}, num_experts_per_tok=m.sizes[1], hidden_size=hidden
    )
    config._experts_implementation = "grouped_mm"
    with torch.device(setup.device):
        module = getattr(found, f"{m.name}Experts")(config).to(setup.dtype).requires_grad_(False)
    source = torch.Generator(setup.device).manual_seed(0)
    for weight in module.parameters():
        weight.normal_(0.0, hidden**-0.5, generator=source)
    return module


def calls_of(setup: Setup, module: Any, tokens: int, k: int) -> list[Call]:
    """Calls that choose other experts."""
    (gate_up, down), gate = weights_of(module), cast(Gate, gate_of(module))
    take, (count, outs, _) = partial(torch.randn, device=setup.device, dtype=setup.dtype), down.shape
    biases = {n: b for n in ("gate_up", "down") if (b := getattr(module, f"{n}_proj_bias", None)) is not None}
    given = {"x": take(tokens, gate_up.shape[2]), "gate_up": gate_up, "down": down, **{f"{n}_bias": b for n, b in biases.items()}}
    given |= {n: getattr(gate, n) for n in gate.asks} | {"top_k_weights": take(tokens, k).abs()}
    source, found = torch.Generator().manual_seed(0), []
    order = torch.randperm(count, generator=source)
    for i in range(CALLS):
        chosen = [
            order[i * k % (count - k + 1) :][:k] if tokens == 1 else torch.randperm(count, generator=source)[:k] for _ in range(tokens)
        ]
        index, output = torch.stack(chosen).to(setup.device), take(tokens, outs)
        found.append(Call("experts", {**given, "top_k_index": index, "output": output}))
    return found


def timed(setup: Setup, case: str, module: Any, calls: list[Call]) -> list[Row]:
    """The rows of one case."""
    problem, bandwidth, wanted, allowed = calls[0].problem, setup.ceilings.get("bandwidth_tb_s"), list[Tensor](), list[Tensor]()
    for call in calls:
        exact = call.with_(output=call.arguments["output"].float())
        OPS["experts"].reference(exact.record)
        wanted.append(exact.arguments["output"])
        allowed.append(allowance(call, {"output": wanted[-1]})["output"])  # type: ignore[arg-type]
    want, limit = torch.stack(wanted), torch.stack(allowed)
    expert = sum(t[0].nbytes for t in weights_of(module))
    touched = sum(len(call.arguments["top_k_index"].unique()) for call in calls) * expert / len(calls)

    def way(run: Callable[[Call], Any]) -> Way:
        def results() -> Tensor:
            for call in calls:
                call.arguments["output"].fill_(float("nan"))
            made = [run(call) for call in calls]
            return torch.stack([call.arguments["output"] if y is None else y for y, call in zip(made, calls, strict=True)])

        return Way(Timed(lambda: [run(call) for call in calls]), results)

    def by(kernel: Kernel, policy: str, call: Call) -> Any:
        return kernel.run(changed(call.record, policy=policy))

    def stock(function: Callable[..., Tensor], call: Call) -> Tensor:
        x, weights = call.arguments["x"], call.arguments["top_k_weights"]
        return function(module, x, call.arguments["top_k_index"], weights)

    def share(got: Tensor, want: Tensor) -> float:
        return largest_error(got.double() / limit, want / limit)

    def clock(steps: Any) -> Times:
        found = kernels_us(setup.device, steps)
        return {name: {figure: round(us / len(calls), 2) for figure, us in one.items()} for name, one in found.items()}

    def figures(us: float, way: Way) -> Row:
        return {"of_bandwidth": round(touched / us / 1e6 / bandwidth, 4)} if bandwidth else {}

    ways = {k.name: way(partial(by, k, "")) for k in kernels_of("experts").values() if not (k.judge or k.refusals(problem))}
    if (steady := select(problem, DETERMINISTIC).kernel) is not None and not steady.judge:
        ways[DETERMINISTIC] = way(partial(by, steady, DETERMINISTIC))
    own = tuple(ways)
    moe = import_module("transformers.integrations.moe")
    copied = expert * calls[0].arguments["top_k_index"].numel()
    for name in ("grouped_mm", "batched_mm") if copied <= MOST_COPIED else ("grouped_mm",):
        # Its bits are rounded more often than the op's need be.
        ways[name] = way(partial(stock, getattr(moe, f"{name}_experts_forward")))
    return time_if_right(case, ways, want, 1.0, clock, share, figures, own=own)
