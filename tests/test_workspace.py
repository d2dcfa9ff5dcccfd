"""A kernel that asks for a workspace: refused without it, chosen with it, and where the workspace
comes from."""

from dataclasses import replace

import pytest
import torch

from attnops.cache import PagedCache
from attnops.core import kernel as registry_module
from attnops.core.errors import NoKernel
from attnops.core.kernel import Kernel, Registry, one_of
from attnops.core.record import FLOATS
from attnops.core.select import choose, parse_policy, select, workspace_bytes
from attnops.kernels.shared import memory
from attnops.ops import OPS
from attnops.testing import CASES, check_kernel, equip, refusals

SIZE = 1000
DECODE = next(c for c in CASES["paged_attention"] if c.label == "decode-plain")


def run(call):
    assert call.workspace.numel() >= SIZE
    call.workspace[:SIZE] = 255
    OPS["paged_attention"].reference(call)


NEEDY = Kernel(
    "needy",
    "paged_attention",
    run,
    takes=OPS["paged_attention"].spec.optional,
    dtypes=FLOATS,
    needs=(one_of("page_size", 16),),
    workspace_bytes=lambda p: SIZE,
    cost_us=lambda p: 0.1,
)


@pytest.fixture
def needy(monkeypatch):
    """A registry that has NEEDY too; it gets no overload, for none can be taken back."""
    before = registry_module._REGISTRY
    kernels = {op: dict(table) for op, table in before.kernels.items()}
    kernels["paged_attention"]["needy"] = NEEDY
    monkeypatch.setattr(
        registry_module, "_REGISTRY", Registry(kernels, generation=before.generation + 1_000_000)
    )
    parse_policy.cache_clear()
    yield
    parse_policy.cache_clear()


def zeros(size):
    return torch.zeros(size, dtype=torch.uint8)


def test_refused_without_and_with_too_little():
    call = DECODE.call()
    assert str(NEEDY.refusals(call.problem)[0]).startswith(
        "workspace=0 bytes (wants >= 1000 bytes, zeroed once: attnops.explain"
    )
    assert [
        len(NEEDY.refusals(call.with_(workspace=zeros(n)).problem)) for n in (SIZE - 1, SIZE)
    ] == [1, 0]


def test_the_size_is_not_asked_of_a_problem_that_does_not_meet_the_needs():
    def never(problem):
        raise AssertionError

    problem = replace(DECODE.call().problem, page_size=3)
    kernel = replace(NEEDY, workspace_bytes=never)
    assert [r.field for r in kernel.refusals(problem)] == ["page_size"]
    other = next(c for c in CASES["paged_attention"] if c.label == "page_3-plain").call()
    assert equip(kernel, other) is other
    assert check_kernel(kernel, other).refused


def test_tests_bring_what_is_asked_for():
    call = DECODE.call()
    ready = equip(NEEDY, call)
    workspace = ready.arguments["workspace"]
    assert workspace.dtype == torch.uint8 and workspace.numel() == SIZE and not workspace.any()
    assert (
        equip(NEEDY, ready) is ready and equip(replace(NEEDY, workspace_bytes=None), call) is call
    )
    assert not refusals(NEEDY, call) and check_kernel(NEEDY, call).worst <= 1.0
    packed = next(iter(CASES["varlen_attention"])).call()
    assert equip(replace(NEEDY, op="varlen_attention"), packed) is packed, (
        "that op takes no workspace"
    )


def test_chosen_once_there_is_enough(needy):
    call = DECODE.call()
    assert select(call.problem).kernel.name != "needy"
    assert workspace_bytes(call.problem) == SIZE
    assert workspace_bytes(call.problem, "deny=needy") == 0
    assert workspace_bytes(replace(call.problem, page_size=3)) == 0
    assert select(call.with_(workspace=zeros(SIZE)).problem).kernel.name == "needy"
    with pytest.raises(NoKernel, match="workspace=0 bytes"):
        choose(call.problem, "kernel=needy")


def test_an_unknown_size_counts_as_the_least_it_may_be(monkeypatch):
    seen = []
    from attnops.core.op import watch
    from tests.ops.test_fakes import FIXED, UNBACKED, symbolic

    end = watch(lambda op, problem, policy: seen.append(problem.step.workspace))
    try:
        call = DECODE.call().with_(workspace=zeros(SIZE))
        for dynamic in (torch.fx.experimental.symbolic_shapes.DimDynamic.DYNAMIC, UNBACKED):
            monkeypatch.setattr("tests.ops.test_fakes.FIXED", FIXED - {"bytes"})
            _, guards, _ = symbolic("paged_attention", "default", dynamic, call)
            assert not guards
    finally:
        end()
    assert len(seen) == 2 and all(0 <= n <= 2 for n in seen)


def test_a_cache_owns_one_and_its_batches_carry_it():
    sizes = {"max_requests": 3, "max_pages_per_request": 4, "dtype": torch.float32, "device": "cpu"}
    pages = PagedCache(1, 8, 16, 2, 16, **sizes, workspace_bytes=SIZE)
    assert (
        pages.workspace.shape == (SIZE,)
        and pages.workspace.dtype == torch.uint8
        and not pages.workspace.any()
    )
    assert pages.batch([pages.alloc()], 1).workspace is pages.workspace


def test_parts():
    workspace = zeros(memory.total(64))
    counters, scratch = memory.split(workspace, 64)
    assert counters.numel() == memory.COUNTERS and scratch.numel() == 64
    assert (
        counters.data_ptr() == workspace.data_ptr()
        and scratch.data_ptr() == workspace.data_ptr() + memory.COUNTERS
    )
