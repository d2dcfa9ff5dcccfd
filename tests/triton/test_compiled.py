"""Launches past Triton's search for a compiled kernel: which go to the kernel of one before, and
with which arguments."""

from __future__ import annotations

import weakref

import pytest
import torch
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from attnops.kernels.shared.launch import compiled


class Compiled:
    """In place of a compiled kernel: notes its launches."""

    def __init__(self):
        self.launched = []

    def __getitem__(self, grid):
        return lambda *values: self.launched.append((grid, values))


class Kernel:
    """In place of Triton's function: each launch through its search gives another compiled
    kernel."""

    pre_run_hooks: tuple[object, ...] = ()
    arg_names = ("x", "size", "scale", "BLOCK", "LAST")

    def __init__(self):
        self.searched = []

    def __getitem__(self, grid):
        def launch(*args, **given):
            self.searched.append(Compiled())
            return self.searched[-1]

        return launch


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(compiled, "JITFunction", Kernel)
    monkeypatch.setattr(compiled, "CompiledKernel", Compiled)
    monkeypatch.setattr(compiled, "_ENTRIES", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return Kernel()


MEMORY = torch.zeros(64)  # torch aligns memory to 64 bytes


def launch(kernel, x=MEMORY, size=32, scale=0.5, last=7, warps=4):
    compiled.launch_compiled(
        kernel, (3, 2), (x, size), {"LAST": last, "scale": scale, "BLOCK": 16, "num_warps": warps}
    )


def test_a_launch_like_one_before_goes_to_its_kernel_with_arguments_in_order(kernel):
    launch(kernel)
    other = torch.ones(64)
    launch(kernel, other)
    [found] = kernel.searched
    [(grid, (x, *rest))] = found.launched
    assert x is other and grid == (3, 2, 1)
    assert rest == [32, 0.5, 16, 7], "without the options of Triton"


@pytest.mark.parametrize(
    "other",
    [
        {"size": 33},
        {"size": 32.0},
        {"scale": 1},
        {"warps": 8},
        {"last": 8},
        {"x": MEMORY[1:]},
        {"x": MEMORY.half()},
        {"x": None},
    ],
    ids=str,
)
def test_a_launch_of_another_kind_is_searched_for(kernel, other):
    launch(kernel)
    launch(kernel, **other)
    assert len(kernel.searched) == 2


def test_numbers_that_are_equal_and_of_other_types_are_kinds_of_their_own(kernel):
    for size in (1, 1.0, True):
        launch(kernel, size=size)
    assert len(kernel.searched) == 3


def test_a_launch_that_leaves_an_argument_out_is_searched_for(kernel):
    for _ in range(2):
        compiled.launch_compiled(kernel, (1,), (MEMORY, 1, 1.0), {"BLOCK": 16})
    assert len(kernel.searched) == 2


def test_a_profiler_that_hooks_into_launches_sees_all(kernel):
    kernel.pre_run_hooks = (print,)
    launch(kernel)
    launch(kernel)
    assert len(kernel.searched) == 2


def test_another_device_has_its_own(kernel, monkeypatch):
    launch(kernel)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    launch(kernel)
    assert len(kernel.searched) == 2


def test_as_many_as_the_limit_are_kept_and_the_newest_stay(kernel, monkeypatch):
    monkeypatch.setattr(compiled, "MOST", 2)
    for size in (2, 3, 4, 4, 3):
        launch(kernel, size=size)
    assert len(compiled._ENTRIES) == 2 and len(kernel.searched) == 3


def test_a_parameter_is_compared_as_its_memory_is(kernel):
    weight = torch.nn.Parameter(MEMORY, requires_grad=False)
    launch(kernel, weight)
    launch(kernel, torch.nn.Parameter(torch.ones(64)))
    assert len(kernel.searched) == 1
    weight.data = MEMORY[1:]
    launch(kernel, weight)
    weight.data = MEMORY.half()
    launch(kernel, weight)
    assert len(kernel.searched) == 3


def test_a_subclass_of_tensor_is_searched_for_and_not_held(kernel):
    class Weight(torch.nn.Parameter):
        pass

    weight = Weight(torch.zeros(64), requires_grad=False)
    for _ in range(2):
        launch(kernel, weight)
    alive = weakref.ref(weight)
    del weight
    assert len(kernel.searched) == 2 and not compiled._ENTRIES and alive() is None


def test_descriptors_differ_by_block_and_dtype(kernel):
    def describe(memory, *block):
        return TensorDescriptor(memory, [8, 8], [8, 1], [*block])

    square, half = torch.zeros(8, 8), torch.zeros(8, 8, dtype=torch.float16)
    for x in (describe(square, 4, 4), describe(torch.ones(8, 8), 4, 4)):
        launch(kernel, x)
    assert len(kernel.searched) == 1
    launch(kernel, describe(square, 8, 4))
    launch(kernel, describe(half, 4, 4))
    assert len(kernel.searched) == 3


@pytest.mark.parametrize(
    "of, name, value",
    [
        ("runtime", "debug", True),
        ("compilation", "instrumentation_mode", "profiled"),
        ("runtime", "add_stages_inspection_hook", print),
    ],
)
def test_what_triton_is_told_later_reaches_every_launch(kernel, monkeypatch, of, name, value):
    launch(kernel)
    monkeypatch.setattr(getattr(knobs, of), name, value)
    launch(kernel)
    assert len(kernel.searched) == 2


def test_a_kernel_of_one_argument_is_searched_for(kernel):
    kernel.arg_names = ("x",)
    for _ in range(2):
        compiled.launch_compiled(kernel, (1,), (MEMORY,), {})
    assert len(kernel.searched) == 2
