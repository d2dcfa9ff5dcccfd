"""Which router of transformers chooses experts as `attnops.ops.route` does, and by which arguments:
found by trying its own code."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnops.core.record import asked, changed
from attnops.hf.models.trial import Trial, alone, answers
from attnops.ops.experts.route import SCORING, Route, is_allowed
from attnops.ops.experts.route_reference import chosen, values, weighed

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


def matrices(module: nn.Module) -> list[str]:
    """The names of its own parameters of two dims."""
    return [n for n, p in module._parameters.items() if p is not None and p.dim() == 2]


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
NAMES = ("logits", "weights", "index")
"""Of a router's answers."""


@dataclass(frozen=True)
class _Trial(Trial):
    """A run of a router on tokens `[T, H]`.

    twin: a copy of it with random tensors, which ran. flattens: as of a Rule.
    """

    twin: Any
    flattens: bool

    @classmethod
    def of(
        cls, module: nn.Module, dtype: torch.dtype, tokens: torch.dtype | None = None
    ) -> _Trial | None:
        """None where the router has no such answers.

        dtype: of the parameters. tokens: that of the tokens; None: the same.
        """
        twin, x = _made(module, dtype, tokens or dtype)
        before = _seen(twin)
        want = _answers(module, twin, x)
        if want is None:
            return None
        flattens = _answers(module, twin, x[None]) is not None
        # The op would not write what its forward writes.
        return cls(x, want, twin, flattens) if _seen(twin) == before else None

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


def _made(module: nn.Module, dtype: torch.dtype, tokens: torch.dtype) -> tuple[Any, Tensor]:
    """(a copy of a router with random tensors, tokens `[T, H]` for it)."""
    source = torch.Generator("cpu").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source)

    twin: Any = object.__new__(type(module))
    parameters = {
        n: p if p is None else random(*p.shape).to(dtype) / 4 for n, p in module._parameters.items()
    }
    buffers = {
        n: b if b is None else (random(*b.shape) / 4).to(b.dtype)
        for n, b in module._buffers.items()
    }
    twin.__dict__.update(vars(module), training=False, _parameters=parameters, _buffers=buffers)
    [name] = matrices(module)
    weight: Any = parameters[name]
    weight *= 8 * weight.shape[1] ** -0.5
    weight[:, 0] = 4.0
    x = random(TOKENS + len(LOWEST), weight.shape[1]).to(tokens)
    x[:, 0] = 0.0
    x[TOKENS:] = 0.0
    x[TOKENS:, 0] = torch.tensor(LOWEST)
    if len(_required(type(module))) == 3:
        twin.__dict__[HANDED] = random(weight.shape[0]) / 4
    return twin, x


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


def _answers(module: nn.Module, twin: Any, x: Tensor) -> dict[str, Tensor] | None:
    """Those of the router, `[T, ...]` each; None where it has others."""
    handed = (vars(twin)[HANDED],) if HANDED in vars(twin) else ()
    found = answers(NAMES, type(module).forward, twin, x, *handed)
    return found if found is not None and _are_a_choice(found, x.shape[-2]) else None


def _are_a_choice(found: dict[str, Tensor], tokens: int) -> bool:
    """Are they logits of so many tokens, and the weights and numbers of some experts?"""
    logits, weights, index = found.values()
    if not logits.dim() == weights.dim() == index.dim() == 2:
        return False
    fits = weights.shape == index.shape and logits.shape[0] == index.shape[0] == tokens
    kinds = (
        logits.is_floating_point() and weights.is_floating_point() and index.dtype == torch.int64
    )
    return fits and kinds and 1 <= index.shape[1] <= logits.shape[1]


def _tried(trial: _Trial | None, like: Rule) -> Rule | None:
    """The rule by which all answers of the trial are right.

    like: the one that the answers in float32 were right by.
    """
    if trial is None:
        return None
    logits, weights = trial.want["logits"].dtype, trial.want["weights"].dtype
    if {logits, weights} - {trial.inputs.dtype, torch.float32}:
        return None
    rule = replace(
        like,
        wide=logits == torch.float32,
        float32=weights == torch.float32,
        flattens=trial.flattens,
    )
    call = changed(_PLAIN, **rule.given)
    chooses = _multiplies(trial, rule) and _chooses(trial, call, rule.bias)
    return rule if chooses and _weighs(trial, call, 2.0**-6) else None


def _found(trial: _Trial) -> Rule | None:
    """The first rule with the router's own numbers by which the answers are right."""
    count, top_k = trial.want["logits"].shape[1], trial.want["index"].shape[1]
    [weight] = matrices(trial.twin)
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
    return torch.equal(rule.logits(trial.twin, trial.inputs), trial.want["logits"])


def _chooses(trial: _Trial, call: Route, bias: str) -> bool:
    """Is the choice that of the call? Of equal experts any may be chosen."""
    logits, index = trial.want["logits"].float(), trial.want["index"]
    added = getattr(trial.twin, bias) if bias else None
    by, own = values(call, logits, added), chosen(call, logits, added, index.shape[1])
    ours, theirs = (by.gather(1, i).sort(1).values for i in (own, index))
    once = (index.sort(1).values.diff(dim=1) > 0).all()
    return bool(once) and torch.allclose(ours, theirs, rtol=1e-6, atol=1e-6)


def _weighs(trial: _Trial, call: Route, tolerance: float) -> bool:
    """Are the weights those of the call?"""
    ours = weighed(call, trial.want["logits"].float(), trial.want["index"])
    return trial.is_met("weights", ours, tolerance, 1e-30, equal_nan=True)
