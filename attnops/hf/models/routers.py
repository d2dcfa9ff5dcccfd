"""The routers of transformers models through `attnops.ops.route` where a kernel of attnops is
chosen; all other calls are their own code's.

A router becomes an object of a subclass of its class. So hooks run as before, transformers finds
the class whose outputs it records, compilers see a method, and layers can be traced alone, which a
forward of the instance would prevent. A pass over graphs would leave out eager code.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized

from attnops.core.record import asked, changed, name as name_of
from attnops.core.select import active_policy
from attnops.core.tracers import is_recorded
from attnops.graphs.per_layer import NUMBER
from attnops.hf.models.chosen import is_ours
from attnops.hf.models.experts import plain
from attnops.hf.models.methods import is_replaced
from attnops.hf.models.trial import alone, answer
from attnops.kernels.triton.attention import FLOATS
from attnops.nn.class_swap import Swap, subclass
from attnops.nn.steady import apart
from attnops.ops.experts.route import SCORING, Route, is_allowed, route
from attnops.ops.experts.route_reference import chosen, values, weighed

_RULE = "_attnops_route"
_PLAIN: Route = cast(Any, Route)()
"""A call without tensors, and with its numbers at their defaults."""
HANDED = "_attnops_handed"
"""In place of the name of a bias that the caller hands to a router beside the tokens."""


@dataclass(frozen=True)
class Rule:
    """How a router makes logits, and how the op chooses by them as it does.

    given: the arguments of the op that are not at their defaults, without tensors.
    top_k: experts of a token.
    weight, added, bias: names of its tensors: the weight, what is added to the product, and what is
    added for the choice; "" for none.
    wide: logits are a product in float32, whatever the weight is.
    float32: the dtype of the weights, and not that of the tokens.
    mixed: the rule holds for a weight that stays in float32 where tokens are bfloat16, too.
    flattens: tokens may come as `[B, S, H]`.
    said: attributes of the router by which the rule was found, and their values.
    """

    given: dict[str, Any]
    top_k: int
    weight: str
    added: str = ""
    bias: str = ""
    wide: bool = False
    float32: bool = False
    mixed: bool = False
    flattens: bool = False
    said: tuple[tuple[str, Any], ...] = ()

    def logits(self, module: Any, x: Tensor) -> Tensor:
        """Those of tokens `[T, H]`."""
        weight = getattr(module, self.weight)
        added = getattr(module, self.added) if self.added else None
        if self.wide:
            x, weight, added = x.float(), weight.float(), None if added is None else added.float()
        return F.linear(x, weight, added)


@dataclass(frozen=True)
class Site:
    """A router of a model, and its rule, or the reason why it is left as it is."""

    module: nn.Module
    found: Rule | str


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
        left = Counter(site.found for site in self.sites if isinstance(site.found, str))
        count, taken = len(self.sites), len(self.sites) - left.total()
        own = (
            f"routers of {taken} of {count} layers: on a GPU, without gradients; "
            "transformers' own code else"
        )
        return (
            *((own,) if taken else ()),
            *(
                f"routers of {n} of {count} layers are left as they are: {why}"
                for why, n in left.items()
            ),
        )


@functools.cache
def served(cls: Any) -> type:
    """A subclass of the router `cls` with its name. Its objects can be copied and pickled."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        rule: Rule | None = self.__dict__.get(_RULE)
        if rule is None or is_recorded() or kwargs or not _serves(self, args, rule):
            return apart(cls.forward, self, *args, **kwargs)
        x = args[0].reshape(-1, args[0].shape[-1])
        bias = args[1] if rule.bias == HANDED else getattr(self, rule.bias) if rule.bias else None
        logits = apart(rule.logits, self, x)
        return (
            logits,
            *route(
                logits,
                rule.top_k,
                bias,
                **rule.given,
                dtype=torch.float32 if rule.float32 else x.dtype,
            ),
        )

    return subclass(cls, {"forward": forward}, (served, cls))


def _serves(module: Any, args: tuple[Any, ...], rule: Rule) -> bool:
    """Does a kernel of ours serve the call?"""
    if len(args) != 1 + (rule.bias == HANDED):
        return False
    x, weight = args[0], getattr(module, rule.weight)
    # An adapter of LoRA puts its own tensor in the parameter's place for the time of a call. Some
    # routers add noise in training.
    if (
        torch.is_grad_enabled()
        or module.training
        or not plain(weight)
        or torch.is_autocast_enabled(x.device.type)
    ):
        return False
    if x.dtype != weight.dtype and not (rule.mixed and weight.dtype == torch.float32):
        return False
    if (
        (x.dim() != 2 and not rule.flattens)
        or x.device != weight.device
        or x.shape[-1] != weight.shape[1]
    ):
        return False
    if any(getattr(module, field, None) != value for field, value in rule.said):
        return False
    asks = (*rule.given, "bias") if rule.bias else tuple(rule.given)
    sizes = ("experts", weight.shape[0]), ("top_k", rule.top_k)
    return bool(
        is_ours(
            "route",
            active_policy(),
            x.device,
            torch.float32 if rule.wide else x.dtype,
            None,
            sizes,
            asks,
        )
    )


# Recognition --------------------------------------------------------------------------------------


def sites(model: nn.Module) -> Iterator[Site]:
    """The routers of a model: modules with a number of choices and a matrix."""
    known: dict[tuple[Any, ...], Rule | None] = {}
    for module in model.modules():
        if is_router(module):
            yield Site(module, _against(module) or _rule(module, known))


def is_router(module: nn.Module) -> bool:
    """Is it one by its name, or by a number of choices and a matrix?"""
    named = "Router" in type(module).__name__
    return named or (type(getattr(module, "top_k", None)) is int and bool(_matrices(module)))


def is_taken(module: nn.Module) -> bool:
    """Is it a router of a patched model, that is taken over?"""
    return _RULE in vars(module)


def _matrices(module: nn.Module) -> list[str]:
    return [n for n, p in module._parameters.items() if p is not None and p.dim() == 2]


def _against(module: nn.Module) -> str:
    """Why a router is left as it is, but for its numbers; "" if it is not."""
    parameters = [p for p in module._parameters.values() if p is not None]
    if is_taken(module):
        return "another patch has taken them over"
    if is_replaced(module):
        return "their forward is replaced on the module itself, or compiled"
    if is_parametrized(module) or not all(map(plain, parameters)):
        return "their weights are no plain parameters"
    if len(_matrices(module)) != 1 or any(module.children()):
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


def rule_of(module: nn.Module) -> Rule | None:
    """The rule of a router, found by trying its own forward on a few tokens, in float32 and in
    bfloat16; None: the op has no such rule."""
    with alone():
        first = _Trial.of(module, torch.float32)
        if first is None or (found := _found(first)) is None:
            return None
        again = _tried(_Trial.of(module, torch.bfloat16), found)
        if again is None:
            return None
        # Some models keep the weights of routers in float32 when the rest is cast.
        wide = _Trial.of(module, torch.float32, tokens=torch.bfloat16)
        return replace(again, mixed=_tried(wide, again) == again)


TOKENS = 64
LOWEST = (-50.0, -8.0, -5.0)
"""Of tokens whose logits are all four times that: sums of their sigmoids are 0, or as small as
numbers added to them."""
EPS = (0.0, 1e-20, 1e-12, 1e-6)


@dataclass(frozen=True)
class _Trial:
    """A copy of a router with random tensors, tokens, and its answers. flattens: as of a Rule."""

    twin: Any
    x: Tensor
    flattens: bool
    logits: Tensor
    weights: Tensor
    index: Tensor

    @classmethod
    def of(
        cls, module: nn.Module, dtype: torch.dtype, tokens: torch.dtype | None = None
    ) -> _Trial | None:
        """None where the router has no such answers.

        dtype: of the parameters. tokens: that of the tokens; None: the same.
        """
        source = torch.Generator("cpu").manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=source)

        twin: Any = object.__new__(type(module))
        parameters = {
            n: p if p is None else random(*p.shape).to(dtype) / 4
            for n, p in module._parameters.items()
        }
        buffers = {
            n: b if b is None else (random(*b.shape) / 4).to(b.dtype)
            for n, b in module._buffers.items()
        }
        twin.__dict__.update(vars(module), training=False, _parameters=parameters, _buffers=buffers)
        [name] = _matrices(module)
        weight: Any = parameters[name]
        weight *= 8 * weight.shape[1] ** -0.5
        weight[:, 0] = 4.0
        x = random(TOKENS + len(LOWEST), weight.shape[1]).to(tokens or dtype)
        x[:, 0] = 0.0
        x[TOKENS:] = 0.0
        x[TOKENS:, 0] = torch.tensor(LOWEST)
        if len(_required(type(module))) == 3:
            twin.__dict__[HANDED] = random(weight.shape[0]) / 4
        before = _seen(twin)
        flat = _answers(module, twin, x)
        if flat is None:
            return None
        flattens = _answers(module, twin, x[None]) is not None
        # The op would not write what its forward writes.
        return cls(twin, x, flattens, *flat) if _seen(twin) == before else None

    def named(self, count: int) -> list[str]:
        """The twin's tensors of a number an expert."""
        every = (
            *self.twin._parameters.items(),
            *self.twin._buffers.items(),
            (HANDED, vars(self.twin).get(HANDED)),
        )
        return [
            n for n, t in every if t is not None and t.shape == (count,) and t.is_floating_point()
        ]


def _seen(module: Any) -> dict[str, Any]:
    """The attributes and buffers of a module, and how often each tensor was written."""
    return {
        n: (id(v), getattr(v, "_version", 0))
        for n, v in (*vars(module).items(), *module._buffers.items())
    }


def _required(cls: Any) -> list[str]:
    """The arguments that a call of its forward must give."""
    return [
        n
        for n, p in inspect.signature(cls.forward).parameters.items()
        if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
    ]


def _answers(module: nn.Module, twin: Any, x: Tensor) -> tuple[Tensor, ...] | None:
    """(logits, weights, index), each `[T, ...]`, or None."""
    out = answer(
        type(module).forward, twin, x, *([vars(twin)[HANDED]] if HANDED in vars(twin) else [])
    )
    if not (
        isinstance(out, tuple)
        and len(out) == 3
        and all(isinstance(t, Tensor) and t.dim() == 2 for t in out)
    ):
        return None
    logits, weights, index = out
    fits = (
        weights.shape == index.shape
        and logits.shape[0] == index.shape[0] == x.shape[-2]
        and 1 <= index.shape[1] <= logits.shape[1]
    )
    kinds = (
        logits.is_floating_point() and weights.is_floating_point() and index.dtype == torch.int64
    )
    return out if fits and kinds else None


def _tried(trial: _Trial | None, like: Rule) -> Rule | None:
    """The rule by which all answers of the trial are right.

    like: the one that the answers in float32 were right by.
    """
    if trial is None or {trial.logits.dtype, trial.weights.dtype} - {trial.x.dtype, torch.float32}:
        return None
    rule = replace(
        like,
        wide=trial.logits.dtype == torch.float32,
        float32=trial.weights.dtype == torch.float32,
        flattens=trial.flattens,
    )
    call = changed(_PLAIN, **rule.given)
    chooses = _multiplies(trial, rule) and _chooses(trial, call, rule.bias)
    return rule if chooses and _weighs(trial, call, 2.0**-6) else None


def _found(trial: _Trial) -> Rule | None:
    """The first rule with the router's own numbers by which the answers are right."""
    count, top_k, [weight] = trial.logits.shape[1], trial.index.shape[1], _matrices(trial.twin)
    names = ["", *trial.named(count)]
    numbers = [v for v in vars(trial.twin).values() if type(v) in (int, float)]
    ints = sorted({v for v in numbers if type(v) is int and 1 <= v <= count})
    scales = dict.fromkeys((1.0, *map(float, numbers)))

    def calls(like: Route, **choices: Iterable[Any]) -> list[Route]:
        """Those that the op takes, with one of the choices for each of these arguments."""
        given = (dict(zip(choices, each, strict=True)) for each in product(*choices.values()))
        return [call for each in given if is_allowed(call := changed(like, **each), count, top_k)]

    # The experts of all groups are those of one.
    grouped = calls(_PLAIN, groups=ints, top_groups=ints, group_best=(1, 2))
    groupings = [_PLAIN, *(call for call in grouped if call.top_groups < call.groups)]
    for added, like, bias, scoring in product(names, groupings, names, SCORING):
        rule, call = Rule({}, top_k, weight, added, bias), changed(like, scoring=scoring)
        if _multiplies(trial, rule) and _chooses(trial, call, bias):
            for each in calls(call, normalize=(False, True), eps=EPS, scale=scales):
                if _weighs(trial, each, 1e-4):
                    return replace(rule, given={n: getattr(each, n) for n in sorted(asked(each))})
    return None


def _multiplies(trial: _Trial, rule: Rule) -> bool:
    """Are the logits those of the rule?"""
    return torch.equal(rule.logits(trial.twin, trial.x), trial.logits)


def _chooses(trial: _Trial, call: Route, bias: str) -> bool:
    """Is the choice that of the call? Of equal experts any may be chosen."""
    logits, added = trial.logits.float(), getattr(trial.twin, bias) if bias else None
    by, own = values(call, logits, added), chosen(call, logits, added, trial.index.shape[1])
    ours, theirs = (by.gather(1, i).sort(1).values for i in (own, trial.index))
    once = (trial.index.sort(1).values.diff(dim=1) > 0).all()
    return bool(once) and torch.allclose(ours, theirs, rtol=1e-6, atol=1e-6)


def _weighs(trial: _Trial, call: Route, tolerance: float) -> bool:
    ours, theirs = weighed(call, trial.logits.float(), trial.index), trial.weights.float()
    return torch.allclose(ours, theirs, rtol=tolerance, atol=1e-30, equal_nan=True)
