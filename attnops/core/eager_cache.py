"""The way of an eager call: one bounded cache, from calls like one made before to the kernel that
served it.

Checks and selection look at shapes, strides, dtypes, devices and scalars only, so a call like one
seen before needs neither. A call goes straight to its kernel, past the dispatcher, unless something
else must see it: see `overheard`.

Where torch has no TensorGuards, `Likeness` takes its place; a test runs both.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad
from torch.compiler import is_compiling, is_dynamo_compiling

from attnops.core.adapt import placed
from attnops.core.arguments import FURTHEST
from attnops.core.checks import plain_only, python_number, refuse_foreign
from attnops.core.errors import InvalidInput, NoGradient, fail
from attnops.core.foreign import answering, is_foreign
from attnops.core.kernel import _REGISTRY, Capture, deterministic, fits_a_graph
from attnops.core.private_torch import (
    TensorGuards,
    autocasting,
    capturing,
    count_dispatch_modes,
    count_function_modes,
    must_repeat,
    of_a_batch,
    only_warns,
    profiling,
    tracing,
    transformed,
    uncast,
)
from attnops.core.problem import _OVERRIDE, Problem, alike, altered, problem_of

# Read as attributes: a function that hands one out costs more than the read.
from attnops.core.record import Call, Spec, check, check_kinds, values, with_python_numbers
from attnops.core.select import _ACTIVE, choose, key_for as _key_for
from attnops.core.tracers import is_onnx, wanted

Run = Callable[[Any], Any]

KINDS = 512
"""Combinations of types and scalars that an op remembers."""
SHAPES = 8
"""Sets of shapes that it remembers of each."""

_nested = attrgetter("is_nested")


class Likeness:
    """Whether tensors are like those given, by public torch alone: type, dtype, device, sizes,
    strides, gradient, sign and inference."""

    def __init__(
        self, *tensors: Tensor, dynamic_dims_sizes: Any = None, dynamic_dims_strides: Any = None
    ) -> None:
        """The lists are by tensor and dim, None where any size or stride will do."""
        self.facts = [*map(self._facts, tensors)]
        self.sizes = dynamic_dims_sizes or [t.shape for t in tensors]
        self.strides = dynamic_dims_strides or [t.stride() for t in tensors]

    @staticmethod
    def _facts(t: Tensor) -> tuple[Any, ...]:
        kind = type(t), t.dim(), t.dtype, t.device, t.requires_grad
        return *kind, t.is_neg(), t.is_conj(), t.is_inference(), of_a_batch(t)

    def check(self, *tensors: Tensor) -> bool:
        """Are they all alike?"""
        return self.facts == [*map(self._facts, tensors)] and all(
            want in (None, got)
            for t, sizes, strides in zip(tensors, self.sizes, self.strides, strict=True)
            for want, got in zip((*sizes, *strides), (*t.shape, *t.stride()), strict=True)
        )


Growth = tuple[range, tuple[tuple[int, int], ...]]
"""The sizes that one size may have, and every (tensor, dim) that has it."""


def growth(
    tensors: tuple[Tensor, ...], grows: tuple[int, ...], others: tuple[int, ...] = ()
) -> Growth | None:
    """How the size of these dims may change before checks and selection could tell the calls apart;
    None: not at all.

    A decode step has one key more than the last one: without this its first layer would pay for
    checks and selection.

    Args:
        grows: the dim of each tensor, -1 if it has none.
        others: further numbers that the size is compared with.
    """
    places = tuple(
        (i, dim)
        for i, (t, dim) in enumerate(zip(tensors, grows, strict=True))
        if 0 <= dim < t.dim()
    )
    sizes = {tensors[i].shape[dim] for i, dim in places}
    if len(sizes) != 1:
        return None  # a call of wrong shapes is refused later
    least, largest = alike(sizes.pop())
    rest = {
        size
        for i, t in enumerate(tensors)
        for dim, size in enumerate(t.shape)
        if (i, dim) not in places
    }
    allowed = range(least, largest + 1)
    return (
        None
        if rest.intersection(allowed) or {0, *others}.intersection(allowed)
        else (allowed, places)
    )


@dataclass(frozen=True)
class Repeats:
    """Guards of a call in which a tensor comes more than once. Dynamo's refuse every such call.

    of_all: of every tensor, for calls in which none comes twice. of_each: of each tensor once.
    firsts: picks those of a call. again: (a place, the first place of the same tensor).
    """

    of_all: Any
    of_each: Any
    firsts: Callable[[Any], tuple[Tensor, ...]]
    again: tuple[tuple[int, int], ...]

    def check(self, *tensors: Tensor) -> bool:
        """Are they all alike, and one tensor where it was one?"""
        for place, first in self.again:
            if tensors[place] is not tensors[first]:
                return bool(self.of_all.check(*tensors))
        return bool(self.of_each.check(*self.firsts(tensors)))


def guards_of(tensors: tuple[Tensor, ...], grown: Growth | None = None) -> Any:
    """Guards that tell whether other tensors are like these. Dynamo's own take half a microsecond
    for all, Python as long for one.

    A size that grows is left out, and so are the strides of its tensors but the last: the others
    grow with it.
    """
    known: dict[int, int] = {}
    firsts = [known.setdefault(id(t), i) for i, t in enumerate(tensors)]
    again = tuple((i, first) for i, first in enumerate(firsts) if i != first)
    of_all, each = _guards([*enumerate(tensors)], grown), [*known.values()]
    return (
        Repeats(of_all, _guards([(i, tensors[i]) for i in each], grown), picker(each), again)
        if again
        else of_all
    )


def _guards(places: list[tuple[int, Tensor]], grown: Growth | None) -> Any:
    """Guards of these tensors, each with its place in the call."""
    given: dict[str, Any] = {"dynamic_dims_sizes": None, "dynamic_dims_strides": None}
    if grown is not None:
        grows = dict(grown[1])
        given["dynamic_dims_sizes"] = [
            [None if grows.get(i) == d else n for d, n in enumerate(t.shape)] for i, t in places
        ]
        given["dynamic_dims_strides"] = [_strides(t, i in grows) for i, t in places]
    tensors = [t for _, t in places]
    guards = (TensorGuards or Likeness)(*tensors, **given)
    repeats = len({*map(id, tensors)}) < len(tensors)
    return guards if repeats or guards.check(*tensors) else Likeness(*tensors, **given)


def _strides(t: Tensor, grows: bool) -> list[int | None]:
    return [None if grows and d < t.dim() - 1 else n for d, n in enumerate(t.stride())]


class Eager:
    """The eager side of an Op: its cache, and the way of a call past the dispatcher.

    patterns: by the types of the arguments, which are compared before the scalars: 1, 1.0 and True
    are equal. seen: by pattern, scalars, registered kernels, `pretend`'s target and what
    torch.use_deterministic_algorithms asks, up to SHAPES of (guards of the tensors, the function
    that runs, the size that may grow).
    """

    autograd: Callable[[Run, Any], Any] | None
    once: bool
    in_torchs_ops: Run

    def __init__(self, spec: Spec) -> None:
        self.spec, self.name = spec, spec.op
        # Dynamo of torch 2.11 reads no attribute of a record's class.
        self.positional = spec.positional
        self.names = spec.names
        self.keywords = spec.names[spec.positional :]
        self.tensors = tuple(a.name for a in spec.args if a.tensor)
        self.results = tuple(r.name for r in spec.results)
        self.patterns: dict[tuple[type, ...], Pattern | None] = {}
        self.seen: dict[tuple[Any, ...], list[tuple[Any, Run, Growth | None]]] = {}
        self.numbers = itertools.count()

    @property
    def packet(self) -> Any:
        """`torch.ops.attnops.<name>`."""
        return getattr(torch.ops.attnops, self.name)

    def problem(self, call: Call) -> Problem:
        """The Problem of a call that `attnops.core.record.check` has passed, or would pass."""
        return problem_of(call)

    def __call__(self, call: Any, off: bool = False) -> Any:
        """The op's results. An eager call goes straight to its kernel where nothing else must see
        it. off: is autocast off already?"""
        # Compiling is asked first, so that Dynamo, to whom it is a constant, traces the
        # dispatcher's call alone.
        if not (off or is_dynamo_compiling()) and autocasting():
            with uncast():
                return self(call, True)
        if not (is_dynamo_compiling() or overheard()):
            if is_grad_enabled() and (fields := grad_fields(call)):
                if self.autograd is None:
                    if not self.once:
                        fail(NoGradient, self.name, fields)
                elif self.plain(call):
                    return self.autograd(self.run, call)
            elif (run := self.find(call)) is not None:
                return run(call)
        return self.through_dispatcher(call, off)

    def through_dispatcher(self, call: Any, off: bool) -> Any:
        """As `self(call, off)`, by torch's dispatcher, which a mode or a profiler sees."""
        plain_only(self.names, call)  # others would be asked what the op shall do
        if is_onnx():
            return self.in_torchs_ops(call)
        if not is_compiling():
            given, call = call, with_python_numbers(call)
            if call is not given:
                return self(call, off)
            check_kinds(call)  # the dispatcher's own error names neither the field nor the value
        n = self.positional
        return self.packet.default(*call[:n], **dict(zip(self.keywords, call[n:], strict=True)))

    def find(self, call: Any) -> Run | None:
        """The function that runs calls like this one; None where the dispatcher must see it
        first."""
        types = tuple(map(type, call))
        kind = self.patterns[types] if types in self.patterns else self._pattern(types)
        if kind is None:
            return None
        scalars, tensors = kind.scalars(call), kind.tensors(call)
        key = (
            kind.number,
            scalars,
            _REGISTRY.generation,
            _OVERRIDE.target,
            must_repeat(),
            only_warns(),
        )
        if any(map(_nested, tensors)):
            return None  # the guards would abort the process: a nested tensor has no sizes
        for guards, run, grown in self.seen.get(key, ()):
            if guards.check(*tensors):
                if grown is None:
                    return run
                sizes = [tensors[i].size(dim) for i, dim in grown[1]]
                if sizes[0] in grown[0] and sizes.count(sizes[0]) == len(sizes):
                    return run
        return self._remember(key, kind, tensors, call)

    def run(self, call: Any) -> Any:
        """The op's results, from below the dispatcher."""
        run = self.find(call)
        if run is None:
            plain_only(self.names, call)
            run = checked(self, call)
        return run(call)

    def plain(self, call: Any) -> bool:
        """May a kernel be handed the tensors as they are?"""
        types = tuple(map(type, call))
        kind = self.patterns[types] if types in self.patterns else self._pattern(types)
        return kind is not None and all(map(_plain, kind.tensors(call)))

    def _pattern(self, types: tuple[type, ...]) -> Pattern | None:
        if len(self.patterns) >= KINDS:
            self.patterns.clear()
        found = self.patterns[types] = pattern(self.spec, types, next(self.numbers))
        return found

    def _remember(
        self, key: tuple[Any, ...], kind: Pattern, tensors: tuple[Tensor, ...], call: Call
    ) -> Run | None:
        if not all(map(_plain, tensors)):
            return None
        run = checked(self, call)
        if len(self.seen) >= KINDS:
            self.seen.clear()
        kept, grown = self.seen.setdefault(key, []), growth(tensors, kind.grows)
        kept[SHAPES - 1 :] = []
        kept.insert(0, (guards_of(tensors, grown), run, grown))
        return run


def grad_fields(call: Any) -> tuple[str, ...]:
    """The arguments that require a gradient."""
    given = zip(call.spec.names, call, strict=True)
    return tuple(n for n, v in given if isinstance(v, Tensor) and v.requires_grad)


def _plain(t: Tensor) -> bool:
    """Does the memory of `t` hold its numbers as they are? The dispatcher resolves lazy conjugates
    and signs, other layouts, and the batches of gradients of `is_grads_batched`, first."""
    strided = t.device.type != "meta" and t.layout is torch.strided
    return strided and not (t.is_neg() or t.is_conj() or t.is_nested or of_a_batch(t))


def checked(op: Eager, call: Call) -> Run:
    """A function that runs the kernel chosen for `call`, of plain tensors, which is checked first.
    Raises InvalidInput, NoKernel."""
    check(call)
    policy = getattr(call, "policy")  # noqa: B009 - every record has one, and no type checker knows
    problem = op.problem(call)
    kernel = choose(problem, policy)
    answers = answering(kernel)
    owner, ordinary = getattr(answers, "ordinary", (None, answers))
    if owner is answers and not deterministic(policy):
        answers = ordinary
    if kernel.again is not None and not is_foreign(kernel):
        answers = placed(kernel.again(call))
    if kernel.capture is not Capture.NEVER:
        return answers

    def run(call: Call) -> Any:
        # Only calls of such a kernel ask, so that all others cost nothing more.
        if capturing(values(call)[0]) and not fits_a_graph(kernel):
            return answering(choose(altered(problem, capturing=True), policy))(call)
        return answers(call)

    return run


# Who must see a call ------------------------------------------------------------------------------


def overheard() -> bool:
    """Must a call pass the dispatcher?

    Forward-mode or torch.func's gradient is possible, or a mode or a tool has to see the call.
    """
    return bool(
        count_dispatch_modes()
        or count_function_modes()
        or profiling()
        or forward_ad._current_level >= 0
        or transformed()
        or tracing()
    )


def direct(overload: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """`overload` without the dispatcher, which takes 9 us to carry two dozen named arguments into
    C++ and back; compiled code calls this.

    Args:
        overload: the kernel's overload. It takes a call that is `overheard`, and all calls in grad
            mode.
        run: the kernel's Python function. It takes all other calls, with the arguments that the
            dispatcher would hand on: those at their defaults left out.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if is_grad_enabled() or overheard():  # no compiler traces generated code
            return overload(*args, **kwargs)
        return run(*args, **kwargs)

    return call


# Arguments of the public functions ----------------------------------------------------------------


def key_for(op: str, kernel: str | None) -> str:
    """The policy of a call: that in force, or `kernel` forced on it."""
    return _ACTIVE.key if kernel is None else _key_for(op, kernel)


def tensors(**given: Any) -> None:
    """Raise InvalidInput unless these, which a public function looks into before the op checks its
    call, are tensors."""
    for field, value in given.items():
        if not isinstance(value, Tensor):
            got = "None" if value is None else type(value).__name__
            fail(InvalidInput, field, got, wanted("a tensor", value))


def mask(value: Any) -> None:
    """Raise InvalidInput unless a mask that is given is a plain tensor.

    Of a function, as flex_attention takes one, the error says what to do.
    """
    if isinstance(value, Tensor):
        refuse_foreign("mask", value)
        return
    want = "a tensor, bool or additive"
    if callable(value) or type(value).__name__ == "BlockMask":
        want += (
            "; write a mask_mod or score_mod out as one, or call "
            "torch.nn.attention.flex_attention, which takes functions"
        )
    fail(InvalidInput, "mask", type(value).__name__, want)


def window(value: Any) -> tuple[int, int]:
    """(left, right), each as `side` gives it."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        fail(InvalidInput, "window", value, "(left, right) in keys, -1: unbounded")
    left, right = value
    if type(left) is int and type(right) is int and max(left, right) <= FURTHEST:
        return left, right  # as nearly always, at the cost of no call
    return side(left), side(right)


def side(value: Any) -> Any:
    """One side of a window; -1 for one so wide that it hides no key, as 2**31 - 1 often says."""
    if type(value) is not int:
        value = python_number(value)
    return -1 if isinstance(value, int) and value > FURTHEST else value


def chunk(value: Any) -> Any:
    """The length of a chunk; 0 for one so long that it hides no key."""
    if type(value) is not int:
        value = python_number(value)
    return 0 if isinstance(value, int) and value > FURTHEST else value


def default_scale(query: Any, scale: float | None) -> float:
    """`scale`, or one over the root of the query's head dim."""
    if not isinstance(query, Tensor):
        tensors(query=query)
    if scale is not None:
        return scale
    dims = float(query.size(-1)) if query.dim() else 0.0
    return dims**-0.5 if dims else 1.0  # the op refuses a query without numbers


# How calls are told apart by the types of their arguments -----------------------------------------


@dataclass(frozen=True)
class Pattern:
    """How calls whose arguments have these types are told apart.

    number: tells patterns apart in a key. tensors, scalars: pick the tensors that are given, and
    all else, from a call.
    grows: for each of these tensors the dim whose size grows from call to call (`Spec.grows`), -1
    if there is none.
    """

    number: int
    tensors: Callable[[Any], tuple[Any, ...]]
    scalars: Callable[[Any], tuple[Any, ...]]
    grows: tuple[int, ...]


_PLAIN: dict[str, tuple[type, ...]] = {
    "Tensor": (Tensor, torch.nn.Parameter),
    "Tensor | None": (Tensor, torch.nn.Parameter, type(None)),
    "int": (int,),
    "float": (float,),
    "bool": (bool,),
    "str": (str,),
}


def pattern(spec: Spec, types: tuple[type, ...], number: int) -> Pattern | None:
    """The Pattern of calls with arguments of these types; None where one is of a type that is not
    compared (a subclass, an int for a float), so that such a call takes the dispatcher's way."""
    if any(t not in _PLAIN[a.kind] for a, t in zip(spec.args, types, strict=True)):
        return None
    tensors = [
        i
        for i, (a, t) in enumerate(zip(spec.args, types, strict=True))
        if a.tensor and t is not type(None)
    ]
    others = [i for i, a in enumerate(spec.args) if not a.tensor]
    layouts = [[size.text for size in spec.args[i].layout] for i in tensors]
    grows = tuple(layout.index(spec.grows) if spec.grows in layout else -1 for layout in layouts)
    return Pattern(number, picker(tensors), picker(others), grows)


def picker(places: list[int]) -> Callable[[Any], tuple[Any, ...]]:
    """A function that picks these places of a call."""
    if len(places) > 1:
        return itemgetter(*places)
    # Of one place, or none, itemgetter makes no tuple; a slice of a call is one.
    first = places[0] if places else 0
    return itemgetter(slice(first, first + len(places)))
