"""Every kernel that has a stand-in keeps its op's contract: on the grid, under opcheck, compiled,
in any layout, in training."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import attnops
from attnops.core.errors import InvalidInput
from attnops.core.kernel import Kernel, all_kernels, kernels_of
from attnops.core.problem import Problem, altered
from attnops.ops import OPS
from attnops.ops.attention.cases import FEATURES, VARLEN, VARLEN_SHAPES
from attnops.ops.latent.cases import DEEPSEEK
from attnops.ops.pages.cases import PAGED, PAGED_SHAPES
from attnops.testing import CASES, Call, Case, Features, Source, check_kernel, make_call
from attnops.testing.calls import equip
from tests.checks import right
from tests.lowering.models import compiled_code, kernel_calls
from tests.ops.test_opcheck import check as opcheck, telling
from tests.standins.vendors import VENDORS, WIDE, narrow
from tests.triton.test_numerics import strided, transposed

F16, BF16, F32, E4M3 = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn

GRADIENTS = ("attention_backward", "varlen_attention_backward")
NARROWED = ("attention", "varlen_attention", "paged_attention", *GRADIENTS)
LATENT = ("mla_attention", "sparse_mla_attention")
FITTED = ("flashinfer", "xqa", "trtllm")
"""They take few head dims and page sizes: their grid has the rows and features of the op's, in
sizes that they take."""

FOREIGN = [k for k in all_kernels() if k.name in VENDORS]
KERNELS = [k for k in FOREIGN if k.name != "flex" or k.op in GRADIENTS]
SWEEPS = {"cudnn": 1, "mem_efficient": 1, "flex": 27, "sgl_sparse": 1, "flashinfer_rope": 1}
ARCHS = {"sparse_mla_attention": (90, 100), "flashinfer": (80, 90), "fa4": (90, 100)}
SHARE = {"trtllm_mla": 0.125}
"""Of its budget, what a stand-in of one precise sum takes."""


def named(kernel: Kernel) -> str:
    return f"{kernel.op}-{kernel.name}"


# Those of more than a tile of queries, which have kernels of their own.
LONG: dict[str, Any] = {"extend": ((40, 0, 70, 1), (45, 3, 90, 30), 16)}
LONG_PACKED: dict[str, Any] = {"longer": ((140, 3), (200, 130)), "tall": ((200, 90), (70, 80))}
ROWS = {
    "paged_attention": {"main": PAGED, **PAGED_SHAPES, **LONG},
    "varlen_attention": {"main": VARLEN, **VARLEN_SHAPES, **LONG_PACKED},
}
WHOLE = ("main", "decode", "extend", "longer")
"""Rows that are tried with every feature, the others with those that tell most."""


def fitted(kernel: Kernel) -> list[Case]:
    """Cases in sizes that the kernel takes."""
    paged, cases = kernel.op == "paged_attention", []

    def add(label: str, row: tuple[Any, ...], f: Features) -> None:
        sized = (*row[:2], 16, *row[3:]) if paged and kernel.name != "flashinfer" else row
        cases.append(Case(kernel.op, label, lambda source: laid_in(kernel.op, source, sized, f)))

    for shape, row in ROWS[kernel.op].items():
        for name in (
            FEATURES if shape in WHOLE else ("plain", "lse_sinks", "lse_causal", "causal_window")
        ):
            f = FEATURES[name]
            f = replace(
                f,
                head_dim=64 if paged else 128,
                v_head_dim=None,
                dtype=f.dtype if f.dtype in (F16, BF16) else BF16,
            )
            add(f"{shape}-{name}", row, f)
    for d, dv in ((128, 128), (256, 256), (192, 128)):
        dims = Features(
            dtype=BF16, head_dim=d, v_head_dim=dv, q_heads=4, kv_heads=4, causal=True, lse=True
        )
        rows = {**LONG, "decode": PAGED_SHAPES["decode"]} if paged else LONG_PACKED
        for shape, row in rows.items():
            add(f"{shape}-{d}-{dv}", row, dims)
    return cases


def laid_in(op: str, source: Source, row: tuple[Any, ...], f: Features) -> Call:
    """A call of a row of the grid, whose last entry may be what is given by name."""
    more = row[-1] if isinstance(row[-1], dict) else {}
    sizes = row[:-1] if more else row
    return make_call(op, source, *sizes, f, **more)


def gridded(kernel: Kernel) -> list[Case]:
    if kernel.op.startswith("plan_"):
        return []
    if kernel.name in FITTED:
        return fitted(kernel)
    every = kernel.op not in LATENT
    return [c for c in CASES[kernel.op] if every or c.label.startswith("deepseek")]


def usual(kernel: Kernel, case: Case) -> Call:
    """The call, for a kernel of half precision in bfloat16."""
    as_it_is = kernel.op not in NARROWED or kernel.name in ("flex", *FITTED)
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
    pytest.param(
        k, c, arch, id=f"{k.name}-{c}-sm{arch}", marks=pytest.mark.sweep(SWEEPS.get(k.name, 3))
    )
    for k in KERNELS
    for c in gridded(k)
    for arch in ARCHS.get(k.op, ARCHS.get(k.name, (VENDORS[k.name].arch,)))
]


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
LAID_OUT = [k for k in KERNELS if k.name != "flex" and not k.op.startswith("plan_")]
LENGTHS = {
    "paged_attention": ((130, 1, 40), (300, 129, 40)),
    "mla_attention": ((25, 0, 1, 3), (300, 9, 65, 40)),
}
STALE = [("paged_attention", n) for n in ("fa3", "fa4", "flashinfer")]
STALE += [("mla_attention", n) for n in ("fa3", "flashinfer_mla_fa2", "flashinfer_mla_fa3")]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("many_heads", [False, True])
@pytest.mark.parametrize("page", [1, 16, 64, 192, 256])
@pytest.mark.parametrize(("op", "name"), STALE)
def test_stale_pages_and_long_extends(op: str, name: str, page: int, many_heads: bool) -> None:
    """More queries than a tile has, and pages with NaN past a request's end."""
    plain = Features(
        dtype=BF16, head_dim=64, q_heads=8, kv_heads=1 if many_heads else 4, causal=True, lse=True
    )
    f = replace(DEEPSEEK, q_heads=128 if many_heads else 16, lse=True) if op in LATENT else plain
    with VENDORS[name].running():
        right(kernels_of(op)[name], make_call(op, Source(1), *LENGTHS[op], page, f))


BLIND: dict[str, tuple[Any, ...]] = {
    "attention": (2, 7, 4),
    "varlen_attention": ((5, 3, 2), (2, 0, 4)),
    "paged_attention": ((3, 1), (3, 0), 4),
    "mla_attention": ((4, 2), (3, 0), 64),
}


@pytest.mark.parametrize("sinks", [F32, BF16], ids=str)
@pytest.mark.parametrize(
    "kernel",
    [k for k in KERNELS if k.op in BLIND and {"sinks", "lse", "return_lse"} & k.takes > {"sinks"}],
    ids=named,
)
def test_queries_without_keys_have_the_sinks_lse(kernel: Kernel, sinks: torch.dtype) -> None:
    plain = Features(dtype=BF16, head_dim=64, causal=True)
    call = make_call(
        kernel.op,
        Source(2),
        *BLIND[kernel.op],
        replace(DEEPSEEK if kernel.op in LATENT else plain, sinks=sinks, lse=True),
    )
    with VENDORS[kernel.name].running():
        figures = check_kernel(kernel, call)
    assert figures.worst <= 1.0
    assert {r.field for r in figures.refused} <= {
        "lse",
        "sinks_dtype",
        "page_size",
        "head_dim, v_head_dim",
    }


EMPTY = ("no_", "empty", "nothing")
"""In labels of cases in which no kernel runs."""


def telling_calls(kernel: Kernel) -> list[Call]:
    """Two that the kernel takes on the machine that is pretended."""
    cases = [
        c for c in gridded(kernel) or CASES[kernel.op] if not any(word in c.label for word in EMPTY)
    ]
    made = {c: usual(kernel, c) for c in cases}
    taken = [c for c in cases if not kernel.refusals(serviced(kernel, made[c].problem))]
    return [made[c] for c in telling(taken, 2)]


SLOW = {"trtllm_mla": pytest.mark.full}
OPCHECKED = [
    pytest.param(k, id=named(k), marks=SLOW.get(k.name, ()))
    for k in KERNELS
    if k.name not in OF_TORCH
]


@pytest.mark.parametrize("nth", [0, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("kernel", OPCHECKED)
def test_opcheck(kernel: Kernel, nth: int) -> None:
    with VENDORS[kernel.name].running() as calls:
        call = equip(kernel, telling_calls(kernel)[nth])
        assert not kernel.refusals(call.problem)
        opcheck(kernel.op, kernel.name, call)
        assert calls, "no foreign op was called"


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "kernel", [k for k in LAID_OUT if k.op not in GRADIENTS and k.name not in OF_TORCH], ids=named
)
def test_compiled(kernel: Kernel) -> None:
    """Generated code calls the kernel by its name, and gives what eager code gives."""
    with VENDORS[kernel.name].running(), torch.no_grad():
        call = equip(kernel, telling_calls(kernel)[0])
        policy = f"kernel={kernel.op}:{kernel.name}"

        def run(args: tuple[Any, ...], more: dict[str, Any]) -> Any:
            found = OPS[kernel.op].packet.default(*args, **more, policy=policy)
            return more["output"] if found is None else found

        # Some ops change a state that they read.
        other = call.map(lambda _, t: t.clone())
        want = run(other.args, other.kwargs)
        compiled = torch.compile(run, fullgraph=True)
        got, code = compiled_code(lambda: compiled(call.args, call.kwargs))
    assert f"{kernel.op}.{kernel.name}" in kernel_calls(code)
    torch.testing.assert_close(got, want, equal_nan=True)


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
    """Every tensor in another layout, and in another one a turn later; pages of keys and values
    alike."""
    ways, names = (STRIDED, UNALIGNED)[turn // 3], list(call.tensors())

    def change(name: str, t: Tensor) -> Tensor:
        if t.numel() == 1 or (t.dim() == 1 and turn >= 3):
            return t
        at = names.index("k_pages" if name == "v_pages" else name)
        return ways[(at + turn) % (3 if t.dim() > 1 else 2)](t)

    return call.map(change)


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
@pytest.mark.parametrize("name", [*OF_TORCH, "fa4", "flashinfer", "trtllm"])
def test_a_training_step(name: str, packed: bool) -> None:
    """A call of the vendor each way, and the gradients of formulas."""
    op = "varlen_attention" if packed else "attention"
    own = name in kernels_of(f"{op}_backward")
    if not own and (name in OF_TORCH or name not in kernels_of(op)):
        pytest.skip("it has no kernel of such calls")
    leaves = [torch.randn(2, 6, n, 128, dtype=BF16, requires_grad=True) for n in (8, 2, 2)]
    leaves += [torch.zeros(8, requires_grad=True)] * ("sinks" in kernels_of(op)[name].takes)
    cu, found = torch.tensor([0, 6, 12], dtype=torch.int32), []
    for kernel in (name, "reference"):
        chosen = {op: kernel, f"{op}_backward": kernel if own else "reference"}
        with VENDORS[name].running() as calls, attnops.use(kernel=chosen):
            given: dict[str, Any] = {"causal": True, "sinks": leaves[3] if leaves[3:] else None}
            if packed:
                q, k, v = (x.flatten(0, 1) for x in leaves[:3])
                out = attnops.varlen_attention(
                    q, k, v, cu, cu, max_seqlen_q=6, max_seqlen_k=6, padded=False, **given
                )
            else:
                out = attnops.attention(*leaves[:3], **given)
            found.append(torch.autograd.grad(out.sum(), leaves))  # a gradient without strides
            assert len(calls) == 2 if own and kernel == name else bool(calls) == (kernel == name)
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2)
