"""Every kernel on a real GPU: numerics over the problem grid, opcheck, and proof that it may live in a CUDA graph."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from attnops.core.kernel import Capture, Kernel, all_kernels, kernels_of
from attnops.core.problem import Target
from attnops.ops import OPS
from attnops.testing import CASES, Case, Mismatch, Source, check_kernel, refusals
from attnops.testing.calls import equip
from tests.gpu.flashinfer_modules import is_built as module_is_built
from tests.gpu.grid import Share, share_of, shares
from tests.gpu.wide import WIDE, DeviceSource

KERNELS = [pytest.param(k, id=f"{k.op}.{k.name}") for k in all_kernels()]


def spread(kernels: Iterable[Kernel]) -> list[Any]:
    """Kernel, part and parts: one test a kernel, several where each case is compiled."""
    out = []
    for kernel in kernels:
        parts, name = shares(kernel), f"{kernel.op}.{kernel.name}"
        out += [pytest.param(kernel, at, parts, id=f"{name}-{at + 1}of{parts}" if parts > 1 else name) for at in range(parts)]
    return out


def run_share(kernel: Kernel, grid: str, cases: tuple[Case, ...], source: Any, part: int, parts: int, found: dict[str, Any]) -> None:
    """Run one share of the cases through `check_kernel`; a mismatch fails when all have run. source: makes the Source of a seed."""
    if absent := kernel.absences(Target.of(torch.device("cuda", 0))):
        share = Share(refused=[f"{kernel.op}.{kernel.name}: {'; '.join(map(str, absent))}"] * (0 if part else len(cases)))
    else:
        share = share_of(kernel, cases, source, part, parts, module_is_built if kernel.name == "flashinfer" else lambda *_: True)
    wrong, refused, worst, ran = [], share.refused, 0.0, 0
    for seed, case in share.cases:
        try:
            figures = check_kernel(kernel, case.build(source(seed)))
        except Mismatch as mismatch:
            wrong.append(f"{case}: {mismatch}")
            continue
        except torch.OutOfMemoryError:
            wrong.append(f"{case}: out of memory")
            torch.cuda.empty_cache()
            continue
        if figures.refused:
            refused.append(f"{case}: {figures}")
        else:
            ran, worst = ran + 1, max(worst, figures.worst)
    name, left_out = f"{kernel.op}.{kernel.name}", sum(map(len, share.left_out.values()))
    done: dict[str, Any] = {"cases": ran, "refused": len(refused)}
    done |= {"left_out": left_out, "wrong": len(wrong), "worst_share_of_budget": round(worst, 4)}
    done |= {"first_wrong": wrong[0][:300]} if wrong else {"why_refused": refused[0][:300]} if refused and not ran else {}
    found.setdefault(grid, {})[name] = done
    if share.left_out:
        found.setdefault("left_out_cases", {})[f"{grid} {name}"] = share.left_out
    assert not wrong, done
    if not ran:
        why = "; ".join(map(str, absent)) or (refused[0] if refused else "fewer cases than shares")
        pytest.skip(f"takes no case on this GPU: {why[:300]}")


@pytest.mark.parametrize(("kernel", "part", "parts"), spread(all_kernels()))
def test_numerics(kernel: Kernel, part: int, parts: int, found: dict[str, Any]) -> None:
    run_share(kernel, "numerics", CASES[kernel.op], lambda seed: Source(seed, "cuda"), part, parts, found)


# `reference` is what the oracle runs, in float64.
@pytest.mark.parametrize(("kernel", "part", "parts"), spread(k for k in all_kernels() if k.op in WIDE and k.name != "reference"))
def test_numerics_at_size(kernel: Kernel, part: int, parts: int, found: dict[str, Any]) -> None:
    run_share(kernel, "numerics_at_size", WIDE[kernel.op], lambda seed: DeviceSource(seed, "cuda"), part, parts, found)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_opcheck_of_the_op(op: Any, found: dict[str, Any]) -> None:
    opcheck_all(op, None, found)


@pytest.mark.parametrize("kernel", KERNELS)
def test_opcheck(kernel: Kernel, found: dict[str, Any]) -> None:
    opcheck_all(OPS[kernel.op], kernel, found)


BLIND = "not implemented for 'Float8"
"""What opcheck's own comparison says of float8 results; check_kernel looks for undeclared writes and aliasing too."""


def opcheck_all(op: Any, kernel: Kernel | None, found: dict[str, Any]) -> None:
    """opcheck of the op or of a kernel's overload on the first two cases it takes."""
    name, done, why = "default" if kernel is None else kernel.name, 0, ""
    for case in CASES[op.name]:
        call = case.call(seed=3, device="cuda")
        # What the dispatcher is called with is checked; without any kernel for it there is no result to check.
        takers = [kernel] if kernel is not None else list(kernels_of(op.name).values())
        if all(refused := [refusals(k, call) for k in takers]):
            why = "; ".join(map(str, refused[0]))
            continue
        if kernel is not None:
            call = equip(kernel, call)
        with torch.no_grad():
            checked = torch.library.opcheck(getattr(op.packet, name), call.args, call.kwargs, raise_exception=False)
        if kernel is not None and BLIND in str(checked["test_schema"]):
            check_kernel(kernel, call)
            checked["test_schema"] = "SUCCESS"
        assert set(checked.values()) == {"SUCCESS"}, f"{case}: {checked}"
        done += 1
        if done == 2:
            break
    found.setdefault("opcheck", {})[f"{op.name}.{name}"] = done
    if not done:
        pytest.skip(f"takes no case on this GPU: {why}")


def same_shapes(a: Any, b: Any) -> bool:
    one, two = a.tensors(), b.tensors()
    return one.keys() == two.keys() and all(
        (x.shape, x.stride(), x.dtype) == (two[n].shape, two[n].stride(), two[n].dtype) for n, x in one.items()
    )


def fresh(kernel: Kernel, call: Any) -> list[torch.Tensor]:
    """The results of an eager call, and the tensors it writes."""
    out = kernel.run(call.record)
    return [t.clone() for t in pytree.tree_leaves((out, written(call))) if isinstance(t, torch.Tensor)]


def written(call: Any) -> list[torch.Tensor]:
    """What a call writes that means something afterwards."""
    return [call.arguments[n] for n in call.mutated if n != "workspace"]


@pytest.mark.parametrize("kernel", KERNELS)
def test_replays_follow_their_inputs(kernel: Kernel, found: dict[str, Any]) -> None:
    """Capture, change every input (lengths, tables, contents), replay, compare with eager."""
    if kernel.capture is not Capture.WHOLE:
        pytest.skip("declared uncapturable")
    proven = 0
    for case in CASES[kernel.op]:
        captured, later = (equip(kernel, case.call(seed=seed, device="cuda")) for seed in (11, 12))
        if refusals(kernel, captured) or refusals(kernel, later) or not same_shapes(captured, later):
            continue
        if any(captured.kwargs.get(n) != later.kwargs.get(n) for n in captured.kwargs if not isinstance(captured.kwargs[n], torch.Tensor)):
            continue
        want = fresh(kernel, later.map(lambda _, t: t.clone()))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # what a kernel compiles or allocates at its first call must not be captured
            for _ in range(2):
                kernel.run(captured.record)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = kernel.run(captured.record)
        for name, tensor in captured.tensors().items():
            tensor.copy_(later.tensors()[name])
        graph.replay()
        torch.cuda.synchronize()
        got = [t for t in pytree.tree_leaves((out, written(captured))) if isinstance(t, torch.Tensor)]
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a.float(), b.float(), rtol=1e-3, atol=1e-3, equal_nan=True, msg=lambda m, c=case: f"{c}: {m}")
        proven += 1
        if proven == 6:
            break
    found.setdefault("replay", {})[f"{kernel.op}.{kernel.name}"] = proven
    if not proven:
        pytest.skip("no pair of cases with equal shapes on this GPU")
