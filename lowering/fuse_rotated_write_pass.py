"""`fuse_rotated_write_pass`: norms and rotation before attention over new tokens, and the write of
their keys and values, become one `rotate_and_write_kv`."""

from typing import Any

import torch
from torch import Tensor, fx

from ..core.errors import AttnopsError, one_line
from ..core.problem import surely
from ..core.record import changed, check, split
from ..core.select import parse_policy, select
from ..ops import OPS
from .fuse_rotation_pass import Rotated
from .graph_tools import NewNodes, fake_of, finish, graph_of, log, records_gradients
from .patterns import number
from .rotations import Side, turned

WRITE, FUSED = "write_kv", "rotate_and_write_kv"
PACKED, PAGED = "varlen_attention", "paged_attention"


def fuse_rotated_write_pass(graph: fx.Graph | fx.GraphModule) -> tuple[Rotated, ...]:
    """Hand the queries and keys of new tokens, as they were before RMS norms and rotation, to one
    op that also writes keys and values into pages.

    So it is where `write_kv` and a later `varlen_attention` take one key, or a `paged_attention`
    reads the pages that were written. The rotation is one by halves. The op computes in float32 and
    rounds once, where the model's code rounds after each step. Nothing else may use the numbers in
    between, and none of the inputs may be written between their first use and the last that the op
    takes the place of. The graph records no gradients.

    Args:
        graph: as Dynamo gives it to a backend, with fake values. Changed in place.

    Returns:
        Every write of keys that attention reads, too, in the order of the graph.
    """
    graph = graph_of(graph)
    if records_gradients(graph):
        return ()
    readers = [
        each
        for op in (PACKED, PAGED)
        for each in graph.find_nodes(op="call_function", target=OPS[op].packet.default)
    ]
    found = []
    for node in graph.find_nodes(op="call_function", target=OPS[WRITE].packet.default):
        write = _call(WRITE, node)
        later = (each for each in readers if each > node)
        reader = next((each for each in later if _reads(each, node, write)), None)
        if reader is not None and write.k_scale is None and write.v_scale is None:
            found.append(_fuse(node, write, reader))
            log.info("%s", found[-1])
    if any(not f.refusal for f in found):
        finish(graph)
    return tuple(found)


def _call(op: str, node: Any) -> Any:
    """The record of a call, with nodes in place of tensors."""
    return OPS[op].call(*node.args, **node.kwargs)


def _op(reader: fx.Node) -> str:
    return PAGED if reader.target is OPS[PAGED].packet.default else PACKED


def _reads(reader: fx.Node, node: fx.Node, write: Any) -> bool:
    """Does it attend to the keys of this write, as they come or in their pages?"""
    attention = _call(_op(reader), reader)
    if _op(reader) == PAGED:
        pages = attention.k_pages, attention.v_pages
        return pages == (write.k_pages, write.v_pages)
    return _key(attention) is _key(write)


def _key(call: Any) -> Any:
    """The key of a call before what moves its vectors alone."""
    return Side(fake_of(call.key), call.key).back()


def _fuse(node: fx.Node, write: Any, reader: fx.Node) -> Rotated:
    attention = _call(_op(reader), reader)
    if parse_policy(write.policy).forced(WRITE):
        return Rotated(node.name, refusal=f"a kernel of {WRITE} is forced")
    if fake_of(write.value).dtype != fake_of(write.key).dtype:
        return Rotated(node.name, refusal="key and value have different dtypes")
    query, key = (Side(fake_of(x), x) for x in (attention.query, write.key))
    values = [write.value]
    if _op(reader) == PACKED:
        again = Side(fake_of(attention.key), attention.key)
        again.back()
        key.inside |= again.inside
        values.append(attention.value)
    before = turned((node, reader), (query, key), values, _new_tokens)
    if isinstance(before, str):
        return Rotated(node.name, refusal=before)
    new = NewNodes(node)
    fused = before.arguments(new)
    for name in ("query", "key"):
        whole = {"memory_format": torch.contiguous_format}
        fused[f"turned_{name}"] = new.add(torch.empty_like, fused[name], **whole)
    names = ("value", "k_pages", "v_pages", "slots", "policy")
    fused |= {name: getattr(write, name) for name in names}
    if why := _unserved(fused):
        new.erase()
        return Rotated(node.name, refusal=why)
    args, kwargs = split(OPS[FUSED].call(**fused))
    new.add(OPS[FUSED].packet.default, *args, **kwargs)
    taken = ["query", "key"] if _op(reader) == PACKED else ["query"]
    turned_to = {name: fused[f"turned_{name}"] for name in taken}
    reader.args, reader.kwargs = split(changed(attention, **turned_to))
    node.graph.erase_node(node)
    before.erase()
    return Rotated(node.name, bool(before.norms))


def _unserved(fused: dict[str, Any]) -> str:
    """Why no kernel is to take the fused op, or "". fused: its arguments, as nodes."""
    call: Any = OPS[FUSED].call(**{name: number(x) for name, x in fused.items()})
    try:
        check(call)
        chosen = select(OPS[FUSED].problem(call), call.policy).kernel
    except AttnopsError as error:
        return one_line(error)
    on_cpu = call.query.device.type == "cpu"
    served = chosen is not None and (on_cpu or not chosen.judge)
    return "" if served else f"plain torch alone takes {FUSED}"


def _new_tokens(given: Any, x: Any, cos: Any, sin: Any) -> bool:
    """Is x `[B, H, S, D]` or `[B, S, H, D]`, and are the angles `[B, 1, S, D or D / 2]` or `[B, S,
    1, D or D / 2]`?"""
    tokens, heads, dim = given.shape
    if not isinstance(x, Tensor) or x.dim() != 4:
        return False
    rows = x.shape[0]
    for t in (cos, sin):
        if not isinstance(t, Tensor) or t.dim() != 4 or not surely(t.shape[0] == rows):
            return False
    if x.dtype != given.dtype or cos.dtype != sin.dtype or cos.shape != sin.shape:
        return False
    if x.shape[3] != dim or cos.shape[3] not in (dim, dim // 2):
        return False
    by_head, by_token = tuple(x.shape[1:3]), tuple(cos.shape[1:3])
    count = by_token[0] if by_token[1] == 1 else by_token[1]
    fits = ((heads, count), (1, count)), ((count, heads), (count, 1))
    return (by_head, by_token) in fits and surely(rows * count == tokens)
