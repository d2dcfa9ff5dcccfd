"""What a choice tells the user beside the kernel: bits that may differ, and torch's own ops where a
package would bring a kernel."""

from __future__ import annotations

import warnings

from attnops.core.errors import NotFast, warn_once
from attnops.core.kernel import Kernel, kernels_of
from attnops.core.problem import Problem, pretended

UNREPEATED = (
    "{} may give other bits at the next run: no kernel that repeats them takes this call, "
    "and torch.use_deterministic_algorithms(True, warn_only=True) is in force"
)


def tell(kernel: Kernel, problem: Problem) -> None:
    """Warn of a kernel that is chosen for a call; of a stopgap once per process and op."""
    if kernel.unrepeated(problem):
        text = UNREPEATED.format(f"{kernel.op}.{kernel.name}")
        warnings.warn(text, UserWarning, stacklevel=3)
    if pretended() is None and (better := installs(kernel, problem)):
        text = (
            f"attnops: {kernel.op} runs as torch's own ops on {problem.target.title} (kernel "
            f"{kernel.name}), which takes several times as long as another kernel: {better}"
        )
        warn_once(NotFast, kernel.op, text)


def installs(kernel: Kernel, problem: Problem) -> str:
    """What to install on this machine so that a faster kernel takes a call of a stopgap; "" where
    no package is missing."""
    if not kernel.stopgap:
        return ""
    others = [k for k in kernels_of(problem.op).values() if not (k.judge or k.stopgap)]
    absent = {k.name: k.absences(problem.target) for k in others if not k.unmet(problem)}
    if not absent or not all(absent.values()):
        return ""
    return "; ".join(
        f"for {name}: {', '.join(dict.fromkeys(reason.want for reason in reasons))}"
        for name, reasons in absent.items()
    )
