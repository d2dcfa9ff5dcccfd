"""The way of an eager call: one bounded cache, from calls like one made before to what served it.

Checks and selection look at shapes, strides, dtypes, devices and scalars only, so a call like one seen before needs neither. A call
goes straight to its kernel, past the dispatcher, unless something else must see it: see `attnops.ops.watched`.

TensorGuards is not public torch. Where torch has moved it, `Likeness` takes its place; a test runs both.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

# Read as attributes: a function that hands one out costs more than the read.
from attnops.call import Call, Spec, check, values
from attnops.kernel import _REGISTRY, Capture
from attnops.problem import _OVERRIDE, Extent
from attnops.select import choose

if TYPE_CHECKING:
    from attnops.ops.op import Op

Run = Callable[[Any], Any]

KINDS = 512
"""Combinations of types and scalars that an op remembers."""
SHAPES = 8
"""Sets of shapes that it remembers of each."""

_nested = attrgetter("is_nested")
_TensorGuards: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)


def capturing(tensor: Tensor) -> bool:
    """Does a call on `tensor` become part of a CUDA graph?"""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


class Likeness:
    """Whether tensors are like those given, by public torch alone: type, dtype, device, sizes, strides, gradient, sign and inference."""

    def __init__(self, *tensors: Tensor, **_: None) -> None:
        self.facts = [*map(self._facts, tensors)]

    @staticmethod
    def _facts(t: Tensor) -> tuple[Any, ...]:
        return type(t), t.shape, t.stride(), t.dtype, t.device, t.requires_grad, t.is_neg(), t.is_conj(), t.is_inference()

    def check(self, *tensors: Tensor) -> bool:
        """Are they all alike?"""
        return self.facts == [*map(self._facts, tensors)]


def guards_of(tensors: tuple[Tensor, ...]) -> Any:
    """What tells whether other tensors are like these. Dynamo's own takes half a microsecond for all, Python as long for one."""
    guards = (_TensorGuards or Likeness)(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    # Dynamo's fail where a tensor comes twice.
    return guards if guards.check(*tensors) else Likeness(*tensors)


@dataclass(frozen=True)
class Pattern:
    """How calls whose arguments have these types are told apart.

    number: tells patterns apart in a key. tensors, scalars: pick the tensors that are given, and all else, from a call.
    grows: for each of these tensors the dim whose size grows from call to call (`Spec.grows`), -1 if there is none.
    """

    number: int
    tensors: Callable[[Any], tuple[Any, ...]]
    scalars: Callable[[Any], tuple[Any, ...]]
    grows: tuple[int, ...]

    def outline(self, tensors: tuple[Tensor, ...]) -> tuple[int, set[int], list[Any]]:
        """(the size that grows, all other sizes, everything that checks and selection see of the tensors but that size).

        The first is 0 where no size grows.
        """
        size, others, rest = 0, set[int](), list[Any]()
        for t, dim in zip(tensors, self.grows, strict=True):
            shape = list(t.shape)
            if 0 <= dim < len(shape):  # a call of wrong shapes is refused later
                own = shape.pop(dim)
                rest.append(size in (0, own))
                size = own
            others.update(shape)
            rest.append((shape, t.stride()[-1:], t.dtype, t.device, t.requires_grad))
        return size, others, rest


_PLAIN: dict[str, tuple[type, ...]] = {
    "Tensor": (Tensor, torch.nn.Parameter),
    "Tensor | None": (Tensor, torch.nn.Parameter, type(None)),
    "int": (int,),
    "float": (float,),
    "bool": (bool,),
    "str": (str,),
}


def pattern(spec: Spec, types: tuple[type, ...], number: int) -> Pattern | None:
    """The Pattern of calls with arguments of these types; None where one is of a type that is not compared (a subclass, an int for a
    float), so that such a call takes the dispatcher's way."""
    if any(t not in _PLAIN[a.kind] for a, t in zip(spec.args, types, strict=True)):
        return None
    tensors = [i for i, (a, t) in enumerate(zip(spec.args, types, strict=True)) if a.tensor and t is not type(None)]
    others = [i for i, a in enumerate(spec.args) if not a.tensor]
    layouts = [[size.text for size in spec.args[i].layout] for i in tensors]
    grows = tuple(layout.index(spec.grows) if spec.grows in layout else -1 for layout in layouts)
    return Pattern(number, _picker(tensors), _picker(others), grows)


def _picker(places: list[int]) -> Callable[[Any], tuple[Any, ...]]:
    if len(places) > 1:
        return itemgetter(*places)
    return (lambda call: (call[places[0]],)) if places else (lambda call: ())


@dataclass
class Eager:
    """The cache of one op.

    patterns: by the types of the arguments, which are compared before the scalars: 1, 1.0 and True are equal. seen: by pattern, scalars
    and what else selection depends on, up to SHAPES of (guards of the tensors, what runs, the outline of the tensors).
    """

    op: Op
    patterns: dict[tuple[type, ...], Pattern | None] = field(default_factory=dict)
    seen: dict[tuple[Any, ...], list[tuple[Any, Run, Any]]] = field(default_factory=dict)
    numbers: Any = field(default_factory=itertools.count)

    def find(self, call: Call) -> Run | None:
        """What runs calls like this one; None where the dispatcher must see it first."""
        kind = self._kind(call)
        if kind is None:
            return None
        key = (kind.number, _REGISTRY.generation, _OVERRIDE.target, kind.scalars(call))
        tensors = kind.tensors(call)
        if any(map(_nested, tensors)):
            return None  # the guards would abort the process: a nested tensor has no sizes
        for guards, run, _ in self.seen.get(key, ()):
            if guards.check(*tensors):
                return run
        return self._remember(key, kind, tensors, call)

    def run(self, call: Call) -> Any:
        """The op's results, from below the dispatcher."""
        run = self.find(call)
        return (checked(self.op, call) if run is None else run)(call)

    def plain(self, call: Call) -> bool:
        """May a kernel be handed the tensors as they are?"""
        kind = self._kind(call)
        return kind is not None and all(map(_plain, kind.tensors(call)))

    def _kind(self, call: Call) -> Pattern | None:
        types = tuple(map(type, values(call)))
        try:
            return self.patterns[types]
        except KeyError:
            pass
        if len(self.patterns) >= KINDS:
            self.patterns.clear()
        found = self.patterns[types] = pattern(self.op.spec, types, next(self.numbers))
        return found

    def _remember(self, key: tuple[Any, ...], kind: Pattern, tensors: tuple[Tensor, ...], call: Call) -> Run | None:
        if not all(map(_plain, tensors)):
            return None
        # A decode step has one key more than the last one: its first layer would pay for checks and selection as much as for ten calls.
        kept = self.seen.get(key)
        run = kept[0][1] if kept and _grown(kind.outline(tensors), kept[0][2]) else checked(self.op, call)
        if len(self.seen) >= KINDS:
            self.seen.clear()
        kept = self.seen.setdefault(key, [])
        kept[SHAPES - 1 :] = []
        kept.insert(0, (guards_of(tensors), run, kind.outline(tensors)))
        return run


def _grown(new: tuple[int, set[int], list[Any]], old: tuple[int, set[int], list[Any]]) -> bool:
    """Would checks and selection treat calls of these outlines alike?"""
    size, others, rest = new
    if not size or size == old[0] or rest != old[2] or False in rest or {0, size, old[0]} & others:
        return False
    return Extent.of(size) == Extent.of(old[0])


def _plain(t: Tensor) -> bool:
    """Is the memory of `t` what it says? A kernel would read another number, or none; the dispatcher deals with such tensors first."""
    return not (t.is_neg() or t.is_conj() or t.is_nested) and t.device.type != "meta" and t.layout is torch.strided


def checked(op: Op, call: Call) -> Run:
    """What runs the kernel chosen for `call`, which is checked first. Raises InvalidInput, NoKernel."""
    check(call)
    policy = getattr(call, "policy")  # noqa: B009 - every record has one, and no type checker knows
    problem = op.problem(call)
    kernel = choose(problem, policy)
    if kernel.capture is not Capture.NEVER:
        return kernel.run

    def run(call: Call) -> Any:
        # Only calls of such a kernel ask, so that all others cost nothing more.
        answers = choose(replace(problem, capturing=True), policy) if capturing(values(call)[0]) else kernel
        return answers.run(call)

    return run
