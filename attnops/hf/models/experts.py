"""The experts of transformers models through `attnops.ops.experts`: for few tokens on a GPU;
transformers' own serve all other calls.

transformers reads the name of an implementation from the config of a layer at every call. The name
that `Experts` puts there holds the one before, which serves the calls that are left.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.utils.parametrize import is_parametrized

from attnops.core.kernel import deterministic
from attnops.core.private_torch import FakeTensor, tracing
from attnops.core.record import asked, changed, name as name_of
from attnops.core.select import active_policy
from attnops.core.tracers import is_recorded
from attnops.hf.models.chosen import is_ours
from attnops.hf.models.trial import Site, Trial, alone, answer, left_alone
from attnops.kernels.triton.attention import FLOATS
from attnops.kernels.triton.launch.experts_tiles import MOST_TOKENS
from attnops.nn.steady import apart
from attnops.ops.experts.record import Experts as Call, experts
from attnops.ops.experts.reference import gated
from attnops.ops.linear.reference import GATES

interface: Any = None
try:
    from transformers.integrations.moe import ExpertsInterface

    if hasattr(ExpertsInterface, "get_interface"):
        interface = ExpertsInterface
except ImportError:  # another version: then all experts stay as they are
    pass

PREFIX = "attnops_"
STOCK = ("eager", "grouped_mm", "batched_mm")
"""transformers' implementations that are taken over."""

SWITCH = "_experts_implementation_internal"
"""Of a config, the name of the implementation."""
_GATE = "_attnops_experts"
_PLAIN: Call = cast(Any, Call)()
"""A call without tensors, and with its numbers at their defaults."""


@dataclass(frozen=True)
class Gate:
    """The gated activation of an experts module.

    stock: the implementation before. given: the arguments of the op that are not at their defaults.
    """

    stock: str
    given: dict[str, Any]

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A module keeps the name in its config, so a process that loads a copy of it needs the
        # function behind the name.
        vars(self).update(state)
        implementation(self.stock)


class Experts:
    """The experts of a model, taken over until `undo()`."""

    def __init__(self, model: nn.Module) -> None:
        self.sites = tuple(sites(model))
        self._switched: list[tuple[Any, str]] = []
        for site in self.sites:
            if isinstance(site.found, Gate):
                config: Any = site.module.config
                if (before := getattr(config, SWITCH)) in STOCK:  # modules may share a config
                    self._switched.append((config, before))
                    setattr(config, SWITCH, implementation(before))
                site.module.__dict__[_GATE] = site.found

    def undo(self) -> None:
        """Give the modules back as they were. A config that was switched to something else since
        then is left at that."""
        for config, before in self._switched:
            if getattr(config, SWITCH) == PREFIX + before:
                setattr(config, SWITCH, before)
        for site in self.sites:
            if isinstance(site.found, Gate):  # others may be another patch's
                site.module.__dict__.pop(_GATE, None)

    def notes(self) -> tuple[str, ...]:
        """Lines of a report; none for a model without experts."""
        found = list(map(_now, self.sites))
        taken = Counter(each.stock for each in found if isinstance(each, Gate))
        lines = (
            f"experts of {n} of {len(found)} layers: up to {MOST_TOKENS} tokens on a GPU, without "
            f"gradients; {stock!r} of transformers else"
            for stock, n in taken.items()
        )
        return (*lines, *left_alone("experts", found))


def _now(site: Site[Gate]) -> Gate | str:
    """What was found of a module, or why it runs other code by now."""
    name = getattr(getattr(site.module, "config", None), SWITCH, None)
    if isinstance(site.found, str) or name == PREFIX + site.found.stock:
        return site.found
    return f"set to {name!r} after patch()"


Serve = Callable[[Any, Tensor, Tensor, Tensor], Tensor | None]
"""The result of a module's call, of its tokens, choices and their weights. None: transformers' own
serves it."""


def _served(module: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor | None:
    gate: Gate | None = getattr(module, _GATE, None)
    # What records a model by other means than torch.jit gives it tensors of its own.
    plain_call = type(x) is Tensor and not is_dynamo_compiling()
    recorded = tracing() if plain_call else is_recorded()
    if gate is None or recorded or not _serves(module, x, index, gate):
        return None
    return experts(x, *weights_of(module), index, weights, *biases_of(module), **gate.given)


def implementation(stock: str, prefix: str = PREFIX, serve: Serve = _served) -> str:
    """The name under which transformers finds `serve`, with `stock` for the calls that are left;
    registered now if it was not."""
    name = prefix + stock
    if name not in interface._global_mapping:
        interface.register(name, _function(interface._global_mapping.get(stock), serve))
    return name


def _function(stock: Callable[..., Tensor] | None, serve: Serve) -> Callable[..., Tensor]:
    def forward(
        module: Any,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        if (
            not (args or kwargs)
            and (out := serve(module, hidden_states, top_k_index, top_k_weights)) is not None
        ):
            return out
        fixed = deterministic(active_policy())
        # One expert after the other: grouped products follow from the tokens of all rows.
        own = type(module).forward.__wrapped__ if stock is None or fixed else stock
        result: Tensor = apart(
            own, module, hidden_states, top_k_index, top_k_weights, *args, **kwargs
        )
        return result

    return forward


def is_taken(module: nn.Module) -> bool:
    """Is it an experts module of a patched model, that is taken over?"""
    return _GATE in vars(module)


def biases_of(module: Any) -> tuple[Tensor | None, Tensor | None]:
    """Of gate_up and down."""
    return (module.gate_up_proj_bias, module.down_proj_bias) if module.has_bias else (None, None)


def weights_of(module: Any) -> tuple[Tensor, Tensor]:
    """(gate_up, down) of an experts module, as the op takes them."""
    gate_up, down = module.gate_up_proj, module.down_proj
    return (
        (gate_up.transpose(1, 2), down.transpose(1, 2)) if module.is_transposed else (gate_up, down)
    )


def _serves(module: Any, x: Tensor, index: Tensor, gate: Gate) -> bool:
    """Does a kernel of ours serve the call? Under a compiler the number of tokens is guarded."""
    if torch.is_grad_enabled():
        return False
    weight, down, policy = module.gate_up_proj, module.down_proj, active_policy()
    # An adapter of LoRA puts its own tensors in the parameters' place for the time of a call.
    if not (plain(weight) and plain(down)) or x.dim() != 2:
        return False
    if (
        torch.is_autocast_enabled(x.device.type)
        or not x.dtype == weight.dtype == down.dtype
        or x.device != weight.device
    ):
        return False
    if x.shape[0] > MOST_TOKENS and not deterministic(policy):
        return False
    asks = (*gate.given, *(("gate_up_bias", "down_bias") if module.has_bias else ()))
    inner = weight.shape[2 if module.is_transposed else 1] // 2
    sizes = (
        ("in_features", x.shape[1]),
        ("out_features", inner),
        ("experts", weight.shape[0]),
        ("top_k", index.shape[1]),
    )
    return bool(is_ours("experts", policy, x.device, x.dtype, MOST_TOKENS, sizes, asks))


def plain(weight: Any) -> bool:
    return type(weight) is nn.Parameter or (
        isinstance(weight, FakeTensor) and isinstance(weight, nn.Parameter)
    )


# Recognition --------------------------------------------------------------------------------------


def sites(model: nn.Module) -> Iterator[Site[Gate]]:
    """The experts modules of a model."""
    gates: dict[tuple[Any, ...], Gate | None] = {}
    for module in model.modules():
        if hasattr(module, "_apply_gate") and hasattr(module, "is_transposed"):
            yield Site(module, _against(module) or _gate(module, gates))
        elif type(module).__name__.endswith("Experts") and any(
            p.dim() >= 3 for p in module.parameters(recurse=False)
        ):
            yield Site(
                module, f"{type(module).__name__} does not ask transformers' experts interface"
            )


def _against(module: Any) -> str:
    """Why a module that asks the interface keeps transformers' own code, whatever its activation;
    "" if nothing speaks against it."""
    stock = getattr(module.config, SWITCH, None)
    gate_up: Any = getattr(module, "gate_up_proj", None)
    down: Any = getattr(module, "down_proj", None)
    if interface is None or stock not in STOCK:
        return f"the implementation is {stock!r}"
    if not module.has_gate:
        return "they have no gate"
    if is_parametrized(module) or not (plain(gate_up) and plain(down)):
        return "their weights are no plain parameters"
    if gate_up.dtype not in FLOATS or gate_up.dtype != down.dtype:
        return f"their weights are {name_of(gate_up.dtype)}"
    if getattr(getattr(module, "_hf_hook", None), "offload", False):
        return "their weights are offloaded"
    if not _are_halves(gate_up, down, 2 if module.is_transposed else 1):
        return f"their weights have the shapes {tuple(gate_up.shape)} and {tuple(down.shape)}"
    return ""


def _are_halves(gate_up: Tensor, down: Tensor, outs: int) -> bool:
    """Does an expert's first weight give twice what its second takes? outs: the dim of what the
    first gives."""
    three = gate_up.dim() == down.dim() == 3
    return three and gate_up.shape[outs] == 2 * down.shape[3 - outs]


PROBE = 12.0
"""Beyond the limits of gates."""


def _gate(module: Any, known: dict[tuple[Any, ...], Gate | None]) -> Gate | str:
    """The gate of the module. known: those of modules like it."""
    key = (
        type(module),
        getattr(module.config, SWITCH),
        type(getattr(module, "act_fn", None)),
        _floats(module),
    )
    if key not in known:
        known[key] = gate_of(module)
    return known[key] or f"the activation of {type(module).__name__} is no activation of the op"


def _floats(module: Any) -> tuple[float, ...]:
    return tuple(
        sorted({value for value in vars(module).values() if type(value) is float and value > 0})
    )


def gate_of(module: Any) -> Gate | None:
    """The gate of an experts module, found by trying the module's own function on a few numbers;
    None: the op has no such activation."""
    with alone():
        return _tried(module, getattr(module.config, SWITCH), _floats(module))


def _tried(module: Any, stock: str, floats: tuple[float, ...]) -> Gate | None:
    y = (PROBE * torch.sin(torch.arange(96, dtype=torch.float32).square())).view(4, 24)
    want = answer(module._apply_gate, y)
    if not isinstance(want, Tensor) or want.dtype != y.dtype or want.shape != (4, 12):
        return None
    trial = Trial(y, {"gated": want})
    for activation, interleaved, limit, offset in itertools.product(
        GATES, (False, True), (0.0, *floats), (0.0, 1.0)
    ):
        like = changed(
            _PLAIN, activation=activation, interleaved=interleaved, limit=limit, offset=offset
        )
        for alpha in (1.0, 1.702, *floats) if activation == "silu" else (1.0,):
            call = changed(like, alpha=alpha)
            if trial.is_met("gated", gated(call, y, y.dtype), 1e-5, 1e-5):
                return Gate(stock, {n: getattr(call, n) for n in sorted(asked(call))})
    return None
