"""Written arguments that are views: what torch's compiler makes wrong is mended, or refused.

Functionalisation names a written view by its base and either an as_strided, whose offset may be a
symbol that aten.sym_storage_offset reads, or a slice. Both offsets count from the start of the
memory, and a base that is a graph input may begin later.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, fx

from ..core.errors import InvalidInput
from ..core.private_torch import OpOverload
from ..core.record import Arg, Call, changed, values
from ..core.tensors import surely
from .inductor import auto_functionalize

aten = torch.ops.aten


def install() -> None:
    """Mend how views are named and placed. Idempotent; leaves lowerings of users as they are."""
    _lower_storage_offset()
    _slice_from_the_start()


def _lower_storage_offset() -> None:
    # Without a lowering Inductor falls back to a call whose answer it takes to be 0.
    from .inductor import lowerings, register_lowering

    offset = aten.sym_storage_offset.default
    if offset not in lowerings:
        register_lowering(offset, type_promotion_kind=None)(_storage_offset)


def _storage_offset(_: Any) -> Any:
    from .inductor import V

    return _expression(V.graph.current_node.meta["val"])


def _slice_from_the_start() -> None:
    # A slice of a base that begins later would be taken that much too far: as_strided takes it.
    # torch has no setting against slices alone: enable_auto_functionalized_v2 is for all views.
    original = getattr(auto_functionalize, "try_use_slice", None)
    if original is None or hasattr(original, "original"):
        return

    def try_use_slice(base: Tensor, tensor: Tensor) -> Any:
        return original(base, tensor) if surely(base.storage_offset() == 0) else None

    vars(try_use_slice)["original"] = original
    auto_functionalize.try_use_slice = try_use_slice


def placed(nodes: Call, lowered: Call) -> Call:
    """The call with each written view at its place in memory.

    Args:
        nodes: the call with the FX nodes of its tensors.
        lowered: the same call with their IR.

    Raises:
        InvalidInput: the compiler would misplace a view.
    """
    irs = {a.name: _placed(a, node, getattr(lowered, a.name)) for a, node in _written(nodes)}
    return changed(lowered, **irs)


def of_another_dtype(nodes: Call) -> bool:
    """Is a written argument a view of memory of another dtype? Inductor's index_put misreads it."""
    views = (view for _, node in _written(nodes) for view in _behind(node))
    return any(view.target is aten.view.dtype for view in views)


def _written(nodes: Call) -> list[tuple[Arg, fx.Node]]:
    pairs = zip(nodes.spec.args, values(nodes), strict=True)
    return [(a, node) for a, node in pairs if a.written and isinstance(node, fx.Node)]


def _placed(a: Arg, node: fx.Node, ir: Any) -> Any:
    base = _base(node)
    *_, memory = _behind(base)
    if memory.op == "placeholder":
        return _moved(node, memory, ir)
    # Inductor may copy what the base shows, and then looks for it where it was in the whole memory.
    if not surely(base.meta["val"].storage_offset() == 0):
        kind = "a view, detached or of another dtype,"
        got = f"{kind} of a part of what the compiled function computes"
        raise InvalidInput(a.name, got, "a view of all of it, or one made outside of that function")
    return ir


def _base(node: fx.Node) -> fx.Node:
    """The node that functionalisation takes for the base of a written argument.

    To autograd it is no view.
    """
    if node.target in (aten.as_strided.default, aten.slice.Tensor, aten.alias.default):
        node = _source(node)
    # Of a base that may not be written in place it copies the whole memory.
    if node.target is aten.clone.default and _source(node).target is aten.as_strided.default:
        node = _source(_source(node))
    return node


def _behind(node: fx.Node) -> Iterator[fx.Node]:
    """The node, what it is a view of, and so on."""
    yield node
    while _is_view(node):
        node = _source(node)
        yield node


def _source(node: fx.Node) -> fx.Node:
    return cast(fx.Node, node.args[0])


def _is_view(node: fx.Node) -> bool:
    target: Any = node.target
    if not isinstance(target, OpOverload):
        return False
    schema = target._schema
    if schema.is_mutable or not schema.returns:
        return False
    return schema.returns[0].alias_info is not None


def _moved(node: fx.Node, base: fx.Node, ir: Any) -> Any:
    """`ir`, a view of the graph input `base`, whose pointer counts from where the input begins.

    torch 2.11 counts that twice.
    """
    from .inductor import (
        FixedLayout,
        ReinterpretView,
        TensorBox,
        V,
        as_storage_and_layout,
        is_storage_and_layout,
    )

    here, start = node.meta["val"], base.meta["val"]
    if not is_storage_and_layout(ir):
        return ir
    storage, layout = as_storage_and_layout(ir)
    begin = _expression(start.storage_offset()) * start.element_size() // here.element_size()
    error = V.graph.sizevars.simplify(_expression(here.storage_offset()) - begin - layout.offset)
    if error == 0:
        return ir
    offset = layout.offset + error
    right = FixedLayout(layout.device, layout.dtype, layout.size, layout.stride, offset)
    return TensorBox(ReinterpretView(data=storage, layout=right))


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else int(size)
