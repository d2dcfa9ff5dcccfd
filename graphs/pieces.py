"""Compiles the parts of a split model, every different one once, and runs them: plainly, or into graphs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ..errors import AttnopsError, NotCapturable
from .boundary import Break
from .cached_guards import whole_guards
from .device import Device
from .split import Name, Part, Split, starts_work, value_of

Piece = Callable[..., Any]
Inner = Callable[[fx.GraphModule, list[Any]], Piece]
"""Compiles a module of fake inputs into something that takes the real ones and returns a tuple or list."""


def inductor(module: fx.GraphModule, examples: list[Any]) -> Piece:
    """Through Inductor, with the symbolic sizes of the trace that it is called in."""
    from torch._inductor import standalone_compile

    # To tune at compile time, as artifacts to be saved need it, is to compile and load every kernel twice, and to make tensors as large
    # as the weights and pages that it is tuned on. A piece is tuned as torch.compile does it: at the run that goes before a capture.
    options: dict[str, Any] = {"config_patches": {"triton.autotune_at_compile_time": None}}
    with whole_guards():
        return standalone_compile(module, examples, dynamic_shapes="from_tracing_context", options=options)


def tuned(module: fx.GraphModule, examples: list[Any]) -> Piece:
    """As `inductor`, with its coordinate descent: every kernel it makes is tried in many forms at its first run.

    A product with one row is then such a kernel, fused with what is around it, and reads weights faster than cuBLAS' does.
    """
    from torch._inductor import config

    # torch adds `patch` when the module is loaded.
    found: Any = config
    with found.patch(coordinate_descent_tuning=True):
        return inductor(module, examples)


def eager(module: fx.GraphModule, examples: list[Any]) -> Piece:
    """Not at all."""
    return module


def start_workers() -> None:
    """Have the processes that compile kernels of Triton start while the model is traced.

    Inductor does so when it is the backend of a torch.compile. Where it is called for pieces they start with the first, whose kernels
    are then compiled one after the other until they are there.
    """
    if not torch.cuda.is_available():
        return
    from torch._inductor import async_compile

    # No torch promises it, and without it they start later.
    if (start := getattr(async_compile, "maybe_warm_pool", None)) is not None:
        start()


INNER: dict[str, Inner] = {"inductor": inductor, "tuned": tuned, "eager": eager}


@dataclass
class Recorded:
    """A step as graphs and calls between them, which `run` replays in order. graphs: those that hold memory.

    bytes_of: what each graph took when it was captured.
    """

    steps: list[Callable[[], None]] = field(default_factory=list)
    graphs: list[Any] = field(default_factory=list)
    breaks: list[Break] = field(default_factory=list)
    bytes_of: list[int] = field(default_factory=list)

    def add(self, graph: Any, taken: int) -> None:
        """A graph is next."""
        self.steps.append(graph.replay)
        self.graphs.append(graph)
        self.bytes_of.append(taken)


@dataclass(frozen=True)
class Program:
    """A split model with its pieces compiled. pieces: by part, of those that are compiled; compiled: how many differ."""

    split: Split
    pieces: dict[str, Piece]
    compiled: int

    def run(self, flat: tuple[Any, ...]) -> Any:
        """Without graphs. Returns the structure that the traced model returns."""
        env = self._bound(flat)
        dying = {n for part in self.split.parts for n in part.outputs} - self._results
        for i, part in enumerate(self.split.parts):
            self._step(i, part, env, dying)
        return _filled(self.split.results, env)

    def record(self, flat: tuple[Any, ...], device: Device, into: Recorded) -> Any:
        """Capture what may be captured, neighbours into one graph, run the rest, and write down both.

        Returns the tensors that every replay fills. Raises NotCapturable: a part does what cannot be captured.
        """
        env = self._bound(flat)
        last, kept = self._last, self._results
        outside = {name for part in self.split.parts if not part.captured for name in part.inputs}
        made: set[str] = set()
        for captured, run in itertools.groupby(enumerate(self.split.parts), lambda numbered: numbered[1].captured):
            parts = list(run)
            if captured:
                made.update(self._capture(parts, env, device, into))
            else:
                for _, part in parts:
                    _between(part, env, into)
            # Later graphs may lie where this one's values lay; what is read between graphs is read before that happens again.
            for name in {n for n in made if last.get(n, -1) <= parts[-1][0] and n in env} - kept:
                _let_go(env, name, name in outside, device)
        results = _filled(self.split.results, env)
        for name in kept & made:
            _let_go(env, name, name in outside, device)
        return results

    def _capture(self, parts: list[tuple[int, Part]], env: dict[str, Any], device: Device, into: Recorded) -> list[str]:
        """Parts into one graph. Adds to `env` what is read after them, and returns its names."""
        inside = [name for _, part in parts for name in part.outputs]
        after = [n for n in inside if n in self._results or self._last.get(n, -1) > parts[-1][0]]
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
            raise NotCapturable(current.name, str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__) from e
        into.add(graph, device.used() - before)
        env.update(zip(after, out, strict=True))
        return after

    def _step(self, at: int, part: Part, env: dict[str, Any], dying: set[str]) -> None:
        """Run a part on the values of `env`, which those of `dying` leave after their last use: their memory serves the parts to come."""
        call = self.pieces.get(part.name, part.module)
        env.update(zip(part.outputs, call(*[env[n] for n in part.inputs]), strict=True))
        for name in dying.intersection((*part.inputs, *part.outputs)):
            if self._last.get(name, -1) <= at:
                del env[name]

    @functools.cached_property
    def _last(self) -> dict[str, int]:
        """The part that reads a value last, by its name."""
        return {name: i for i, part in enumerate(self.split.parts) for name in part.inputs}

    @functools.cached_property
    def _results(self) -> set[str]:
        """The names of what the model returns."""
        return {x.name for x in pytree.tree_leaves(self.split.results, is_leaf=_is_name) if _is_name(x)}

    def _bound(self, flat: tuple[Any, ...]) -> dict[str, Any]:
        return {**self.split.constants, **dict(zip(self.split.inputs, flat, strict=True))}


def _let_go(env: dict[str, Any], name: str, read_again: bool, device: Device) -> None:
    if not read_again:
        del env[name]
    elif isinstance(env[name], Tensor):
        env[name] = device.weak(env[name])


def _is_name(x: Any) -> bool:
    return isinstance(x, Name)


def _filled(results: Any, env: dict[str, Any]) -> Any:
    return pytree.tree_map_only(Name, lambda n: env[n.name], results, is_leaf=_is_name)


def _between(part: Part, env: dict[str, Any], into: Recorded) -> None:
    """Run what lies between graphs, and write down how it is run again: on what its inputs hold then, into tensors that stay."""
    given = [env[n] for n in part.inputs]
    out = part.module(*given)
    fixed = {x.untyped_storage().data_ptr() for x in given if isinstance(x, Tensor)}
    dynamic = {n for n, fake in zip(part.outputs, _fakes(part), strict=True) if _changes(fake)}
    # A view of an input has its address already.
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


def _fakes(part: Part) -> list[Any]:
    [end] = [n for n in part.module.graph.nodes if n.op == "output"]
    return [value_of(x) for x in end.args[0]]


def _changes(fake: Any) -> bool:
    """Is its size or value another at every replay?"""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return isinstance(fake, (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)) and bool(free_unbacked_symbols(fake))


def compile_parts(found: Split, inner: Inner) -> Program:
    """The program of a split model, whose pieces that do the same are compiled once.

    Not so pieces of two traces: a size of the same name is known to be of another range there, and what is compiled may rely on it.
    """
    _fixed_results(found)
    pieces = {}
    cache: dict[Any, Piece] = {}
    for part in found.parts:
        if part.compiled and starts_work(part.module):
            key = likeness(part)
            if key not in cache:
                cache[key] = inner(part.module, part.examples)
            pieces[part.name] = cache[key]
    return Program(found, pieces, len(cache))


def _fixed_results(found: Split) -> None:
    """Raises NotCapturable: what the model returns is of another size or value at every step, and the caller would be given the first."""
    wanted = {x.name for x in pytree.tree_leaves(found.results, is_leaf=_is_name) if _is_name(x)}
    for part in found.parts:
        [end] = [n for n in part.module.graph.nodes if n.op == "output"]
        for name, node in zip(part.outputs, end.args[0], strict=True):
            # A float that is returned leaves the trace as a tensor, and is read from it by what Dynamo does after the graph.
            read = node.all_input_nodes if isinstance(node, fx.Node) and node.target is torch.scalar_tensor else []
            if name in wanted and any(_changes(value_of(n)) for n in (node, *read)):
                raise NotCapturable(str(node), "it is returned, and its size or value depends on data; return tensors of fixed sizes")


def likeness(part: Part) -> Any:
    """What two parts have in common that may be compiled once: operations, constants, and shape, strides, dtype and aliasing of inputs."""
    at = {node: i for i, node in enumerate(part.module.graph.nodes)}
    storages: dict[Any, int] = {}

    def of(x: Any) -> Any:
        if isinstance(x, fx.Node):
            return ("%", at[x])
        if isinstance(x, Tensor):
            storage = storages.setdefault(x.untyped_storage()._cdata, len(storages))
            place = (tuple(map(str, x.shape)), tuple(map(str, x.stride())), str(x.storage_offset()))
            return (*place, str(x.dtype), str(x.device), x.requires_grad, storage)
        if isinstance(x, (tuple, list)):
            return (type(x).__name__, *map(of, x))
        if isinstance(x, dict):
            return ("dict", *((k, of(v)) for k, v in x.items()))
        if isinstance(x, slice):
            return ("slice", of(x.start), of(x.stop), of(x.step))
        # The type keeps 1, 1.0 and True apart.
        return (type(x).__name__, str(x))

    found: list[Any] = []
    for node in part.module.graph.nodes:
        if node.op == "placeholder":
            found.append(of(value_of(node)))
        elif node.op == "get_attr":
            # A tensor or module inside of the graph: only the very same one is alike.
            found.append(("attribute", id(_attribute(part.module, str(node.target)))))
        else:
            target = node.target if isinstance(node.target, str) else f"{getattr(node.target, '__module__', '')}.{node.target}"
            found.append((node.op, target, of(node.args), of(dict(node.kwargs))))
    return tuple(found)


def _attribute(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module
