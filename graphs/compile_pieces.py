"""Compiles the parts of a split model, equal ones once, and runs or captures them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..core.fx_effects import comparable
from ..core.private_torch import inductor_config, start_compile_workers
from ..core.record import need
from .cached_guards import whole_guards
from .cuda_graphs import Recorded
from .graph_breaks import depends_on_data
from .split import Part, Split, fusible, value_of

Piece = Callable[..., Any]
Inner = Callable[[fx.GraphModule, list[Any]], Piece]
"""Compiles a module, given fake inputs, into a function of real ones that returns a tuple or
list."""


def inductor(module: fx.GraphModule, examples: list[Any]) -> Piece:
    """Compile with Inductor, with the symbolic sizes of the trace at hand."""
    from ..core.private_torch import standalone_compile

    # Autotuning at compile time, which artifacts for saving need, compiles and loads every kernel
    # twice and allocates tensors as large as the weights and pages. A piece is autotuned like code
    # of torch.compile: in the run before the capture.
    options: dict[str, Any] = {"config_patches": {"triton.autotune_at_compile_time": None}}
    with whole_guards():
        piece: Piece = standalone_compile(
            module, examples, dynamic_shapes="from_tracing_context", options=options
        )
    return piece


def tuned(module: fx.GraphModule, examples: list[Any]) -> Piece:
    """Compile with Inductor and its coordinate descent tuning: many configurations of every kernel
    are tried at the first run.

    A matrix product of one row then becomes a Triton kernel, fused with its neighbours, that reads
    weights faster than cuBLAS.
    """
    with inductor_config().patch(coordinate_descent_tuning=True):
        return inductor(module, examples)


def eager(module: fx.GraphModule, examples: list[Any]) -> Piece:
    return module


INNER: dict[str, Inner] = {"inductor": inductor, "tuned": tuned, "eager": eager}


def compiler_of(inner: str | Inner) -> Inner:
    """The compiler of this name. Raises InvalidInput."""
    if not isinstance(inner, str):
        return inner
    want = f"a function, or one of {', '.join(INNER)}"
    need(inner in INNER, "inner", repr(inner), want)
    return INNER[inner]


def start_workers(inner: Inner) -> None:
    """Start Inductor's compile workers while the model is traced.

    Otherwise the first piece starts them, and the next ones wait.
    """
    if inner in (inductor, tuned) and torch.cuda.is_available():
        start_compile_workers()


@dataclass(frozen=True)
class Program:
    """A split model with its compiled pieces, by the name of the part. compiled: how many of them
    differ."""

    split: Split
    pieces: dict[str, Piece]
    compiled: int

    def run(self, flat: tuple[Any, ...], into: Recorded | None = None) -> Any:
        """Run without graphs, or capture neighbouring parts into one graph each and the others
        between them. Returns the results."""
        if into is None:
            return self._plain(*flat)
        if not all(part.captured for part in self.split.parts):
            return _Run(self, into).run(*flat)
        into.current = ", ".join(part.name for part in self.split.parts)
        into.begin()
        return self._plain(*flat)

    @cached_property
    def _plain(self) -> fx.GraphModule:
        """The split model with its pieces in place: an interpreter would take longer than a GPU for
        a layer of few tokens."""
        made = fx.GraphModule(self.split.module, self.split.module.graph)
        for part in self.split.parts:
            setattr(made, part.name, _Call(self.pieces.get(part.name, part.module)))
        return made


class _Call(nn.Module):
    """A piece or part as a module of the split model."""

    def __init__(self, call: Piece) -> None:
        super().__init__()
        self._call = (call,)  # not a submodule

    def forward(self, *args: Any) -> Any:
        out = self._call[0](*args)
        return out[0] if len(out) == 1 else out


class _Run(fx.Interpreter):
    """The capture of a program with parts between graphs. A value leaves after its last use, so
    that later parts reuse its memory."""

    def __init__(self, program: Program, into: Recorded) -> None:
        super().__init__(program.split.module)
        self.extra_traceback = False
        self._pieces, self._into = program.pieces, into
        self._parts = {part.name: part for part in program.split.parts}
        # Results whose size or value depends on data: calls between graphs read those of the same
        # replay.
        self._latest: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_module":
            return super().run_node(n)
        part, into = self._parts[str(n.target)], self._into
        if not part.captured:
            out = self._between(n, part, into)
        else:
            into.current = part.name
            into.begin()
            out = self._pieces.get(part.name, part.module)(
                *[self.env[a] for a in n.all_input_nodes]
            )
        return out[0] if len(out) == 1 else out

    def _between(self, call: fx.Node, part: Part, into: Recorded) -> Any:
        """Run a part between graphs and add its replay, which reads the inputs of then and writes
        into the results of now."""
        into.end()
        nodes, latest = call.all_input_nodes, self._latest
        given = {a: self.env[a] for a in nodes}
        out = part.module(*given.values())
        # Later graphs may reuse the memory of captured tensors, which the call has read by then.
        kept = {
            a: into.device.weak(x) if self._is_captured(a, x) else x
            for a, x in given.items()
            if a not in latest
        }
        fixed = {x.untyped_storage().data_ptr() for x in kept.values() if isinstance(x, Tensor)}
        made: Any = part.module.graph.output_node().args[0]
        readers: dict[Any, fx.Node] = (
            {0: call} if len(made) == 1 else {u.args[1]: u for u in call.users}
        )
        dynamic = {i: readers[i] for i, node in enumerate(made) if depends_on_data(value_of(node))}
        # A view of an input keeps the address of the input.
        static = {i: x for i, x in enumerate(out) if i not in dynamic and isinstance(x, Tensor)}
        copied = {i: x for i, x in static.items() if x.untyped_storage().data_ptr() not in fixed}
        latest.update((node, out[i]) for i, node in dynamic.items())

        def again() -> None:
            found = part.module(*[kept[a] if a in kept else latest[a] for a in nodes])
            for i, x in copied.items():
                x.copy_(found[i])
            latest.update((node, found[i]) for i, node in dynamic.items())

        into.steps.append(again)
        into.breaks.extend(part.breaks)
        return out

    def _is_captured(self, node: fx.Node, value: Any) -> bool:
        call: Any = node.args[0] if node.op == "call_function" else node
        return (
            isinstance(value, Tensor)
            and call.op == "call_module"
            and self._parts[call.target].captured
        )


def compile_parts(found: Split, inner: Inner) -> Program:
    """Compile the pieces of a split model, equal ones once. A piece of views and calls of kernels
    runs as it is, and is captured alike.

    Pieces of two traces are never shared: a symbol of one name has another range in each, and
    compiled code may rely on it.
    """
    pieces = {}
    cache: dict[Any, Piece] = {}
    for part in found.parts:
        if part.compiled and fusible(part.module):
            code = structure(part)
            if code not in cache:
                cache[code] = inner(
                    part.module,
                    [value_of(n) for n in part.module.graph.find_nodes(op="placeholder")],
                )
            pieces[part.name] = cache[code]
    return Program(found, pieces, len(cache))


def structure(part: Part) -> Any:
    """A hashable value of a part, equal for parts that may share compiled code: operations,
    constants, layouts and aliasing of inputs."""
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
            target = (
                node.target
                if isinstance(node.target, str)
                else f"{getattr(node.target, '__module__', '')}.{node.target}"
            )
            found.append((node.op, target, of(node.args), of(dict(node.kwargs))))
    return tuple(found)
