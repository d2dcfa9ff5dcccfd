"""What several files of GPU tests do with a kernel: skip, check, count, capture, and list what the
device runs."""

import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from attnops.core.kernel import Kernel
from attnops.core.problem import Target
from attnops.testing import Call, Mismatch, check_kernel, refusals

LIMIT = 120
"""Seconds after which a test no longer waits for a thread."""


def need(kernel: Kernel, call: Call | None = None) -> None:
    """Skip where the machine lacks what the kernel is made of, or where the kernel refuses the
    call."""
    if (
        why := kernel.absences(Target.of(torch.device("cuda")))
        if call is None
        else refusals(kernel, call)
    ):
        pytest.skip(f"{kernel.op}.{kernel.name}: {'; '.join(map(str, why))[:300]}")


def figures_of(
    kernel: Kernel, calls: Iterable[tuple[str, Callable[[], Call]]], refused: list[str]
) -> dict[str, Any]:
    """The figures over calls by label. A mismatch is counted, and the others run all the same.

    refused: the refusals so far. Where nothing ran, the skip tells the first.
    """
    wrong, worst, ran = list[str](), 0.0, 0
    for label, make in calls:
        try:
            figures = check_kernel(kernel, make())
        except Mismatch as mismatch:
            wrong.append(f"{label}: {mismatch}")
            continue
        except torch.OutOfMemoryError:
            wrong.append(f"{label}: out of memory")
            torch.cuda.empty_cache()
            continue
        if figures.refused:
            refused.append(f"{label}: {figures}")
        else:
            ran, worst = ran + 1, max(worst, figures.worst)
    done = {
        "cases": ran,
        "refused": len(refused),
        "wrong": len(wrong),
        "worst_share_of_budget": round(worst, 4),
    }
    if wrong:
        return {**done, "first_wrong": wrong[0][:300]}
    return {**done, "why_refused": refused[0][:300]} if refused and not ran else done


def judge(figures: dict[str, Any]) -> None:
    """Fail where a case was wrong, and skip where none ran."""
    assert not figures["wrong"], figures
    if not figures["cases"]:
        pytest.skip(
            "takes no case on this GPU: "
            f"{figures.get('why_refused', 'there are fewer cases than shares')}"
        )


def captured(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of `run`, and what that gave: after two calls, since what a first call compiles
    or allocates must not be captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out


def kernels_in(run: Callable[[], Any]) -> list[str]:
    """The names of the device's kernels, memsets and copies of one call."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    names = [
        event.name for event in profile.events() or () if str(event.device_type).endswith("CUDA")
    ]
    if not names:
        pytest.skip("the profiler sees no device kernel here")
    return names


def together(runs: Iterable[Callable[[], None]]) -> None:
    """Run these in threads; raises the first error of any."""
    errors: list[BaseException] = []

    def guarded(one: Callable[[], None]) -> None:
        try:
            one()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(one,), daemon=True) for one in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert not any(thread.is_alive() for thread in threads), "a thread waits for ever"
    if errors:
        raise errors[0]
