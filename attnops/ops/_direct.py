"""Eager calls like one made before go straight to the kernel that was chosen then: no dispatcher, no check, no selection."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, is_grad_enabled

# Read where they lie: a function that hands one out costs more than the read.
from attnops.kernel import _REGISTRY, Capture, Kernel, swallows, takes
from attnops.ops._op import Op, capturing
from attnops.ops.watched import overheard
from attnops.problem import _OVERRIDE
from attnops.select import _ACTIVE, choose

# What Dynamo checks a compiled function's inputs with: type, dtype, device, sizes, strides, requires_grad and dispatch keys (hence
# vmap, inference mode and autocast) of all tensors in half a microsecond. Python takes as long for one. None where torch has moved it.
TensorGuards: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)

Values = tuple[Any, ...]
Types = tuple[type, ...]
Run = Callable[..., Any]
Pick = Callable[[Values], Values]
Pattern = tuple[int, Pick, int]
KINDS = 512
SHAPES = 8
UNBOUNDED = (-1, -1)
"""The default window, known by its identity."""


class Direct:
    """The op, called eagerly. Anything out of the ordinary, and every first call, goes through the dispatcher, whose errors are the errors.

    It is given the arguments of the public function as they are: first the op's tensors in the schema's order, then all else.
    canonical: takes the same and returns the op's arguments, (args, kwargs), always the same names, policy among them. It may look at
    nothing but the values, the shapes of the tensors and the policy in force: it is asked once for all calls that are alike.

    Remembered: at most KINDS combinations of types, as many of numbers and policies, and at most SHAPES sets of shapes of each.
    """

    def __init__(self, op: Op, canonical: Callable[..., tuple[Values, dict[str, Any]]]) -> None:
        self.op, self.overload, self.canonical = op, op.packet.default, canonical
        arguments = self.overload._schema.arguments
        self.kinds = {a.name: str(a.type) for a in arguments}
        self.count, self.positional = len(op.tensors), sum(not a.kwarg_only for a in arguments)
        self.named = tuple(enumerate(op.tensors))[self.positional :]
        self.numbers = itertools.count()
        self.last: tuple[list[type], Pattern | None] = ([], None)
        self.patterns: dict[Types, Pattern | None] = {}
        self.seen: dict[Values, list[tuple[Any, Any, Run]]] = {}

    def __call__(self, values: Values) -> Any:
        """The op's result."""
        graded = is_grad_enabled()
        if (graded and self.op.autograd is None) or overheard():
            args, kwargs = self.canonical(*values)
            return self.overload(*args, **kwargs)
        types = [*map(type, values)]
        last, pattern = self.last
        if types != last:
            pattern = self._pattern(types)
        # 1, 1.0 and True are equal, and so are pairs of them.
        if pattern is None or (
            (pair := pattern[2]) and (window := values[pair]) is not UNBOUNDED and tuple(map(type, window)) != (int, int)
        ):
            args, kwargs = self.canonical(*values)
            return self.overload(*args, **kwargs)
        number, pick, _ = pattern
        count = self.count
        key = (number, graded, _REGISTRY.generation, _OVERRIDE.target, _ACTIVE.key, values[count:])
        tensors = pick(values)
        for first, second, run in self.seen.get(key, ()):
            if first.check(*tensors) if second is None else first.check(*tensors[::2]) and second.check(*tensors[1::2]):
                return run(*values[:count])
        args, kwargs = self.canonical(*values)
        returned = self.overload(*args, **kwargs)
        self._remember(tuple(types), key, tensors, args, kwargs)
        return returned

    def _pattern(self, kinds: list[type]) -> Pattern | None:
        types = tuple(kinds)
        if types not in self.patterns:
            if len(self.patterns) >= KINDS:
                self.patterns.clear()
            found = _pick(types, self.count)
            self.patterns[types] = found and (next(self.numbers), *found)
        pattern = self.patterns.get(types)
        self.last = kinds, pattern
        return pattern

    def _remember(self, types: Types, key: Values, tensors: Values, args: Values, kwargs: dict[str, Any]) -> None:
        if any(type(v) not in PLAIN.get(self.kinds[n], ()) for n, v in kwargs.items()):
            # An int for a float, say: the dispatcher makes one of it.
            self.patterns[types], self.last = None, ([], None)
            return
        if any(t.is_neg() or t.device.type == "meta" for t in tensors):
            return  # a kernel that reads memory would read another sign, or none; the dispatcher makes tensors of it first
        first, second = _guards(tensors), None
        if not first.check(*tensors):
            # A set of guards fails where a tensor comes twice, and those that do are neighbours: key and value, the two cu_seqlens.
            first, second = _guards(tensors[::2]), _guards(tensors[1::2])
            if not (first.check(*tensors[::2]) and second.check(*tensors[1::2])):
                return
        asked = {n: v for n, v in kwargs.items() if n != "policy"}
        kernel = choose(self.op.problem(*args, **asked), kwargs["policy"])
        if key[1] and any(t.requires_grad for t in tensors):
            # The backward asks every kernel for lse.
            kwargs = kwargs | {"return_lse": True}
            kernel = choose(self.op.problem(*args, **asked | {"return_lse": True}), kwargs["policy"])
            run = self._differentiated(kernel, kwargs, asked)
        else:
            run = (kernel.settled and kernel.settled(*args, **kwargs)) or self._bound(kernel.run, kwargs)
        if kernel.capture is Capture.NEVER:
            run = _uncaptured(run, self._bound(self._chosen, kwargs))
        if len(self.seen) >= KINDS:
            self.seen.clear()
        kept = self.seen.setdefault(key, [])
        kept[SHAPES - 1 :] = []
        kept.insert(0, (first, second, run))

    def _differentiated(self, kernel: Kernel, kwargs: dict[str, Any], asked: dict[str, Any]) -> Run:
        """What the op's autograd makes of `kernel`."""
        autograd, positional = self.op.autograd, self.positional
        step = Step(self._bound(kernel.run, kwargs), self.count - positional)
        given = asked | {"policy": kwargs["policy"]}

        def call(*tensors: Any) -> Any:
            assert autograd is not None
            return autograd(step, *tensors[:positional], **given)

        return call

    def _chosen(self, *args: Any, **kwargs: Any) -> Any:
        return self.overload(*args, **kwargs)

    def _bound(self, run: Run, kwargs: dict[str, Any]) -> Run:
        """`run` as a function of the op's tensors alone."""
        known = told(self.op, run, kwargs)
        moving = tuple((i, n) for i, n in self.named if isinstance(known.get(n), Tensor))
        fixed = {n: None if isinstance(v, Tensor) else v for n, v in known.items()}
        positional = self.positional

        def call(*tensors: Any) -> Any:
            kwargs = fixed.copy()
            for i, name in moving:
                kwargs[name] = tensors[i]
            return run(*tensors[:positional], **kwargs)

        return call


class Step:
    """A kernel that was chosen for a call and those like it, where autograd takes an overload. backwards: what serves their gradient."""

    def __init__(self, forward: Run, absent: int) -> None:
        self.forward, self.absent = forward, (None,) * absent
        self.backwards: dict[tuple[Any, ...], Run] = {}

    def __call__(self, *tensors: Any, **_: Any) -> Any:
        """The op's results."""
        return self.forward(*tensors, *self.absent)


def gradient(op: Op, overload: Any, *args: Any, **kwargs: Any) -> Any:
    """The results of the backward `op`, whose first two arguments are gradients; overload: what the forward ran."""
    if not isinstance(overload, Step) or is_grad_enabled() or overheard():
        return op.packet.default(*args, **kwargs)
    # All else that a choice rests on is the forward's.
    key = (_REGISTRY.generation, args[1] is None, kwargs.get("mask_grad"))
    run = overload.backwards.get(key)
    if run is None:
        asked = {n: v for n, v in kwargs.items() if n != "policy"}
        op.check(*args, **asked)
        kernel = choose(op.problem(*args, **asked), kwargs["policy"])
        if kernel.capture is Capture.NEVER:
            return op.packet.default(*args, **kwargs)
        run = overload.backwards[key] = functools.partial(kernel.run, **told(op, kernel.run, kwargs))
    return run(*args)


def told(op: Op, run: Run, kwargs: dict[str, Any]) -> dict[str, Any]:
    """What of `kwargs` the kernel is given. The dispatcher drops what is at its default, so it may not know such an argument."""
    defaults = {a.name: a.default_value for a in op.packet.default._schema.arguments if a.has_default_value()}
    more = swallows(run)
    return {n: v for n, v in kwargs.items() if takes(run, n) or (more and not (n in defaults and _same(v, defaults[n])))}


def _same(value: Any, default: Any) -> bool:
    return value is default or (type(value) is type(default) and not isinstance(value, Tensor) and bool(value == default))


def _uncaptured(run: Run, within: Run) -> Run:
    """`run`, and `within` in its place while the current stream is captured."""

    def call(*tensors: Any) -> Any:
        return (within if capturing(tensors[0]) else run)(*tensors)

    return call


PLAIN: dict[str, Types] = {
    "Tensor": (Tensor, torch.nn.Parameter),
    "Optional[Tensor]": (Tensor, torch.nn.Parameter, type(None)),
    "int": (int,),
    "float": (float,),
    "bool": (bool,),
    "str": (str,),
}
"""What the dispatcher hands on as it is, by the schema's word for it."""


def _guards(tensors: Values) -> Any:
    return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)


def _pick(types: Types, width: int) -> tuple[Pick, int] | None:
    """What picks the tensors from a call's values, and where a pair stands (0: nowhere); None for types that are not keyed."""
    tensors, others = types[:width], types[width:]
    pairs = [i for i, t in enumerate(types) if t is tuple]
    if TensorGuards is None or len(pairs) > 1 or not set(tensors) <= {*PLAIN["Optional[Tensor]"]}:
        return None
    if not set(others) <= {int, float, bool, str, tuple, type(None)}:
        return None
    where = [i for i, t in enumerate(tensors) if t is not type(None)]
    # With one or none itemgetter returns no tuple, and no op is called with so few.
    return (itemgetter(*where), pairs[0] if pairs else 0) if len(where) > 1 else None
