"""Every kernel on a real GPU: numerics over the problem grid, opcheck, and proof that it may live
in a CUDA graph."""

import random
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from attnops.core.kernel import Capture, Kernel, all_kernels, kernels_of
from attnops.core.problem import Target
from attnops.core.record import changed, split
from attnops.ops import OPS
from attnops.testing import CASES, Call, Case, Source, check_kernel, refusals
from attnops.testing.calls import equip
from tests import faint
from tests.gpu.flashinfer_modules import is_built as module_is_built
from tests.gpu.grid import Share, share_of, shares
from tests.gpu.helpers import captured, figures_of, judge
from tests.gpu.wide import WIDE, DeviceSource

KERNELS = [pytest.param(k, id=f"{k.op}.{k.name}") for k in all_kernels()]


def spread(kernels: Iterable[Kernel]) -> list[Any]:
    """Kernel, part and parts: one test a kernel, several where each case is compiled."""
    out = []
    for kernel in kernels:
        parts, name = shares(kernel), f"{kernel.op}.{kernel.name}"
        out += [
            pytest.param(kernel, at, parts, id=f"{name}-{at + 1}of{parts}" if parts > 1 else name)
            for at in range(parts)
        ]
    return out


def run_share(
    kernel: Kernel,
    grid: str,
    cases: tuple[Case, ...],
    source: Any,
    part: int,
    parts: int,
    found: dict[str, Any],
) -> None:
    """Run one share of the cases. source: makes the Source of a seed."""
    name = f"{kernel.op}.{kernel.name}"
    if absent := kernel.absences(Target.of(torch.device("cuda", 0))):
        share = Share(
            refused=[f"{name}: {'; '.join(map(str, absent))}"] * (0 if part else len(cases))
        )
    else:
        share = share_of(
            kernel,
            cases,
            source,
            part,
            parts,
            module_is_built if kernel.name == "flashinfer" else lambda *_: True,
        )
    calls = [(str(case), partial(case.build, source(seed))) for seed, case in share.cases]
    done = figures_of(kernel, calls, share.refused)
    found[grid] = {name: {**done, "left_out": sum(map(len, share.left_out.values()))}}
    if share.left_out:
        found["left_out_cases"] = {f"{grid} {name}": share.left_out}
    judge(done)


@pytest.mark.parametrize(("kernel", "part", "parts"), spread(all_kernels()))
def test_numerics(kernel: Kernel, part: int, parts: int, found: dict[str, Any]) -> None:
    run_share(
        kernel, "numerics", CASES[kernel.op], lambda seed: Source(seed, "cuda"), part, parts, found
    )


# `reference` is what the oracle runs, in float64.
@pytest.mark.parametrize(
    ("kernel", "part", "parts"),
    spread(k for k in all_kernels() if k.op in WIDE and k.name != "reference"),
)
def test_numerics_at_size(kernel: Kernel, part: int, parts: int, found: dict[str, Any]) -> None:
    run_share(
        kernel,
        "numerics_at_size",
        WIDE[kernel.op],
        lambda seed: DeviceSource(seed, "cuda"),
        part,
        parts,
        found,
    )


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_opcheck_of_the_op(op: Any, found: dict[str, Any]) -> None:
    opcheck_all(op, None, found)


@pytest.mark.parametrize("kernel", KERNELS)
def test_opcheck(kernel: Kernel, found: dict[str, Any]) -> None:
    opcheck_all(OPS[kernel.op], kernel, found)


BLIND = "not implemented for 'Float8"
"""What opcheck's own comparison says of float8 results; check_kernel looks for undeclared writes
and aliasing too."""


def opcheck_all(op: Any, kernel: Kernel | None, found: dict[str, Any]) -> None:
    """opcheck of the op or of a kernel's overload on the first two cases it takes."""
    name, done, why = "default" if kernel is None else kernel.name, 0, ""
    for case in CASES[op.name]:
        call = case.call(seed=3, device="cuda")
        # What the dispatcher is called with is checked; without any kernel for it there is no
        # result to check.
        takers = [kernel] if kernel is not None else list(kernels_of(op.name).values())
        if all(refused := [refusals(k, call) for k in takers]):
            why = "; ".join(map(str, refused[0]))
            continue
        if kernel is not None:
            call = equip(kernel, call)
        with torch.no_grad():
            checked = torch.library.opcheck(
                getattr(op.packet, name), call.args, call.kwargs, raise_exception=False
            )
        if kernel is not None and BLIND in str(checked["test_schema"]):
            check_kernel(kernel, call)
            checked["test_schema"] = "SUCCESS"
        assert set(checked.values()) == {"SUCCESS"}, f"{case}: {checked}"
        done += 1
        if done == 2:
            break
    found["opcheck"] = {f"{op.name}.{name}": done}
    if not done:
        pytest.skip(f"takes no case on this GPU: {why}")


def alike(one: Call, two: Call) -> bool:
    """Have they tensors of one form, and are all other arguments equal?"""
    a, b = (
        {n: (x.shape, x.stride(), x.dtype) for n, x in call.tensors().items()}
        for call in (one, two)
    )
    return a == b and all(one.kwargs[n] == two.kwargs.get(n) for n in one.kwargs.keys() - a.keys())


def tensors_of(out: Any, call: Call) -> list[torch.Tensor]:
    """What a call returned, and what it wrote that means something afterwards."""
    held = (out, [call.arguments[n] for n in call.mutated if n != "workspace"])
    return [t for t in pytree.tree_leaves(held) if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("kernel", KERNELS)
def test_replays_follow_their_inputs(kernel: Kernel, found: dict[str, Any]) -> None:
    """Capture, change every input (lengths, tables, contents), replay, compare with eager."""
    if kernel.capture is not Capture.WHOLE:
        pytest.skip("declared uncapturable")
    proven = 0
    for case in CASES[kernel.op]:
        held, later = (equip(kernel, case.call(seed=seed, device="cuda")) for seed in (11, 12))
        if refusals(kernel, held) or refusals(kernel, later) or not alike(held, later):
            continue
        eager = later.map(lambda _, t: t.clone())
        want = tensors_of(kernel.run(eager.record), eager)
        graph, out = captured(partial(kernel.run, held.record))
        for name, tensor in held.tensors().items():
            tensor.copy_(later.tensors()[name])
        graph.replay()
        torch.cuda.synchronize()
        for a, b in zip(tensors_of(out, held), want, strict=True):
            torch.testing.assert_close(
                a.float(),
                b.float(),
                rtol=1e-3,
                atol=1e-3,
                equal_nan=True,
                msg=lambda m, c=case: f"{c}: {m}",
            )
        proven += 1
        if proven == 6:
            break
    found["replay"] = {f"{kernel.op}.{kernel.name}": proven}
    if not proven:
        pytest.skip("no pair of cases with equal shapes on this GPU")


@pytest.mark.parametrize(
    "kernel", [pytest.param(k, id=f"{k.op}.{k.name}") for k in all_kernels() if k.fused]
)
def test_compiled_in_place_keeps_the_contract(kernel: Kernel) -> None:
    """What Inductor makes of torch ops that are lowered in place; integers must be the same to the
    last one."""
    packet, policy = OPS[kernel.op].packet.default, f"kernel={kernel.op}:{kernel.name}"

    def run(call: Any) -> Any:
        return torch.compile(lambda a, k: packet(*a, **k), fullgraph=True, dynamic=False)(
            *split(changed(call, policy=policy))
        )

    compiled = replace(kernel, run=run, contract=2)
    cases = [c for c in CASES[kernel.op] if not refusals(kernel, c.build(Source(0, "cuda")))]
    if not cases:
        pytest.skip("takes no case on this GPU")
    for seed, case in enumerate(random.Random(0).sample(cases, min(2, len(cases)))):
        torch._dynamo.reset()
        with torch.no_grad():
            check_kernel(compiled, case.build(Source(seed, "cuda")))


@pytest.mark.parametrize(("op", "name", "way", "dtype"), faint.runs())
def test_a_faint_row_harms_no_other(op: str, name: str, way: str, dtype: torch.dtype) -> None:
    """By every kernel that the machine has: the calls of tests/test_faint.py."""
    faint.checked(kernels_of(op)[name], way, dtype, "cuda")
