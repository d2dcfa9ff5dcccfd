"""The routers of transformers models through `attnops.ops.route` where a kernel of attnops is
chosen, in compiled code, in CUDA graphs and under a deterministic policy; all other calls are their
own code's.

A router becomes an object of a subclass of its class. So hooks run as before, transformers finds
the class whose outputs it records, compilers see a method, and layers can be traced alone, which a
forward of the instance would prevent. A pass over graphs would leave out eager code.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.utils.parametrize import is_parametrized

from attnops.core.private_torch import capturing
from attnops.core.record import name as name_of
from attnops.core.select import active_policy, parse_policy
from attnops.core.tracers import is_recorded
from attnops.graphs.capturing import AS_CAPTURED
from attnops.graphs.per_layer import NUMBER
from attnops.hf.models.chosen import is_ours
from attnops.hf.models.experts import plain
from attnops.hf.models.methods import is_replaced
from attnops.hf.models.router_rules import HANDED, Rule, matrices, rule_of
from attnops.hf.models.trial import Site, left_alone
from attnops.kernels.triton.attention import FLOATS
from attnops.nn.class_swap import Swap, subclass
from attnops.nn.steady import apart
from attnops.ops.experts.route import route

_RULE = "_attnops_route"


class Routers:
    """The routers of a model, taken over until `undo()`."""

    def __init__(self, model: nn.Module) -> None:
        self.sites = tuple(sites(model))
        found = ((site.module, site.found) for site in self.sites)
        self._swaps = [
            Swap(module, served, attributes={_RULE: rule})
            for module, rule in found
            if isinstance(rule, Rule)
        ]

    def undo(self) -> None:
        """Give the modules back as they were, see `Swap.undo`. One that keeps a class of its own
        runs its own code."""
        for swap in self._swaps:
            swap.undo()
            swap.target.__dict__.pop(_RULE, None)

    def notes(self) -> tuple[str, ...]:
        """Lines of a report; none for a model without routers."""
        count, taken = len(self.sites), len(self._swaps)
        ours = (
            f"routers of {taken} of {count} layers: in compiled code, in CUDA graphs and under a "
            "deterministic policy, on a GPU, without gradients; transformers' own code else"
        )
        return (
            *((ours,) if taken else ()),
            *left_alone("routers", [site.found for site in self.sites]),
        )


_LAUNCHED: set[tuple[Any, ...]] = set()
"""Kinds of eager calls for which the op was launched."""


@functools.cache
def served(cls: Any) -> type:
    """A subclass of the router `cls` with its name. Its objects can be copied and pickled."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        rule: Rule | None = self.__dict__.get(_RULE)
        if rule is None or kwargs or not args:
            return apart(cls.forward, self, *args, **kwargs)
        x = args[0]
        eager = _is_eager(x)
        if eager:
            # A kernel is compiled for a number of experts, which is a size of the weight.
            kind = cls, rule.said, getattr(self, rule.weight).shape, x.device, x.dtype
            if kind in _LAUNCHED:
                return cls.forward(self, *args)
        if is_recorded() or not _serves(self, args, rule):
            return apart(cls.forward, self, *args)
        routed = _routed(self, args, rule)
        if not eager:
            return routed
        # A kernel is loaded at its first launch, and cannot be while a graph is captured.
        _LAUNCHED.add(kind)
        return cls.forward(self, *args)

    return subclass(cls, {"forward": forward}, (served, cls))


def _is_eager(x: Any) -> bool:
    """Is this a plain eager call, in which transformers' own code costs the host less than the op?

    It is not where the call is traced, as by fake tensors, or becomes part of a CUDA graph, and
    where the policy is deterministic or names a kernel of the op.
    """
    if is_dynamo_compiling() or type(x) is not Tensor:
        return False
    return not (AS_CAPTURED.get() or capturing(x) or _wants_op(active_policy()))


def _wants_op(key: str) -> bool:
    """Does a policy ask for the op by what it says?"""
    if not key:
        return False
    policy = parse_policy(key)
    return policy.deterministic or bool(policy.forced("route"))


def _routed(module: Any, args: tuple[Any, ...], rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """(logits, weights, index) by the op."""
    x = args[0].reshape(-1, args[0].shape[-1])
    bias = args[1] if rule.bias == HANDED else getattr(module, rule.bias) if rule.bias else None
    logits = apart(rule.logits, module, x)
    dtype = torch.float32 if rule.float32 else x.dtype
    return (logits, *route(logits, rule.top_k, bias, **rule.given, dtype=dtype))


def _serves(module: Any, args: tuple[Any, ...], rule: Rule) -> bool:
    """Does a kernel of ours serve the call?"""
    if len(args) != 1 + (rule.bias == HANDED):
        return False
    x, weight = args[0], getattr(module, rule.weight)
    if not (_is_as_tried(module, weight, rule) and _fits(x, weight, rule)):
        return False
    asks = (*rule.given, "bias") if rule.bias else tuple(rule.given)
    sizes = ("experts", weight.shape[0]), ("top_k", rule.top_k)
    dtype = torch.float32 if rule.wide else x.dtype
    return bool(is_ours("route", active_policy(), x.device, dtype, None, sizes, asks))


def _is_as_tried(module: Any, weight: Any, rule: Rule) -> bool:
    """Does the module compute as it did when its rule was found?"""
    # Some routers add noise in training. An adapter of LoRA puts its own tensor in the parameter's
    # place for the time of a call.
    if torch.is_grad_enabled() or module.training or not plain(weight):
        return False
    return all(getattr(module, field, None) == value for field, value in rule.said)


def _fits(x: Tensor, weight: Tensor, rule: Rule) -> bool:
    """Does the rule hold for these tokens?"""
    if torch.is_autocast_enabled(x.device.type) or x.device != weight.device:
        return False
    mixed = rule.mixed and weight.dtype == torch.float32
    shaped = (x.dim() == 2 or rule.flattens) and x.shape[-1] == weight.shape[1]
    return shaped and (x.dtype == weight.dtype or mixed)


# Recognition --------------------------------------------------------------------------------------


def sites(model: nn.Module) -> Iterator[Site[Rule]]:
    """The routers of a model: modules with a number of choices and a matrix."""
    known: dict[tuple[Any, ...], Rule | None] = {}
    for module in model.modules():
        if is_router(module):
            yield Site(module, _against(module) or _rule(module, known))


def is_router(module: nn.Module) -> bool:
    """Is it one by its name, or by a number of choices and a matrix?"""
    named = "Router" in type(module).__name__
    return named or (type(getattr(module, "top_k", None)) is int and bool(matrices(module)))


def is_taken(module: nn.Module) -> bool:
    """Is it a router of a patched model, that is taken over?"""
    return _RULE in vars(module)


def _against(module: nn.Module) -> str:
    """Why a router is left as it is, but for its numbers; "" if it is not."""
    parameters = [p for p in module._parameters.values() if p is not None]
    if is_taken(module):
        return "another patch has taken them over"
    if is_replaced(module):
        return "their forward is replaced on the module itself, or compiled"
    if is_parametrized(module) or not all(map(plain, parameters)):
        return "their weights are no plain parameters"
    if len(matrices(module)) != 1 or any(module.children()):
        return f"{type(module).__name__} has not one matrix of its own and no other module"
    odd = [name_of(p.dtype) for p in parameters if p.dtype not in FLOATS]
    return f"their weights are {odd[0]}" if odd else ""


def _rule(module: nn.Module, known: dict[tuple[Any, ...], Rule | None]) -> Rule | str:
    """The rule of the module. known: those of modules like it."""
    tensors = tuple(
        (n, t.shape, t.dtype)
        for part in (module._parameters, module._buffers)
        for n, t in part.items()
        if t is not None
    )
    plain_values = tuple(
        (n, v)
        for n, v in vars(module).items()
        if type(v) in (bool, int, float, str, type(None)) and n != "training"
    )
    key = type(module), tensors, plain_values
    if key not in known:
        # The number of a layer is another one in code that layers share.
        said = tuple((n, v) for n, v in plain_values if n != NUMBER)
        found = rule_of(module)
        known[key] = found and replace(found, said=said)
    return known[key] or f"the op does not choose as {type(module).__name__} does"
