"""The linear attention of transformers models through `attnops.ops.gated_delta_rule` and
`attnops.ops.causal_conv1d` where a kernel of attnops is chosen, without gradients; all other calls
are transformers' own.

A module becomes an object of a subclass of its class, as routers do. Its forward is that of the
class with other functions in place of four that the code of its file calls by name. Each has the
signature of the one that it replaces, was compared with it, and hands calls on that it leaves.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from transformers.cache_utils import Cache

from attnops.core.private_torch import tracing
from attnops.core.select import use
from attnops.core.tracers import is_recorded
from attnops.hf.models.chosen import kernel_now
from attnops.hf.models.functions import is_served, numbers, starts_of
from attnops.hf.models.methods import is_replaced
from attnops.hf.models.states import OfStates, StateLayer
from attnops.hf.models.trial import Site, Trial, alone, answer, left_alone
from attnops.nn.class_swap import Swap, subclass
from attnops.ops.recurrent.conv import causal_conv1d
from attnops.ops.recurrent.record import gated_delta_rule

Function = Callable[..., Any]
_MARK = "_attnops_recurrent"
SIZES = ("num_v_heads", "num_k_heads", "head_v_dim", "head_k_dim", "conv1d")
"""Attributes of a module that the report reads."""


class Recurrent:
    """The linear attention of a model, taken over until `undo()`."""

    def __init__(self, model: nn.Module) -> None:
        self.sites = tuple(sites(model))
        taken = (site.module for site in self.sites if not site.found)
        self._swaps = [Swap(module, served, attributes={_MARK: True}) for module in taken]

    def undo(self) -> None:
        """Give the modules back as they were, see `Swap.undo`."""
        for swap in self._swaps:
            swap.undo()
            swap.target.__dict__.pop(_MARK, None)

    def notes(self) -> tuple[str, ...]:
        """Lines of a report; none for a model without linear attention."""
        count, taken = len(self.sites), Counter(_kernels(swap.target) for swap in self._swaps)
        lines = (
            f"linear attention of {n} of {count} layers: {kernels}" for kernels, n in taken.items()
        )
        left = [site.found or site for site in self.sites]
        return (*lines, *left_alone("linear attention", left))


def _kernels(module: Any) -> str:
    """What runs a module now: the kernels of its two ops, as `gated_delta_rule.triton`, or
    transformers."""
    weight = module.conv1d.weight
    heads = (("q_heads", module.num_v_heads), ("kv_heads", module.num_k_heads))
    dims = (("head_dim", module.head_k_dim), ("v_head_dim", module.head_v_dim))
    ops = {"gated_delta_rule": heads + dims, "causal_conv1d": (("in_features", weight.shape[0]),)}
    names = {op: kernel_now(op, weight.device, weight.dtype, sizes) for op, sizes in ops.items()}
    ours = [f"{op}.{name}" for op, name in names.items() if name]
    if not ours:
        return f"transformers' own code, for no kernel of attnops is chosen on {weight.device.type}"
    when = "without gradients and outside of torch.compile, and transformers' own code else"
    return f"{' and '.join(ours)} {when}"


@functools.cache
def served(cls: Any) -> type:
    """A subclass of the module `cls` with its name. Its objects can be copied and pickled."""
    ours = rebound(cls.forward, _replacements(cls))

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        cache = _cache_in((*args, *kwargs.values()))
        if isinstance(cache, OfStates):
            run = rebound(cls.forward, _over(cache))
            return run(self, hidden_states, *args, **kwargs)
        states = None if cache is None else cache.layers[self.layer_idx]
        if isinstance(states, StateLayer):
            states.begin(hidden_states.shape[0])
        stock = torch.is_grad_enabled() or is_dynamo_compiling() or is_recorded() or tracing()
        run = cls.forward if stock or _MARK not in vars(self) else ours
        out = run(self, hidden_states, *args, **kwargs)
        if isinstance(states, StateLayer):
            states.end()
        return out

    return subclass(cls, {"forward": forward}, (served, cls))


def _cache_in(given: Iterable[Any]) -> Any:
    """The cache among a module's arguments, or its part of a step; None without one."""
    return next((x for x in given if isinstance(x, (Cache, OfStates))), None)


def rebound(function: Function, names: Mapping[str, Function]) -> Function:
    """`function` as it would be with these globals in its file, in the same decorators. Others are
    as they are now."""
    own: Any = function
    inner: Any = getattr(own, "__wrapped__", None)
    cells, known = own.__closure__, own.__globals__
    if inner is None:
        known = {**known, **names}
    else:
        again = rebound(inner, names)
        cells = tuple(CellType(again) if c.cell_contents is inner else c for c in cells)
    made = FunctionType(own.__code__, known, own.__name__, own.__defaults__, cells)
    made.__kwdefaults__ = own.__kwdefaults__
    return made


def can_be_rebound(function: Function) -> bool:
    """Is it a Python function, and each of its decorators one that holds what it calls?"""
    if not isinstance(function, FunctionType):
        return False
    inner: Any = getattr(function, "__wrapped__", None)
    held = [cell.cell_contents for cell in function.__closure__ or ()]
    return inner is None or (any(x is inner for x in held) and can_be_rebound(inner))


# The functions ------------------------------------------------------------------------------------


def _rule(own: Function) -> Function:
    """In place of `chunk_gated_delta_rule` and `recurrent_gated_delta_rule`."""

    @functools.wraps(own)
    def run(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
        **more: Any,
    ) -> tuple[Tensor, Tensor | None]:
        (rows, tokens, heads, dv), (groups, dk) = value.shape, key.shape[2:]
        sizes = (("q_heads", heads), ("kv_heads", groups), ("head_dim", dk), ("v_head_dim", dv))
        like = query.dtype == key.dtype == value.dtype
        if cu_seqlens is not None or not (like and is_served("gated_delta_rule", query, sizes)):
            given = (initial_state, output_final_state, use_qk_l2norm_in_kernel)
            names = ("initial_state", "output_final_state", "use_qk_l2norm_in_kernel")
            more |= dict(zip(names, given, strict=True)) | {"cu_seqlens": cu_seqlens}
            result: tuple[Tensor, Tensor | None] = own(query, key, value, g=g, beta=beta, **more)
            return result
        if initial_state is None:
            state = value.new_zeros((rows, heads, dk, dv), dtype=torch.float32)
        else:
            state = initial_state.to(torch.float32, copy=True)
        q, k, v, decay, b = (x.flatten(0, 1) for x in (query, key, value, g.float(), beta))
        output = gated_delta_rule(
            q,
            k,
            v,
            decay,
            b,
            state,
            starts_of(value, rows, tokens),
            max_seqlen_q=tokens,
            normalize=use_qk_l2norm_in_kernel,
            padded=False,
        )
        return output.view(value.shape), state if output_final_state else None

    return run


def _convolved(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor | None:
    """The convolution of `x` `[B, C, tokens]`; None where transformers' own serves it."""
    asks = (*(("bias",) if bias is not None else ()), *(("activation",) if activation else ()))
    kept = activation in (None, "silu") and x.dtype == weight.dtype == state.dtype
    if not (kept and is_served("causal_conv1d", x, (("in_features", x.shape[1]),), asks)):
        return None
    rows, channels, tokens = x.shape
    output = causal_conv1d(
        x.transpose(1, 2).reshape(rows * tokens, channels),
        weight,
        state,
        starts_of(x, rows, tokens),
        bias,
        max_seqlen_q=tokens,
        activation=activation or "",
        padded=False,
    )
    return output.view(rows, tokens, channels).transpose(1, 2)


def _conv(own: Function) -> Function:
    """In place of `causal_conv1d_fn`."""

    @functools.wraps(own)
    def run(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **more: Any,
    ) -> Tensor:
        x = hidden_states
        state = x.new_zeros((*x.shape[:2], weight.shape[1] - 1))
        found = None if "seq_idx" in more else _convolved(x, state, weight, bias, activation)
        if found is None:
            found = own(x, weight, bias, activation, **more)
        return found

    return run


def _conv_update(own: Function) -> Function:
    """In place of `causal_conv1d_update`."""

    @functools.wraps(own)
    def run(
        hidden_states: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        found = None
        if conv_state.is_contiguous() and conv_state.shape[2] >= weight.shape[1] - 1:
            found = _convolved(hidden_states, conv_state, weight, bias, activation)
        if found is None:
            found = own(hidden_states, conv_state, weight, bias, activation)
        return found

    return run


OURS: Mapping[str, Callable[[Function], Function]] = {
    "torch_chunk_gated_delta_rule": _rule,
    "torch_recurrent_gated_delta_rule": _rule,
    "causal_conv1d_fn": _conv,
    "causal_conv1d_update": _conv_update,
}
"""By the name in transformers' files."""


def _replacements(cls: Any) -> dict[str, Function]:
    """The functions of calls outside of graphs: a package that is installed keeps those that it
    serves."""
    known = inspect.unwrap(cls.forward).__globals__
    own = {name: known[name] for name in OURS}
    return {n: run if _of_package(run) else OURS[n](run) for n, run in own.items()}


def _of_package(own: Function) -> bool:
    """Does another package serve a function of transformers'?"""
    plain = inspect.unwrap(own)
    return inspect.getclosurevars(own).nonlocals.get("implementation", plain) is not plain


def _over(view: Any) -> dict[str, Function]:
    """The functions of a step in a graph, whose requests are those of `view`. They write its
    states."""
    assert view.states is not None
    batch, more = view.batch, {"fresh": view.fresh, "padded": False}
    requests = {"max_seqlen_q": batch.max_seqlen_q, **more}

    def rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        state = view.states.state
        output = gated_delta_rule(
            query.flatten(0, 1),
            key.flatten(0, 1),
            value.flatten(0, 1),
            g.float().flatten(0, 1),
            beta.flatten(0, 1),
            state,
            batch.cu_seqlens_q,
            normalize=use_qk_l2norm_in_kernel,
            **requests,
        )
        return output.view(value.shape), state

    def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        rows, channels, tokens = x.shape
        output = causal_conv1d(
            x.transpose(1, 2).reshape(rows * tokens, channels),
            weight,
            view.states.conv,
            batch.cu_seqlens_q,
            bias,
            activation=activation or "",
            **requests,
        )
        return output.view(rows, tokens, channels).transpose(1, 2)

    def conv(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> Tensor:
        return convolved(x, weight, bias, activation)

    def conv_update(
        x: Tensor,
        state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        return convolved(x, weight, bias, activation)

    return {
        "torch_chunk_gated_delta_rule": rule,
        "torch_recurrent_gated_delta_rule": rule,
        "causal_conv1d_fn": conv,
        "causal_conv1d_update": conv_update,
    }


# Recognition --------------------------------------------------------------------------------------


def sites(model: nn.Module) -> Iterator[Site[str]]:
    """The linear attention of a model: modules whose forward calls one of these functions. Found is
    the reason against a module, "" without one."""
    for module in model.modules():
        code: Any = inspect.unwrap(type(module).forward)
        if OURS.keys() & set(getattr(getattr(code, "__code__", None), "co_names", ())):
            yield Site(module, _against(module, code))


def against_states(model: nn.Module, numbers: Sequence[int], mode: str, latents: bool) -> str:
    """Why steps of these layers, which keep states, cannot be in graphs of a mode; "" where they
    can. latents: do other layers keep latents?"""
    if mode == "piecewise" or latents:
        of = "compiled steps" if mode == "piecewise" else "a cache of latents"
        return f"whose layers {list(numbers)} have states, which {of} cannot have"
    taken = {
        getattr(module, "layer_idx", None): _MARK in vars(module) for module in model.modules()
    }
    found = {getattr(site.module, "layer_idx", None): site.found for site in sites(model)}
    for number in numbers:
        why = found.get(number, "no op of attnops computes them")
        if why and not taken.get(number):
            return f"whose layers {list(numbers)} have states that move: {why}"
    return ""


def _against(module: nn.Module, code: Any) -> str:
    if _MARK in vars(module):
        return "another patch has taken them over"
    if is_replaced(module):
        return "their forward is replaced on the module itself, or compiled"
    if not can_be_rebound(type(module).forward):
        return f"the forward of {type(module).__name__} has decorators that are not known"
    if odd := [name for name in SIZES if not hasattr(module, name)]:
        return f"{type(module).__name__} has no {odd[0]}"
    functions = {name: code.__globals__.get(name) for name in OURS}
    if not OURS.keys() <= set(code.__code__.co_names) or not all(map(callable, functions.values())):
        return f"{type(module).__name__} does not call all of {', '.join(OURS)}"
    for name, own in functions.items():
        if not _is_like(name, own):
            return f"{name} is not transformers' own code, or computes something else than the op"
    return ""


@functools.cache
def _is_like(name: str, own: Function) -> bool:
    """Is the function transformers' torch code, and gives the op the same on a CPU?"""
    plain = inspect.unwrap(own)
    with alone(), torch.autocast("cpu", enabled=False):
        trial = Trial(name, _tried(plain, name))
        with use(dict.fromkeys(("gated_delta_rule", "causal_conv1d"), "reference")):
            got = _tried(OURS[name](plain), name)
        return bool(got) and all(
            n in trial.want and trial.is_met(n, x, 1e-4, 1e-5) for n, x in got.items()
        )


def _tried(function: Function, name: str) -> dict[str, Tensor]:
    """What the function gives and changes, of a few numbers; nothing where it raises."""
    given = _rule_inputs() if OURS[name] is _rule else _conv_inputs(name)
    found = answer(functools.partial(function, **given))
    results = found if isinstance(found, tuple) else (found,)
    written = given.get("conv_state")
    both = (*results, *(() if written is None else (written,)))
    return {str(i): x for i, x in enumerate(both) if isinstance(x, Tensor)}


def _rule_inputs() -> dict[str, Any]:
    """More tokens than a chunk has, and a state."""
    rows, tokens, heads = 2, 70, 2
    return {
        "query": numbers(rows, tokens, heads, 8),
        "key": numbers(rows, tokens, heads, 8).cos(),
        "value": numbers(rows, tokens, heads, 6),
        "g": -numbers(rows, tokens, heads).abs(),
        "beta": numbers(rows, tokens, heads).sigmoid(),
        "initial_state": numbers(rows, heads, 8, 6),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }


def _conv_inputs(name: str) -> dict[str, Any]:
    updates = name == "causal_conv1d_update"
    return {
        "hidden_states": numbers(2, 5, 1 if updates else 7),
        **({"conv_state": numbers(2, 5, 4).cos()} if updates else {}),
        "weight": numbers(5, 4),
        "bias": numbers(5),
        "activation": "silu",
    }
