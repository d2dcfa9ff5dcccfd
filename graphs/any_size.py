"""`AnySize`: recordings of a layer that differ in sizes alone become one, for all sizes for which
calls of ours have the same kernels.

The sizes are the number of tokens, and further ones of the arguments, such as that of pages. What
differs must be a multiple of one of them. That the layer's own code agrees is seen when it first
runs at other sizes, see `AnySize.follows`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..core.errors import AttnopsError
from ..core.fx_effects import comparable
from ..core.kernel import Kernel
from ..core.precompile import begin
from ..core.private_torch import FakeTensorMode
from ..core.problem import Extents, Problem
from ..core.record import Call, values
from ..core.select import parse_policy, select
from ..ops import OPS
from .compile_pieces import Program
from .forms import Form
from .record_functions import Followed, Recording
from .split import Part, Split

_TIMES = "times"
"""In the meta of a node that is a size: its `Times`."""

Sizes = tuple[int, ...]
"""The number of tokens, and the other sizes that differ."""


class Differ(AttnopsError):
    """Recordings differ in more than sizes."""


@dataclass(frozen=True)
class Times:
    """In place of an int: so many times one of the sizes."""

    size: int
    factor: int

    def of(self, sizes: Sequence[int]) -> int:
        return self.factor * sizes[self.size]


@dataclass(frozen=True)
class Choice:
    """A call for which a kernel was chosen.

    call: of fake tensors. problem: without sizes. kernel: its name, "" for none.
    """

    call: Any
    problem: Problem
    kernel: str


@dataclass(eq=False)
class Sample:
    """A recording of a layer for one number of tokens.

    given: the form of its arguments. fakes: of its results. numbers: before it was rewritten.
    """

    tokens: int
    given: Any
    fakes: Sequence[Tensor]
    numbers: Recording
    program: Program
    choices: Sequence[Choice]

    @property
    def chosen(self) -> list[tuple[Problem, str]]:
        """The kernels of the calls, in order."""
        return [(choice.problem, choice.kernel) for choice in self.choices]


def choices_of(heard: Iterable[tuple[Call, Problem]], program: Program) -> list[Choice] | None:
    """The choices for the calls that were heard while the program was made, see
    `attnops.core.problem.hearing`. None where other kernels are chosen by now than it calls."""
    forced, found = _forced(program), list[Choice]()
    ops = {op for op, _ in forced}
    for call, problem in heard:
        kernel = _kernel(call, problem)
        chosen = problem.op, _name(kernel)
        fused = kernel is not None and kernel.inline is None
        if fused and problem.op in ops and chosen not in forced:
            return None
        found.append(Choice(call, _without_sizes(problem), chosen[1]))
    known = {(choice.problem.op, choice.kernel) for choice in found}
    return found if forced <= known else None


def _forced(program: Program) -> set[tuple[str, str]]:
    """The ops that a program calls with a kernel that was chosen, and the kernel."""
    found = set()
    for node in chain.from_iterable(part.module.graph.nodes for part in program.split.parts):
        op = str(node.target).partition("attnops.")[2].removesuffix(".default")
        kernel = parse_policy(str(node.kwargs.get("policy", ""))).forced(op) if op in OPS else None
        if kernel is not None:
            found.add((op, kernel))
    return found


def _without_sizes(problem: Problem) -> Problem:
    return replace(problem, sizes=Extents())


def _kernel(call: Any, problem: Problem) -> Kernel | None:
    return select(problem, call.policy).kernel


def _name(kernel: Kernel | None) -> str:
    return "" if kernel is None else kernel.name


class AnySize:
    """The program of a layer for any sizes, which are its last inputs.

    numbers: the recording before it was rewritten, with the same inputs.

    Raises Differ.
    """

    def __init__(self, *samples: Sample) -> None:
        first = samples[0]
        together = _Together(tuple(each.tokens for each in samples))
        self._given = together.merged(*[each.given for each in samples], further=True)
        self._layouts = together.merged(*[[*map(_layout, each.fakes)] for each in samples])
        self._fakes, self._choices = first.fakes, first.choices
        self._calls = together.merged(*[[*map(_layouts, each.choices)] for each in samples])
        _same(samples, lambda each: (Form().of(each.numbers.out), each.numbers.facts))
        module = together.module(nn.Module(), *[each.numbers.module for each in samples])
        self.numbers = replace(first.numbers, module=module)
        self.program = together.program(*[each.program for each in samples])
        self._equal = together.equal
        # By sizes: would calls get the same kernels? A step asks before its run and in it.
        self._alike: dict[Sizes, bool] = {}

    def sizes(self, tokens: int, given: Any) -> Sizes | None:
        """The sizes of arguments of this form, if it is for such and all calls would get the same
        kernels. These begin to build what they will wait for."""
        known = {0: tokens}
        if not _fits(self._given, given, known):
            return None
        sizes = tuple(known[i] for i in range(len(known)))
        if sizes not in self._alike:
            alike = all(len({times.of(sizes) for times in each}) == 1 for each in self._equal)
            self._alike[sizes] = alike and self._chooses(sizes)
        return sizes if self._alike[sizes] else None

    def _chooses(self, sizes: Sizes) -> bool:
        with FakeTensorMode():
            calls = [
                _call(choice.call, _of(layouts, sizes))
                for choice, layouts in zip(self._choices, self._calls, strict=True)
            ]
        begun = []
        for choice, call in zip(self._choices, calls, strict=True):
            problem = OPS[choice.problem.op].problem(call)
            kernel = _kernel(call, problem)
            chosen = _without_sizes(problem), _name(kernel)
            if chosen != (choice.problem, choice.kernel):
                return False
            if kernel is not None:
                begun.append((kernel, call))
        for kernel, call in begun:
            begin(kernel, call)
        return True

    def follows(self, sizes: Sizes, ran: Followed) -> bool:
        """Did the layer's own code do what the recording does for these sizes?"""
        same = ran.facts == self.numbers.facts
        same = same and Form().of(ran.out) == Form().of(self.numbers.out)
        return same and _done(ran.graph, ()) == _done(self.numbers.module.graph, sizes)

    def fakes(self, sizes: Sizes) -> list[Tensor]:
        """The results."""
        with FakeTensorMode():
            layouts = _of(self._layouts, sizes)
            return [_made(fake, layout) for fake, layout in zip(self._fakes, layouts, strict=True)]


# Sizes of values --------------------------------------------------------------------------------


def _of(x: Any, sizes: Sizes) -> Any:
    """The structure for these sizes."""
    if isinstance(x, Times):
        return x.of(sizes)
    if isinstance(x, tuple):
        return tuple([_of(value, sizes) for value in x])
    return x


def _fits(x: Any, value: Any, known: dict[int, int]) -> bool:
    """Is this the value of a structure? known: takes the sizes that it has."""
    if isinstance(x, Times):
        if x.size not in known and x.factor == 1:
            known[x.size] = value
        return x.size in known and x.factor * known[x.size] == value
    if not isinstance(x, tuple) or not isinstance(value, tuple):
        return bool(x == value)
    fits = (_fits(a, b, known) for a, b in zip(x, value, strict=False))
    return len(x) == len(value) and all(fits)


def _layout(t: Tensor) -> tuple[Any, ...]:
    return tuple(t.shape), tuple(t.stride()), int(t.storage_offset())


def _layouts(choice: Choice) -> tuple[Any, ...]:
    """What may depend on sizes in a call."""
    return tuple([_layout(x) if isinstance(x, Tensor) else x for x in values(choice.call)])


def _call(call: Any, layouts: Sequence[Any]) -> Any:
    """A call with tensors of these layouts, and other arguments."""
    return call._make(
        _made(x, layout) if isinstance(x, Tensor) else layout
        for x, layout in zip(values(call), layouts, strict=True)
    )


def _made(fake: Tensor, layout: Any) -> Tensor:
    shape, strides, offset = layout
    made = torch.empty_strided(shape, strides, dtype=fake.dtype, device=fake.device)
    if not offset:
        return made
    room = made.untyped_storage().nbytes() // made.itemsize + offset
    return made.new_empty(room).as_strided(shape, strides, offset)


# Graphs -----------------------------------------------------------------------------------------


def _done(graph: fx.Graph, sizes: Sizes) -> list[Any]:
    """What a graph does for these sizes, equal for graphs that do the same."""
    at: dict[fx.Node, int] = {}

    def of(node: fx.Node) -> Any:
        times = node.meta.get(_TIMES)
        return ("node", at[node]) if times is None else comparable(times.of(sizes), of)

    found = []
    for node in graph.nodes:
        if _TIMES in node.meta:
            continue
        at[node] = len(at)
        target = "" if node.op == "placeholder" else node.target
        found.append((node.op, target, comparable((node.args, node.kwargs), of)))
    return found


class _Together:
    """Samples of so many tokens.

    sizes: of all samples, what differs. equal: what an int may be that they do not tell apart.
    """

    def __init__(self, tokens: tuple[int, ...]) -> None:
        self.sizes = [tokens]
        self.equal: set[tuple[Times, ...]] = set()

    def times(self, ints: Sequence[int], further: bool = False) -> Times:
        """What an int is that is these in the samples. further: it may be a size of its own."""
        found = tuple(
            Times(i, ints[0] // size[0])
            for i, size in enumerate(self.sizes)
            if size[0] and all(n == ints[0] // size[0] * x for n, x in zip(ints, size, strict=True))
        )
        if found:
            self.equal.add(found)
            return found[0]
        if not further:
            raise Differ(f"{ints} where sizes are {self.sizes}")
        self.sizes.append(tuple(ints))
        return Times(len(self.sizes) - 1, 1)

    def merged(self, *values: Any, further: bool = False) -> Any:
        """Structures of tuples as one, with `Times` in place of ints that differ."""
        first = values[0]
        if isinstance(first, (tuple, list)):
            _same(values, lambda x: (type(x), len(x)))
            return tuple(
                [self.merged(*each, further=further) for each in zip(*values, strict=True)]
            )
        _same(values, type)
        if isinstance(first, Tensor):
            raise Differ("tensors among other values")
        if all(first == other for other in values[1:]):
            return first
        if type(first) is int:
            return self.times(values, further)
        raise Differ(f"{values}")

    def program(self, *programs: Program) -> Program:
        root, parts = nn.Module(), []
        _same(programs, lambda program: len(program.split.parts))
        for each in zip(*[program.split.parts for program in programs], strict=True):
            part = each[0]
            _same(each, lambda x: (x.name, x.breaks, x.calls))
            module = self.module(nn.Module(), *[x.module for x in each])
            setattr(root, part.name, module)
            parts.append(Part(part.name, module, part.breaks, part.calls))
        whole = self.module(root, *[program.split.module for program in programs])
        return Program(Split(whole, tuple(parts)), {}, programs[0].compiled)

    def module(self, root: nn.Module, *modules: fx.GraphModule) -> fx.GraphModule:
        """Graphs as one, with the sizes as its last inputs. root: holds the modules that it calls,
        which take them, too."""
        return fx.GraphModule(root, _Merged(self).graph(*[each.graph for each in modules]))


def _same(values: Iterable[Any], fact: Callable[[Any], Any]) -> None:
    """Raise Differ where a fact of the values differs."""
    first, *others = map(fact, values)
    if any(first != other for other in others):
        raise Differ(f"{first} and others")


class _Merged:
    """Graphs as one."""

    def __init__(self, together: _Together) -> None:
        self._together, self._made = together, fx.Graph()
        self._new: dict[tuple[fx.Node, ...], fx.Node] = {}
        self._sizes: dict[Times, fx.Node] = {}

    def graph(self, *graphs: fx.Graph) -> fx.Graph:
        _same(graphs, lambda graph: len(graph.nodes))
        for nodes in zip(*[graph.nodes for graph in graphs], strict=True):
            if nodes[0].op != "placeholder" and not self._sizes:
                for i in range(len(self._together.sizes)):
                    self._size(Times(i, 1), self._made.placeholder(f"size_{i}"))
            self._new[nodes] = self._node(nodes)
        return self._made

    def _size(self, times: Times, node: fx.Node) -> fx.Node:
        node.meta[_TIMES] = times
        self._sizes[times] = node
        return node

    def _node(self, nodes: tuple[fx.Node, ...]) -> fx.Node:
        _same(nodes, lambda node: (node.op, node.op == "placeholder" or node.target))
        first = nodes[0]
        if first.op == "placeholder" and self._sizes:
            raise Differ("an input after the first operation")
        args = self._value(*[node.args for node in nodes])
        kwargs = self._value(*[node.kwargs for node in nodes])
        if first.op == "call_module":
            sizes = (Times(i, 1) for i in range(len(self._together.sizes)))
            args = (*args, *map(self._sizes.__getitem__, sizes))
        node = self._made.create_node(first.op, first.target, args, kwargs, first.name)
        node.meta = dict(first.meta)
        return node

    def _value(self, *values: Any) -> Any:
        first = values[0]
        if isinstance(first, fx.Node):
            if values not in self._new:
                raise Differ(f"{values}")
            return self._new[values]
        _same(values, type)
        if isinstance(first, (tuple, list)):
            _same(values, len)
            found = [self._value(*each) for each in zip(*values, strict=True)]
            return tuple(found) if isinstance(first, tuple) else found
        if isinstance(first, dict):
            _same(values, list)
            return {name: self._value(*[each[name] for each in values]) for name in first}
        if isinstance(first, slice):
            return slice(*self._value(*[(x.start, x.stop, x.step) for x in values]))
        if type(first) is int and any(first != other for other in values):
            return self._times(self._together.times(values))
        _same(values, lambda x: comparable(x, str))
        return first

    def _times(self, times: Times) -> fx.Node:
        if times in self._sizes:
            return self._sizes[times]
        one = self._sizes[Times(times.size, 1)]
        return self._size(times, self._made.call_function(operator.mul, (one, times.factor)))
