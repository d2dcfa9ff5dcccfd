"""Every kernel that has a stand-in keeps its op's contract: on the grid, under opcheck, in any layout, in training."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

import attnops
from attnops.core.errors import InvalidInput
from attnops.core.kernel import Kernel, all_kernels, kernels_of
from attnops.core.problem import Problem, altered
from attnops.testing import CASES, Call, Case, check_kernel
from attnops.testing.calls import equip
from tests.ops.test_opcheck import check as opcheck, telling
from tests.standins.vendors import VENDORS, WIDE, narrow
from tests.triton.test_numerics import strided, transposed

F16, BF16, F32, E4M3 = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn

GRADIENTS = ("attention_backward", "varlen_attention_backward")
NARROWED = ("attention", "varlen_attention", "paged_attention", *GRADIENTS)
LATENT = ("mla_attention", "sparse_mla_attention")
OWN_GRID = ("flashinfer", "xqa", "trtllm")
"""Their tests have points of their own: the grid holds few problems that these take."""

FOREIGN = [k for k in all_kernels() if k.name in VENDORS]
KERNELS = [k for k in FOREIGN if k.name != "flex" or k.op in GRADIENTS]
SWEEPS = {"cudnn": 1, "flex": 27, "sgl_sparse": 1, "flashinfer_rope": 1}
ARCHS = {"sparse_mla_attention": (90, 100)}
SHARE = {"trtllm_mla": 0.125}
"""Of its budget, what a stand-in of one precise sum takes."""


def named(kernel: Kernel) -> str:
    return f"{kernel.op}-{kernel.name}"


def gridded(kernel: Kernel) -> list[Case]:
    if kernel.name in OWN_GRID or kernel.op.startswith("plan_"):
        return []
    every = kernel.op not in LATENT
    return [c for c in CASES[kernel.op] if every or c.label.startswith("deepseek")]


def usual(kernel: Kernel, case: Case) -> Call:
    """The call, for a kernel of half precision in bfloat16."""
    as_it_is = kernel.op not in NARROWED or kernel.name == "flex"
    return case.call() if as_it_is else narrow(case.call())


def variants(kernel: Kernel, case: Case) -> Iterator[Call]:
    """The usual call, and as it is where something beside a query of half precision is wider."""
    yield usual(kernel, case)
    call = case.call()
    beside = {call.arguments[n].dtype for n in ("sinks", "mask") if n in call.arguments}
    if kernel.op in NARROWED and call.problem.dtype not in WIDE and beside & {*WIDE}:
        yield call


def serviced(kernel: Kernel, problem: Problem) -> Problem:
    """The problem with the workspace and the host's plan that the kernel asks for."""
    planned = "flashinfer" in kernel.name and kernel.op in ("paged_attention", "mla_attention")
    return altered(problem, workspace=1 << 40, plan="host" if planned else problem.step.plan)


GRID = [
    pytest.param(k, c, arch, id=f"{k.name}-{c}-sm{arch}", marks=pytest.mark.sweep(SWEEPS.get(k.name, 3)))
    for k in KERNELS for c in gridded(k) for arch in ARCHS.get(k.op, (VENDORS[k.name].arch,))
]  # fmt: skip


@pytest.mark.parametrize(("kernel", "case", "arch"), GRID)
def test_grid(kernel: Kernel, case: Case, arch: int) -> None:
    refused = []
    for call in variants(kernel, case):
        with VENDORS[kernel.name].running(arch):
            figures = check_kernel(kernel, call)
        if figures.refused:
            refused.append(str(figures))
            continue
        float8 = call.problem.dtype.itemsize == 1
        assert figures.worst <= (1.0 if float8 else SHARE.get(kernel.name, 1.0)), figures
    if refused:
        pytest.skip("; ".join(refused))


OF_TORCH = ("aten_flash", "cudnn", "mem_efficient", "flex")


EMPTY = ("no_", "empty", "nothing")
"""In labels of cases in which no kernel runs."""


def telling_calls(kernel: Kernel) -> list[Call]:
    """Two that the kernel takes on the machine that is pretended."""
    cases = [c for c in CASES[kernel.op] if not any(word in c.label for word in EMPTY)]
    made = {c: usual(kernel, c) for c in cases}
    taken = [c for c in cases if not kernel.refusals(serviced(kernel, made[c].problem))]
    return [made[c] for c in telling(taken, 2)]


SLOW = {"trtllm_mla": pytest.mark.full}
OPCHECKED = [pytest.param(k, id=named(k), marks=SLOW.get(k.name, ())) for k in KERNELS if k.name not in OF_TORCH]


@pytest.mark.parametrize("nth", [0, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("kernel", OPCHECKED)
def test_opcheck(kernel: Kernel, nth: int) -> None:
    with VENDORS[kernel.name].running() as calls:
        call = equip(kernel, telling_calls(kernel)[nth])
        assert not kernel.refusals(call.problem)
        opcheck(kernel.op, kernel.name, call)
        assert calls, "no foreign op was called"


def unaligned(x: Tensor) -> Tensor:
    """Rows that do not start at multiples of 16 bytes."""
    raw = x.view(torch.uint8) if x.dtype.itemsize == 1 else x
    return torch.cat([raw, raw[..., :1]], -1)[..., :-1].view(x.dtype)


def moved(x: Tensor) -> Tensor:
    """In one piece that begins elsewhere."""
    raw = x.view(torch.uint8) if x.dtype.itemsize == 1 else x
    return torch.cat([raw.flatten()[:1], raw.flatten()])[1:].view(x.shape).view(x.dtype)


STRIDED = (lambda t: t, partial(strided, dim=0), partial(transposed, dim=1))
UNALIGNED = (lambda t: t, unaligned, moved)
OF_LAYOUT = {"plan", "last_dim_contiguous", "pages_packed", "pages_in_rows", "pages_alike"}


def laid_otherwise(call: Call, turn: int) -> Call:
    """Every tensor in another layout, and in another one a turn later; pages of keys and values alike."""
    ways, names = (STRIDED, UNALIGNED)[turn // 3], list(call.tensors())

    def change(name: str, t: Tensor) -> Tensor:
        if t.numel() == 1 or (t.dim() == 1 and turn >= 3):
            return t
        at = names.index("k_pages" if name == "v_pages" else name)
        return ways[(at + turn) % (3 if t.dim() > 1 else 2)](t)

    return call.map(change)


LAID_OUT = [k for k in KERNELS if k.name != "flex" and not k.op.startswith("plan_")]


@pytest.mark.parametrize("kernel", LAID_OUT, ids=named)
def test_any_layout(kernel: Kernel) -> None:
    """Right, or refused by the name of the layout, without a plan then."""
    ran = set()
    with VENDORS[kernel.name].running():
        call = telling_calls(kernel)[0]
        for turn in range(6):
            try:
                figures = check_kernel(kernel, laid_otherwise(call, turn))
            except InvalidInput as error:
                assert "16" in str(error), "rows are loaded 16 bytes at a time"
                continue
            assert {r.field for r in figures.refused} <= OF_LAYOUT, figures
            assert figures.worst <= 1.0, figures
            if not figures.refused:
                ran.add(turn)
    assert ran & {0, 1, 2}, "no layout is taken"


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("name", [*OF_TORCH, "fa4"])
def test_a_training_step(name: str, packed: bool) -> None:
    """Two calls of the vendor, and the gradients of formulas."""
    op = "varlen_attention" if packed else "attention"
    if name not in kernels_of(f"{op}_backward"):
        pytest.skip("no kernel of packed calls")
    sinks = torch.zeros(8, requires_grad=True) if "sinks" in kernels_of(op)[name].takes else None
    tensors = [torch.randn(2, 6, n, 64, dtype=BF16, requires_grad=True) for n in (8, 2, 2)]
    leaves, found = [x for x in (*tensors, sinks) if x is not None], []
    cu = torch.tensor([0, 6, 12], dtype=torch.int32)
    for kernel in (name, "reference"):
        chosen = dict.fromkeys((op, f"{op}_backward"), kernel)
        with VENDORS[name].running() as calls, attnops.use(kernel=chosen):
            if packed:
                q, k, v = (x.flatten(0, 1) for x in tensors)
                out = attnops.varlen_attention(q, k, v, cu, cu, max_seqlen_q=6, max_seqlen_k=6, causal=True, padded=False, sinks=sinks)
            else:
                out = attnops.attention(*tensors, causal=True, sinks=sinks)
            found.append(torch.autograd.grad(out.sum(), leaves))  # a gradient without strides
            assert len(calls) == 2 * (kernel == name)
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2)
