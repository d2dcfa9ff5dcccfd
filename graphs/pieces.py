"""Compiles the parts of a split model, equal ones once, and runs or captures them."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ..errors import AttnopsError, NotCapturable, fail
from ..traced import comparable
from .cached_guards import whole_guards
from .device import Device
from .graph_breaks import Break, depends_on_data, not_capturable
from .split import Name, Part, Split, starts_work, value_of

Piece = Callable[..., Any]
Inner = Callable[[fx.GraphModule, list[Any]], Piece]
"""Compiles a module, given fake inputs, into a function of real ones that returns a tuple or list."""


def inductor(module: fx.GraphModule, examples: list[Any]) -> Piece:
    """Compile with Inductor, with the symbolic sizes of the trace at hand."""
    from torch._inductor import standalone_compile

    # Autotuning at compile time, which artifacts for saving need, compiles and loads every kernel twice and allocates tensors as large
    # as the weights and pages. A piece is autotuned like code of torch.compile: in the run before the capture.
    options: dict[str, Any] = {"config_patches": {"triton.autotune_at_compile_time": None}}
    with whole_guards():
        return standalone_compile(module, examples, dynamic_shapes="from_tracing_context", options=options)


def tuned(module: fx.GraphModule, examples: list[Any]) -> Piece:
    """Compile with Inductor and its coordinate descent tuning, which tries many configurations of every kernel at the first run.

    A matrix product of one row then becomes a Triton kernel, fused with its neighbours, that reads weights faster than cuBLAS.
    """
    from torch._inductor import config

    # torch adds `patch` when the module is loaded.
    patchable: Any = config
    with patchable.patch(coordinate_descent_tuning=True):
        return inductor(module, examples)


def eager(module: fx.GraphModule, examples: list[Any]) -> Piece:
    return module


def start_workers() -> None:
    """Start Inductor's compile workers while the model is traced.

    As a backend of torch.compile Inductor starts them itself. Called for pieces, it starts them with the first, whose kernels then
    compile one after the other until the workers are up.
    """
    if not torch.cuda.is_available():
        return
    from torch._inductor import async_compile

    # Not public: without it the workers start later.
    if (start := getattr(async_compile, "maybe_warm_pool", None)) is not None:
        start()


INNER: dict[str, Inner] = {"inductor": inductor, "tuned": tuned, "eager": eager}


@dataclass
class Recorded:
    """A captured step.

    steps: graph replays and the calls between them, in order.
    graphs: the graphs, which hold memory.
    breaks: the calls between graphs.
    bytes_of: the memory that each graph took at its capture.
    """

    steps: list[Callable[[], None]] = field(default_factory=list)
    graphs: list[Any] = field(default_factory=list)
    breaks: list[Break] = field(default_factory=list)
    bytes_of: list[int] = field(default_factory=list)

    def add(self, graph: Any, taken: int) -> None:
        self.steps.append(graph.replay)
        self.graphs.append(graph)
        self.bytes_of.append(taken)


@dataclass(frozen=True)
class Program:
    """A split model with compiled pieces.

    pieces: the compiled function of a part, by its name.
    compiled: the number of different pieces.
    """

    split: Split
    pieces: dict[str, Piece]
    compiled: int

    def run(self, flat: tuple[Any, ...]) -> Any:
        """Run without graphs. Returns the model's results."""
        env = self._bound(flat)
        dying = {n for part in self.split.parts for n in part.outputs} - self.split.kept
        for i, part in enumerate(self.split.parts):
            self._step(i, part, env, dying)
        return self._filled(env)

    def record(self, flat: tuple[Any, ...], device: Device, into: Recorded) -> Any:
        """Capture neighbouring capturable parts into one graph each, run the others, and append both to `into`.

        Returns the tensors that every replay writes. Raises NotCapturable for a part that fails in its capture.
        """
        env = self._bound(flat)
        last, kept = self._last, self.split.kept
        outside = {name for part in self.split.parts if not part.captured for name in part.inputs}
        made: set[str] = set()
        for captured, run in itertools.groupby(enumerate(self.split.parts), lambda numbered: numbered[1].captured):
            parts = list(run)
            if captured:
                made.update(self._capture(parts, env, device, into))
            else:
                for _, part in parts:
                    _between(part, env, into)
            # Later graphs may reuse the memory of values that were read for the last time. Calls between graphs read theirs before.
            for name in {n for n in made if last.get(n, -1) <= parts[-1][0] and n in env} - kept:
                _release(env, name, name in outside, device)
        results = self._filled(env)
        for name in kept & made:
            _release(env, name, name in outside, device)
        return results

    def _capture(self, parts: list[tuple[int, Part]], env: dict[str, Any], device: Device, into: Recorded) -> list[str]:
        """Capture parts into one graph. Adds the values that later parts read to `env`, and returns their names."""
        inside = [name for _, part in parts for name in part.outputs]
        after = [n for n in inside if n in self.split.kept or self._last.get(n, -1) > parts[-1][0]]
        given = {n: env[n] for _, part in parts for n in part.inputs if n in env}
        dying, current = set(inside).difference(after), parts[0][1]

        def run() -> list[Any]:
            nonlocal current
            found = dict(given)
            for i, current in parts:
                self._step(i, current, found, dying)
            return [found[n] for n in after]

        before = device.used()
        try:
            graph, out = device.capture(run)
        except (AttnopsError, torch.OutOfMemoryError):
            raise
        except Exception as e:
            raise not_capturable(current.name, e) from e
        into.add(graph, device.used() - before)
        env.update(zip(after, out, strict=True))
        return after

    def _step(self, at: int, part: Part, env: dict[str, Any], dying: set[str]) -> None:
        """Run a part on the values of `env`. Values in `dying` leave `env` after their last use, so that later parts reuse their memory."""
        call = self.pieces.get(part.name, part.module)
        env.update(zip(part.outputs, call(*[env[n] for n in part.inputs]), strict=True))
        for name in dying.intersection((*part.inputs, *part.outputs)):
            if self._last.get(name, -1) <= at:
                del env[name]

    @functools.cached_property
    def _last(self) -> dict[str, int]:
        """The index of the last part that reads a value, by its name."""
        return {name: i for i, part in enumerate(self.split.parts) for name in part.inputs}

    def _filled(self, env: dict[str, Any]) -> Any:
        return pytree.tree_map_only(Name, lambda n: env[n.name], self.split.results)

    def _bound(self, flat: tuple[Any, ...]) -> dict[str, Any]:
        return {**self.split.constants, **dict(zip(self.split.inputs, flat, strict=True))}


def _release(env: dict[str, Any], name: str, read_again: bool, device: Device) -> None:
    if not read_again:
        del env[name]
    elif isinstance(env[name], Tensor):
        env[name] = device.weak(env[name])


def _between(part: Part, env: dict[str, Any], into: Recorded) -> None:
    """Run a part between graphs and append its replay, which reads the inputs of then and writes into the results of now."""
    given = [env[n] for n in part.inputs]
    out = part.module(*given)
    fixed = {x.untyped_storage().data_ptr() for x in given if isinstance(x, Tensor)}
    dynamic = {name for name, node in part.results if depends_on_data(value_of(node))}
    # A view of an input keeps the address of the input.
    copied = [
        n for n, x in zip(part.outputs, out, strict=True)
        if n not in dynamic and isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in fixed
    ]  # fmt: skip
    env.update(zip(part.outputs, out, strict=True))

    def again() -> None:
        found = dict(zip(part.outputs, part.module(*[env[n] for n in part.inputs]), strict=True))
        for name in copied:
            env[name].copy_(found[name])
        for name in dynamic:
            env[name] = found[name]

    into.steps.append(again)
    into.breaks.extend(part.breaks)


def compile_parts(found: Split, inner: Inner) -> Program:
    """Compile the pieces of a split model, equal ones once.

    Pieces of two traces are never shared: a symbol of one name has another range in each, and compiled code may rely on it. Raises
    NotCapturable for a result whose size or value depends on data: a replay would return that of the capture.
    """
    for node in (node for part in found.parts for name, node in part.results if name in found.kept):
        # A returned float leaves the trace as a tensor, from which Dynamo reads it after the graph.
        read = node.all_input_nodes if isinstance(node, fx.Node) and node.target is torch.scalar_tensor else []
        if any(depends_on_data(value_of(n)) for n in (node, *read)):
            fail(NotCapturable, str(node), "the model returns it, and its size or value depends on data; return tensors of fixed sizes")
    pieces = {}
    cache: dict[Any, Piece] = {}
    for part in found.parts:
        if part.compiled and starts_work(part.module):
            code = structure(part)
            if code not in cache:
                cache[code] = inner(part.module, part.examples)
            pieces[part.name] = cache[code]
    return Program(found, pieces, len(cache))


def structure(part: Part) -> Any:
    """A hashable value of a part, equal for parts that may share compiled code: operations, constants, layouts and aliasing of inputs."""
    at = {node: i for i, node in enumerate(part.module.graph.nodes)}
    storages: dict[Any, int] = {}

    def layout(x: Tensor) -> Any:
        storage = storages.setdefault(x.untyped_storage()._cdata, len(storages))
        sizes = (tuple(map(str, x.shape)), tuple(map(str, x.stride())), str(x.storage_offset()))
        return (*sizes, str(x.dtype), str(x.device), x.requires_grad, storage)

    def of(x: Any) -> Any:
        return comparable(x, lambda n: ("%", at[n]), layout)

    found: list[Any] = []
    for node in part.module.graph.nodes:
        if node.op == "placeholder":
            found.append(of(value_of(node)))
        elif node.op == "get_attr":
            # A tensor or module of the graph is equal to itself only.
            found.append(("attribute", id(operator.attrgetter(str(node.target))(part.module))))
        else:
            target = node.target if isinstance(node.target, str) else f"{getattr(node.target, '__module__', '')}.{node.target}"
            found.append((node.op, target, of(node.args), of(dict(node.kwargs))))
    return tuple(found)
