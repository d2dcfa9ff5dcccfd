"""Every op that writes, on every kind of view, compiled: the memory behind holds what eager leaves there, or the call is refused."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.export import Dim

import attnops
from attnops.core.errors import InvalidInput, find
from attnops.core.record import check
from attnops.ops import OPS
from attnops.testing import CASES
from attnops.testing.calls import Call

WRITING = sorted(name for name, op in OPS.items() if any(a.written for a in op.spec.args))
BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def beside(x: Tensor, dim: int) -> Tensor:
    """`[..., 2, ...]`: another tensor and `x`."""
    return torch.stack([torch.zeros_like(x), x], dim)


def bits(x: Tensor) -> Tensor:
    return x.view(BYTES[x.element_size()])


@dataclass(frozen=True)
class Kind:
    """place: copies a tensor into other memory. view: finds it there. dims: the fewest that the tensor has."""

    place: Callable[[Tensor], Tensor]
    view: Callable[[Tensor], Tensor]
    dims: int = 1


KINDS = {
    "leading index": Kind(lambda x: beside(x, 0), lambda m: m[1]),
    "middle index": Kind(lambda x: beside(x, 1), lambda m: m[:, 1], 2),
    "step": Kind(lambda x: beside(x, 1).flatten(0, 1), lambda m: m[1::2]),
    "first dim": Kind(lambda x: torch.cat([x, x, x]), lambda m: m.chunk(3)[1]),
    "middle dim": Kind(lambda x: torch.cat([x, x], -2), lambda m: m.chunk(2, -2)[1], 2),
    "last dim": Kind(lambda x: torch.cat([x, x], -1), lambda m: m.chunk(2, -1)[1]),
    "transpose": Kind(lambda x: x.transpose(0, 1).contiguous(), lambda m: m.transpose(0, 1), 2),
    "transposed index": Kind(lambda x: beside(x.transpose(0, 1), 0), lambda m: m[1].transpose(0, 1), 2),
}


def case_of(op: str) -> Call:
    """The first call of the grid that has as many written arguments as any."""
    return max((case.call() for case in CASES[op][:24]), key=lambda call: len(call.mutated))


def late(memory: Tensor) -> Tensor:
    """The same, as a part of a storage that begins earlier, by a whole number of strides."""
    before = memory.stride(0)
    return torch.cat([memory.new_zeros(before), memory.flatten()])[before:].view(memory.shape)


Memory = dict[str, dict[str, Tensor]]
"""By kind of view and written argument, the memory in which the argument is."""


def memory_of(call: Call) -> Memory:
    """Without the kinds of views that the contract refuses, such as a plan with gaps."""
    given = {n: call.arguments[n] for n in call.mutated}
    placed = {kind: {n: KINDS[kind].place(x) for n, x in given.items() if x.dim() >= KINDS[kind].dims} for kind in KINDS}
    return {kind: memory for kind, memory in placed.items() if is_in_order(call, views_of(kind, memory))}


def views_of(kind: str, memory: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: KINDS[kind].view(m) for n, m in memory.items()}


def is_in_order(call: Call, views: dict[str, Tensor]) -> bool:
    try:
        check(call.with_(**views).record)
    except InvalidInput:
        return False
    return True


def write_in_all(call: Call, memory: Memory, within: bool, policy: str) -> None:
    """Make the call once for each kind of view. within: are views made here, or is it given them?"""
    op = OPS[call.op]
    for kind, given in memory.items():
        views = views_of(kind, given) if within else given
        op(op.call(**{**call.arguments, **views, "policy": policy}))


def left_behind(call: Call, how: str, run: Callable[..., None], policy: str) -> Memory:
    """The memory after `run`, which is handed it or the views of it."""
    memory = memory_of(call)
    if how == "views of the middle of a storage":
        memory = {kind: {n: late(m) for n, m in given.items()} for kind, given in memory.items()}
    if how == "views that are given":
        views = {kind: views_of(kind, given) for kind, given in memory.items()}
        run(call, views, False, policy)
    else:
        run(call, memory, True, policy)
    return memory


WAYS = ("views of the middle of a storage", "views of all of a storage", "views that are given")
CASES_OF_VIEWS = [(way, dynamic, op) for way in WAYS for dynamic in (True, False) for op in WRITING]


@pytest.mark.sweep(33)
@pytest.mark.parametrize(("way", "dynamic", "op"), CASES_OF_VIEWS)
def test_what_eager_leaves_in_memory_is_what_compiled_code_leaves(way, dynamic, op):
    call, policy = case_of(op), f"kernel={op}:reference"
    with torch.no_grad():
        want = left_behind(call, way, write_in_all, policy)
        torch._dynamo.reset()
        got = left_behind(call, way, torch.compile(write_in_all, fullgraph=True, dynamic=dynamic), policy)
    for kind, memory in want.items():
        for name, exact in memory.items():
            assert torch.equal(bits(got[kind][name]), bits(exact)), f"{name} as a view: {kind}"


# Views of another dtype ------------------------------------------------------------------------------------------------

HEADS, DIM, PAGE = 2, 16, 4
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def tokens(dtype=torch.float32):
    torch.manual_seed(0)
    return *(torch.randn(6, HEADS, DIM).to(dtype) for _ in range(2)), torch.randperm(20)[:6]


def write(key, value, k_pages, v_pages, slots):
    scale = torch.ones(1) if k_pages.dtype == E4M3 else None
    attnops.write_kv(key, value, k_pages, v_pages, slots, k_scale=scale, v_scale=scale)


def of_memory(key, value, memory, slots):
    pages = memory.view(BF16)
    write(key, value, pages[0], pages[1], slots)


def of_parts_of_memory(key, value, memory, slots):
    write(key, value, memory[0].view(BF16), memory[1].view(BF16), slots)


def of_memory_and_read_after(key, value, memory, slots):
    of_memory(key, value, memory, slots)
    memory.add_(1)


def of_memory_that_is_written(key, value, memory, slots):
    memory[0].copy_(memory[1] + 1)
    of_memory(key, value, memory, slots)


def of_parts_of_memory_that_is_written(key, value, memory, slots):
    memory[0].copy_(memory[1] + 1)
    of_parts_of_memory(key, value, memory, slots)


def of_bytes_that_are_written(key, value, memory, slots):
    bits = memory.view(torch.uint8)
    bits[0].copy_(bits[1] + 1)
    write(key, value, bits[0].view(E4M3), bits[1].view(E4M3), slots)


def of_bytes_that_are_computed(key, value, memory, slots):
    bits = memory.view(torch.uint8) + 1
    pages = bits.view(E4M3)
    write(key, value, pages[0], pages[1], slots)
    memory.view(torch.uint8).copy_(bits)


def of_what_is_computed(key, value, memory, slots):
    pages = memory.view(BF16) + 1
    write(key, value, pages[0], pages[1], slots)
    memory.view(BF16).copy_(pages)


def of_what_is_detached(key, value, memory, slots):
    pages = memory.view(BF16) + 1
    write(key, value, pages[0].detach(), pages[1].detach(), slots)
    memory.view(BF16).copy_(pages)


RIGHT = (
    of_memory,
    of_parts_of_memory,
    of_memory_and_read_after,
    of_memory_that_is_written,
    of_what_is_computed,
    of_bytes_that_are_computed,
)
REFUSED = of_parts_of_memory_that_is_written, of_bytes_that_are_written, of_what_is_detached


def memory_for(run) -> Tensor:
    shape = 2, 5, PAGE, HEADS, DIM
    return torch.zeros(shape).to(E4M3) if "bytes" in run.__name__ else torch.zeros(shape, dtype=torch.int16)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("run", RIGHT, ids=lambda run: run.__name__)
def test_pages_may_be_views_of_another_dtype(run, dynamic):
    """On a CPU, where the write would be lowered to torch's index_put, which Inductor compiles wrongly on such memory."""
    key, value, slots = tokens(BF16)
    want, got = memory_for(run), memory_for(run)
    with torch.no_grad():
        run(key, value, want, slots)
        torch._dynamo.reset()
        torch.compile(run, fullgraph=True, dynamic=dynamic)(key, value, got, slots)
    assert torch.equal(bits(got), bits(want))


@pytest.mark.parametrize("run", REFUSED, ids=lambda run: run.__name__)
def test_a_view_that_the_compiler_would_misplace_is_refused(run):
    key, value, slots = tokens(BF16)
    memory = memory_for(run)
    with torch.no_grad(), pytest.raises(Exception) as caught:
        torch.compile(run, fullgraph=True)(key, value, memory, slots)
    assert (bits(memory) == 0).all()
    error = find(caught.value)
    if error is None:  # from torch 2.15 on the compiler refuses such a view itself, whatever op it is given to
        assert "realized as its own buffer; clone the base" in str(caught.value)
        return
    assert isinstance(error, InvalidInput) and error.field in ("k_pages", "v_pages")
    assert "detached or of another dtype" in str(error)


# AOTInductor -----------------------------------------------------------------------------------------------------------


class Writes(torch.nn.Module):
    """Calls of ops that write, on views of the memory that it is given."""

    def __init__(self, calls: list[Call], kind: str) -> None:
        super().__init__()
        self.calls, self.kind = calls, kind

    def forward(self, memories: list[dict[str, Tensor]]) -> None:
        for call, memory in zip(self.calls, memories, strict=True):
            op = OPS[call.op]
            op(op.call(**{**call.arguments, **views_of(self.kind, memory)}))


LOAD = """
import sys, torch, attnops
package, given, found = sys.argv[1:]
memories = torch.load(given)
with torch.no_grad():
    torch._inductor.aoti_load_package(package)(memories)
torch.save(memories, found)
"""


def memories_of(calls: list[Call], kind: str, times: int) -> list[dict[str, Tensor]]:
    """By call, the memory that its views are in, so many times as long, in the middle of a storage."""
    longer = [{n: torch.cat([call.arguments[n]] * times) for n in call.mutated} for call in calls]
    return [{n: late(KINDS[kind].place(x)) for n, x in given.items()} for given in longer]


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["leading index", "middle index"])
def test_a_package_of_aot_inductor_writes_where_eager_does(tmp_path, kind):
    """Loaded by another process, with memory of another length than that of the export."""
    calls = [case_of(op) for op in ("write_kv", "copy_kv")]
    model, package = Writes(calls, kind), str(tmp_path / "writes.pt2")
    shapes = ([{n: (Dim.AUTO,) * m.dim() for n, m in memory.items()} for memory in memories_of(calls, kind, 1)],)
    with torch.no_grad():
        program = torch.export.export(model, (memories_of(calls, kind, 1),), dynamic_shapes=shapes)
        torch._inductor.aoti_compile_and_package(program, package_path=package)
        want = memories_of(calls, kind, 3)
        given, found = tmp_path / "given.pt", tmp_path / "found.pt"
        torch.save(want, given)
        model(want)
    subprocess.run([sys.executable, "-c", LOAD, package, str(given), str(found)], check=True)
    for call, got, exact in zip(calls, torch.load(found), want, strict=True):
        for name in exact:
            assert torch.equal(bits(got[name]), bits(exact[name])), f"{call.op}: {name}"
