"""Every op that writes, on every kind of view, compiled: the memory behind holds what eager leaves
there, or the call is refused."""

import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.export import Dim

import attnops
from attnops.core.errors import InvalidInput, find
from attnops.core.record import check
from attnops.ops import OPS
from attnops.testing import CASES

WRITING = sorted(name for name, op in OPS.items() if any(a.written for a in op.spec.args))
BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Memory = dict[str, dict[str, Tensor]]
"""By kind of view and written argument, the memory in which the argument is."""


def beside(x, dim):
    """`[..., 2, ...]`: another tensor and `x`."""
    return torch.stack([torch.zeros_like(x), x], dim)


def bits(x):
    return x.view(BYTES[x.element_size()])


class Kind(NamedTuple):
    """place: copies a tensor into other memory. view: finds it there. dims: the fewest that the
    tensor has."""

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
    "transposed index": Kind(
        lambda x: beside(x.transpose(0, 1), 0), lambda m: m[1].transpose(0, 1), 2
    ),
}


def case_of(op):
    """The first call of the grid that has as many written arguments as any."""
    return max((case.call() for case in CASES[op][:24]), key=lambda call: len(call.mutated))


def late(memory):
    """The same, as a part of a storage that begins earlier, by a whole number of strides."""
    before = memory.stride(0)
    return torch.cat([memory.new_zeros(before), memory.flatten()])[before:].view(memory.shape)


def views_of(kind, memory):
    return {n: KINDS[kind].view(m) for n, m in memory.items()}


def memory_of(call):
    """Without the kinds of views that the contract refuses, such as a plan with gaps."""
    given, found = {n: call.arguments[n] for n in call.mutated}, {}
    for name, kind in KINDS.items():
        memory = {n: kind.place(x) for n, x in given.items() if x.dim() >= kind.dims}
        try:
            check(call.with_(**views_of(name, memory)).record)
        except InvalidInput:
            continue
        found[name] = memory
    return found


def write_in_all(call, memory, within, policy):
    """Make the call once for each kind of view. within: are views made here, or is it given
    them?"""
    op = OPS[call.op]
    for kind, given in memory.items():
        views = views_of(kind, given) if within else given
        op(op.call(**{**call.arguments, **views, "policy": policy}))


WAYS = ("views of the middle of a storage", "views of all of a storage", "views that are given")
CASES_OF_VIEWS = [(way, dynamic, op) for way in WAYS for dynamic in (True, False) for op in WRITING]


@pytest.mark.sweep(33)
@pytest.mark.parametrize(("way", "dynamic", "op"), CASES_OF_VIEWS)
def test_what_eager_leaves_in_memory_is_what_compiled_code_leaves(way, dynamic, op):
    case, left = case_of(op), list[Memory]()
    for run in (write_in_all, torch.compile(write_in_all, fullgraph=True, dynamic=dynamic)):
        # What has too few dims for a kind of view is written as it is.
        call = case.with_(**{n: case.arguments[n].clone() for n in case.mutated})
        memory = memory_of(call)
        if way == WAYS[0]:
            memory = {
                kind: {n: late(m) for n, m in given.items()} for kind, given in memory.items()
            }
        given = (
            {kind: views_of(kind, each) for kind, each in memory.items()}
            if way == WAYS[2]
            else memory
        )
        run(call, given, way != WAYS[2], f"kernel={op}:reference")
        left.append(memory)
    want, got = left
    for kind, memory in want.items():
        for name, exact in memory.items():
            assert torch.equal(bits(got[kind][name]), bits(exact)), f"{name} as a view: {kind}"


# Views of another dtype ---------------------------------------------------------------------------

BF16 = torch.bfloat16


def of_memory(rows, memory):
    pages = memory.view(BF16)
    attnops.write_kv(*rows[:2], pages[0], pages[1], rows[2])


def of_parts_of_memory(rows, memory):
    attnops.write_kv(*rows[:2], memory[0].view(BF16), memory[1].view(BF16), rows[2])


def of_memory_that_is_written(rows, memory):
    memory[0].copy_(memory[1] + 1)
    of_memory(rows, memory)
    memory.add_(1)


def of_parts_of_memory_that_is_written(rows, memory):
    memory[0].copy_(memory[1] + 1)
    of_parts_of_memory(rows, memory)


def of_what_is_computed(rows, memory):
    pages = memory.view(BF16) + 1
    attnops.write_kv(*rows[:2], pages[0], pages[1], rows[2])
    memory.view(BF16).copy_(pages)


def of_what_is_detached(rows, memory):
    pages = memory.view(BF16) + 1
    attnops.write_kv(*rows[:2], pages[0].detach(), pages[1].detach(), rows[2])
    memory.view(BF16).copy_(pages)


RIGHT = of_memory, of_parts_of_memory, of_memory_that_is_written, of_what_is_computed
REFUSED = of_parts_of_memory_that_is_written, of_what_is_detached


@pytest.mark.parametrize("dynamic", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize("run", [*RIGHT, *REFUSED], ids=lambda run: run.__name__)
def test_pages_may_be_views_of_another_dtype(run, dynamic):
    """On a CPU, where the write would be lowered to torch's index_put, which Inductor compiles
    wrongly on such memory."""
    rows = *torch.randn(2, 6, 2, 16).to(BF16), torch.randperm(20)[:6]
    want, got = (torch.zeros(2, 5, 4, 2, 16, dtype=torch.int16) for _ in range(2))
    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic)
    if run in RIGHT:
        run(rows, want)
        compiled(rows, got)
    else:
        with pytest.raises(Exception) as caught:
            compiled(rows, got)
        error = find(caught.value)
        # From torch 2.15 on the compiler refuses such a view itself, whatever op it is given to.
        said = (
            "detached or of another dtype"
            if error
            else "realized as its own buffer; clone the base"
        )
        assert said in str(error or caught.value) and getattr(error, "field", "k_pages") in (
            "k_pages",
            "v_pages",
        )
    assert torch.equal(got, want)


# AOTInductor --------------------------------------------------------------------------------------


class Writes(torch.nn.Module):
    """Calls of ops that write, on views of the memory that it is given."""

    def __init__(self, calls, kind):
        super().__init__()
        self.calls, self.kind = calls, kind

    def forward(self, memories):
        for call, memory in zip(self.calls, memories, strict=True):
            write_in_all(call, {self.kind: memory}, True, "")


LOAD = """
import sys, torch, attnops
package, given, found = sys.argv[1:]
memories = torch.load(given)
with torch.no_grad():
    torch._inductor.aoti_load_package(package)(memories)
torch.save(memories, found)
"""


def memories_of(calls, kind, times):
    """By call, the memory that its views are in, so many times as long, in the middle of a
    storage."""
    return [
        {n: late(KINDS[kind].place(torch.cat([call.arguments[n]] * times))) for n in call.mutated}
        for call in calls
    ]


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["leading index", "middle index"])
def test_a_package_of_aot_inductor_writes_where_eager_does(tmp_path, kind):
    """Loaded by another process, with memory of another length than that of the export."""
    calls = [case_of(op) for op in ("write_kv", "copy_kv")]
    model, package, given, found = (
        Writes(calls, kind),
        *(str(tmp_path / name) for name in ("writes.pt2", "given.pt", "found.pt")),
    )
    once, want = (memories_of(calls, kind, times) for times in (1, 3))
    shapes = ([{n: (Dim.AUTO,) * m.dim() for n, m in memory.items()} for memory in once],)
    torch.save(want, given)
    program = torch.export.export(model, (once,), dynamic_shapes=shapes)
    torch._inductor.aoti_compile_and_package(program, package_path=package)
    model(want)
    subprocess.run([sys.executable, "-c", LOAD, package, given, found], check=True)
    for call, got, exact in zip(calls, torch.load(found), want, strict=True):
        for name in exact:
            assert torch.equal(bits(got[name]), bits(exact[name])), f"{call.op}: {name}"
