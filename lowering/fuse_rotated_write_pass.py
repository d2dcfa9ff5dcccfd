"""`fuse_rotated_write_pass`: norms and rotation before attention over new tokens, and the write of
their keys and values, become one `rotate_and_write_kv`."""

from typing import Any

from torch import Tensor, fx

from ..core.errors import AttnopsError, one_line
from ..core.record import changed, check, split
from ..core.select import parse_policy, select
from ..ops import OPS
from .fuse_rotation_pass import Rotated
from .graph_tools import NewNodes, fake_of, finish, graph_of, log, records_gradients
from .patterns import number
from .rotations import Side, turned

WRITE, ATTENTION, FUSED = "write_kv", "varlen_attention", "rotate_and_write_kv"


def fuse_rotated_write_pass(graph: fx.Graph | fx.GraphModule) -> tuple[Rotated, ...]:
    """Hand the queries and keys of packed new tokens, as they were before RMS norms and rotation,
    to one op that also writes keys and values into pages.

    So it is where `write_kv` and a later `varlen_attention` take one key. The rotation is one by
    halves. The op computes in float32 and rounds once, where the model's code rounds after each
    step. Nothing else may use the numbers in between, and none of the inputs may be written between
    their first use and the last that the op takes the place of. The graph records no gradients.

    Args:
        graph: as Dynamo gives it to a backend, with fake values. Changed in place.

    Returns:
        Every write of keys that attention reads, too, in the order of the graph.
    """
    graph = graph_of(graph)
    if records_gradients(graph):
        return ()
    readers = graph.find_nodes(op="call_function", target=OPS[ATTENTION].packet.default)
    found = []
    for node in graph.find_nodes(op="call_function", target=OPS[WRITE].packet.default):
        write = _call(WRITE, node)
        reader = next((each for each in readers if each > node and _key(each) is _key(node)), None)
        if reader is not None and write.k_scale is None and write.v_scale is None:
            found.append(_fuse(node, write, reader))
            log.info("%s", found[-1])
    if any(not f.refusal for f in found):
        finish(graph)
    return tuple(found)


def _call(op: str, node: Any) -> Any:
    """The record of a call, with nodes in place of tensors."""
    return OPS[op].call(*node.args, **node.kwargs)


def _key(node: fx.Node) -> Any:
    """The key of a call before what moves its vectors alone."""
    op = WRITE if node.target is OPS[WRITE].packet.default else ATTENTION
    call = _call(op, node)
    return Side(fake_of(call.key), call.key).back()


def _fuse(node: fx.Node, write: Any, reader: fx.Node) -> Rotated:
    attention = _call(ATTENTION, reader)
    if parse_policy(write.policy).forced(WRITE):
        return Rotated(node.name, refusal=f"a kernel of {WRITE} is forced")
    if fake_of(write.value).dtype != fake_of(write.key).dtype:
        return Rotated(node.name, refusal="key and value have different dtypes")
    again = Side(fake_of(attention.key), attention.key)
    again.back()
    query, key = (Side(fake_of(x), x) for x in (attention.query, write.key))
    key.inside |= again.inside
    values = write.value, attention.value
    before = turned((node, reader), (query, key), values, _packed_tokens)
    if isinstance(before, str):
        return Rotated(node.name, refusal=before)
    new = NewNodes(node)
    fused = before.arguments(new)
    for name in ("query", "key"):
        shape = tuple(fake_of(fused[name]).shape)
        fused[f"turned_{name}"] = new.add("new_empty", fused[name], shape)
    names = ("value", "k_pages", "v_pages", "slots", "policy")
    fused |= {name: getattr(write, name) for name in names}
    if why := _unserved(fused):
        new.erase()
        return Rotated(node.name, refusal=why)
    args, kwargs = split(OPS[FUSED].call(**fused))
    new.add(OPS[FUSED].packet.default, *args, **kwargs)
    turned_to = {name: fused[f"turned_{name}"] for name in ("query", "key")}
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


def _packed_tokens(given: Any, x: Any, cos: Any, sin: Any) -> bool:
    """Is x `[1, H, T, D]` or `[1, T, H, D]`, and are the angles `[1, 1, T, D or D / 2]` or `[1, T,
    1, D or D / 2]`?"""
    tokens, heads, dim = given.shape
    for t in (x, cos, sin):
        if not isinstance(t, Tensor) or t.dim() != 4 or t.shape[0] != 1:
            return False
    if x.dtype != given.dtype or cos.dtype != sin.dtype or cos.shape != sin.shape:
        return False
    if x.shape[3] != dim or cos.shape[3] not in (dim, dim // 2):
        return False
    shapes = tuple(x.shape[1:3]), tuple(cos.shape[1:3])
    return shapes in (((heads, tokens), (1, tokens)), ((tokens, heads), (tokens, 1)))
