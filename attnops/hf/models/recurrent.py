"""The layers with states of transformers models through the ops of `attnops.ops.recurrent` where a
kernel of attnops is chosen, and where several texts share a row, with gradients and in compiled
code; all other calls are transformers' own.

A module becomes an object of a subclass of its class, as routers do. Its forward is that of the
class with other functions in place of those that the code of its file calls by name. Each has the
signature of the one that it replaces, was compared with it, and hands calls on that it leaves.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CellType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from attnops.core.private_torch import tracing
from attnops.core.select import use
from attnops.core.tracers import is_recorded
from attnops.hf.models import convolutions, delta, lightning, scans
from attnops.hf.models.chosen import Sizes, kernel_now
from attnops.hf.models.functions import TELL_OF_TEXTS, Function, Make, cache_among
from attnops.hf.models.methods import is_replaced
from attnops.hf.models.states import OfStates, StateLayer
from attnops.hf.models.trial import Site, Trial, alone, answer, left_alone
from attnops.nn.class_swap import Swap, subclass

_MARK = "_attnops_recurrent"


class Family(NamedTuple):
    """Modules whose states one op moves.

    op: beside the convolution; "" for none. ours: makes what takes the place of the functions of
    the op, by name; a module of the family calls all of them. attributes: that the report reads.
    sizes: of the op of a module.
    """

    op: str
    ours: Mapping[str, Make]
    attributes: tuple[str, ...]
    sizes: Callable[[Any], Sizes]


FAMILIES = {
    "gated_delta_rule": Family("gated_delta_rule", delta.OURS, delta.ATTRIBUTES, delta.sizes_of),
    "mamba2_scan": Family("mamba2_scan", scans.OURS, scans.ATTRIBUTES, scans.sizes_of),
    "": Family("", {}, (), lambda module: ()),
    lightning.NAME: Family(lightning.OP, {}, lightning.ATTRIBUTES, lightning.sizes_of),
}
"""By name. That without a name has convolutions alone."""
OURS = {**delta.OURS, **scans.OURS, **convolutions.OURS}
_INPUTS = {name: of.inputs for of in (delta, scans, convolutions) for name in of.OURS}
OPS = ("causal_conv1d", "gated_delta_rule", "mamba2_scan")


def _family(cls: Any) -> str:
    """The name of that of a class of modules, by the functions that its forward calls."""
    if lightning.is_one(cls):
        return lightning.NAME
    called = set(inspect.unwrap(cls.forward).__code__.co_names)
    return next(n for n, each in FAMILIES.items() if not each.ours or each.ours.keys() & called)


class Recurrent:
    """The linear attention of a model, taken over until `undo()`."""

    def __init__(self, model: nn.Module) -> None:
        self.sites = tuple(sites(model))
        taken = (site.module for site in self.sites if not site.found)
        self._swaps = [Swap(m, served, attributes={_MARK: _family(type(m))}) for m in taken]

    def undo(self) -> None:
        """Give the modules back as they were, see `Swap.undo`."""
        for swap in self._swaps:
            swap.undo()
            swap.target.__dict__.pop(_MARK, None)

    def notes(self) -> tuple[str, ...]:
        """Lines of a report; none for a model without linear attention."""
        count, taken = len(self.sites), Counter(map(_kernels, self._swaps))
        lines = (
            f"linear attention of {n} of {count} layers: {kernels}" for kernels, n in taken.items()
        )
        left = [site.found or site for site in self.sites]
        return (*lines, *left_alone("linear attention", left))


def _kernels(swap: Swap) -> str:
    """What runs a module now: the kernels of its ops, as `gated_delta_rule.triton`, or
    transformers; the packages that transformers calls, and what to install for faster kernels."""
    module = swap.target
    weight = weight_of(module)
    names = {
        op: kernel_now(op, weight.device, weight.dtype, sizes)
        for op, sizes in ops_of(module).items()
    }
    ours = " and ".join(f"{op}.{name}" for op, (name, _) in names.items() if name)
    others = ", ".join(_packages(swap.own))
    own = f"functions of {others} that transformers calls" if others else "transformers' own code"
    lacks = "".join(f"; faster {op} {better}" for op, (_, better) in names.items() if better)
    if not ours:
        return f"{own}, for no kernel of attnops is chosen on {weight.device.type}{lacks}"
    if vars(module)[_MARK] == lightning.NAME:
        return f"{ours}, and {own} in training and in steps over other caches than pages{lacks}"
    if others:
        return f"{ours} in graphs, and {own} outside of them{lacks}"
    return f"{ours}{lacks}"


def ops_of(module: nn.Module) -> dict[str, Sizes]:
    """The ops that move the states of a module that is taken over, with their sizes."""
    family, conv = FAMILIES[vars(module)[_MARK]], conv_of(module)
    ops: dict[str, Sizes] = {family.op: family.sizes(module)} if family.op else {}
    if conv is not None:
        ops["causal_conv1d"] = (("in_features", conv.weight.shape[0]),)
    return ops


def _packages(cls: Any) -> list[str]:
    """Those whose functions transformers calls for a module of this class in place of its own."""
    code: Any = inspect.unwrap(cls.forward)
    found = [code.__globals__[name] for name in _called(cls)]
    served = [inspect.getclosurevars(f).nonlocals["implementation"] for f in found if of_package(f)]
    return sorted({each.__module__.partition(".")[0] for each in served})


def conv_of(module: nn.Module) -> Any:
    """The convolution of a module; None without one."""
    return next((m for m in module.children() if isinstance(m, nn.Conv1d)), None)


def weight_of(module: Any) -> Tensor:
    """A weight whose device and dtype are those of the tokens of a module that is taken over."""
    conv = conv_of(module)
    weight: Tensor = (module.norm if conv is None else conv).weight
    return weight


@functools.cache
def served(cls: Any) -> type:
    """A subclass of the module `cls` with its name. Its objects can be copied and pickled."""
    ours, whole = _ours(cls), lightning.is_one(cls)

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        cache = cache_among((*args, *kwargs.values()))
        if isinstance(cache, OfStates):
            return _ours(cls, cache)(self, hidden_states, *args, **kwargs)
        states = _states_in(cache, self.layer_idx)
        if states is not None:
            states.begin(hidden_states.shape[0])
            if whole or states.verifies:
                view = states.part(hidden_states.shape[1])
                others, named = _handed(cache, view, args, kwargs)
                out = forward(self, hidden_states, *others, **named)
                states.end()
                return out
        stock = not is_dynamo_compiling() and (is_recorded() or tracing())
        if not whole:
            stock = stock or _are_texts_moved(self, cache, hidden_states.shape[1], kwargs)
        run = cls.forward if stock or getattr(self, _MARK, None) is None else ours
        out = run(self, hidden_states, *args, **kwargs)
        if states is not None:
            states.end()
        return out

    return subclass(cls, {"forward": forward}, (served, cls))


def _states_in(cache: Any, number: int) -> StateLayer | None:
    """Those of a layer in a cache of pages; None in another, which may have no such layer yet."""
    layers = () if cache is None else cache.layers
    found = layers[number] if number < len(layers) else None
    return found if isinstance(found, StateLayer) else None


def _ours(cls: Any, view: Any = None) -> Function:
    """The forward of the class with the ops in place of what it computes, see `Make`."""
    if lightning.is_one(cls):
        return lightning.attention(cls.forward, view)
    return rebound(cls.forward, _replacements(cls, view))


def _are_texts_moved(module: Any, cache: Any, tokens: int, given: Mapping[str, Any]) -> bool:
    """Does the cache put earlier inputs, or padding, before the texts of a row? The convolution is
    not told of them."""
    if cache is None or all(given.get(name) is None for name in TELL_OF_TEXTS):
        return False
    width = conv_of(module).kernel_size[0]
    return bool(cache.has_previous_state(module.layer_idx)) or tokens < width


def _handed(
    cache: Any, view: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a module with its part of a step in place of the cache."""
    others = tuple(view if x is cache else x for x in args)
    return others, {name: view if x is cache else x for name, x in kwargs.items()}


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


def _replacements(cls: Any, view: Any = None) -> dict[str, Function]:
    """What takes the place of the functions that the module calls, see `Make`. Outside of graphs a
    package that is installed keeps those that it serves."""
    code: Any = inspect.unwrap(cls.forward)
    known = code.__globals__
    own = {name: known[name] for name in _called(cls)}
    taken = {
        name: run if view is None and of_package(run) else OURS[name](run, view)
        for name, run in own.items()
    }
    if scans.FUSED in known and not of_package(known[scans.FUSED]):
        taken[scans.FUSED] = scans.not_fused
    return taken


def _called(cls: Any) -> tuple[str, ...]:
    """The functions of OURS that a module of this class calls, or should."""
    name = _family(cls)
    return () if name == lightning.NAME else (*FAMILIES[name].ours, *convolutions.OURS)


def of_package(own: Any) -> bool:
    """Is it a function of transformers' that another package serves?"""
    if not isinstance(own, FunctionType):
        return False
    plain = inspect.unwrap(own)
    return inspect.getclosurevars(own).nonlocals.get("implementation", plain) is not plain


# Recognition --------------------------------------------------------------------------------------


def sites(model: nn.Module) -> Iterator[Site[str]]:
    """The linear attention of a model: modules whose forward calls one of these functions, or
    computes lightning attention. Found is the reason against a module, "" without one."""
    for module in model.modules():
        code: Any = inspect.unwrap(type(module).forward)
        called = set(getattr(getattr(code, "__code__", None), "co_names", ()))
        if OURS.keys() & called or lightning.is_one(type(module)):
            yield Site(module, _against(module, code))


def modules_with_states(model: nn.Module) -> dict[int, tuple[nn.Module, str]]:
    """Those that are taken over, by the number of their layer, and the family of each."""
    marked = ((m, op) for m in model.modules() if (op := vars(m).get(_MARK)) is not None)
    return {int(getattr(m, "layer_idx", -1)): (m, op) for m, op in marked}


def against_states(model: nn.Module, numbers: Sequence[int], mode: str, latents: bool) -> str:
    """Why steps of these layers, which keep states, cannot be in graphs of a mode; "" where they
    can. latents: do other layers keep latents?"""
    if mode == "piecewise" or latents:
        of = "compiled steps" if mode == "piecewise" else "a cache of latents"
        return f"whose layers {list(numbers)} have states, which {of} cannot have"
    taken = modules_with_states(model).keys()
    found = {getattr(site.module, "layer_idx", None): site.found for site in sites(model)}
    for number in numbers:
        why = found.get(number, "no op of attnops computes them")
        if why and number not in taken:
            return f"whose layers {list(numbers)} have states that move: {why}"
    return ""


def _against(module: nn.Module, code: Any) -> str:
    if _MARK in vars(module):
        return "another patch has taken them over"
    if is_replaced(module):
        return "their forward is replaced on the module itself, or compiled"
    cls: Any = type(module)
    if not can_be_rebound(cls.forward):
        return f"the forward of {cls.__name__} has decorators that are not known"
    odd = [name for name in FAMILIES[_family(cls)].attributes if not hasattr(module, name)]
    is_lightning = lightning.is_one(cls)
    if not is_lightning and conv_of(module) is None:
        odd.append("convolution")
    if odd:
        return f"{cls.__name__} has no {odd[0]}"
    if not is_lightning:
        return _against_functions(cls, code)
    like = lightning.is_like(cls, cls.forward)
    return "" if like else f"{cls.__name__} computes something else than the op"


def _against_functions(cls: Any, code: Any) -> str:
    """The reason in the functions that a class calls by name."""
    called = _called(cls)
    functions = {name: code.__globals__.get(name) for name in called}
    if not {*called} <= {*code.__code__.co_names} or not all(map(callable, functions.values())):
        return f"{cls.__name__} does not call all of {', '.join(called)}"
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
        with use(dict.fromkeys(OPS, "reference")):
            got = _tried(OURS[name](plain, None), name)
        return bool(got) and all(
            n in trial.want and trial.is_met(n, x, 1e-4, 1e-5) for n, x in got.items()
        )


def _tried(function: Function, name: str) -> dict[str, Tensor]:
    """What the function gives and changes, of a few numbers; nothing where it raises."""
    given = _INPUTS[name](name)
    found = answer(functools.partial(function, **given))
    results = found if isinstance(found, tuple) else (found,)
    written = given.get("conv_state", given.get("state"))
    both = (*results, *(() if written is None else (written,)))
    return {str(i): x for i, x in enumerate(both) if isinstance(x, Tensor)}
