"""Floating-point operations of calls, for `torch.utils.flop_counter.FlopCounterMode`.

An op counts the products of its record (`Op.flops`), as torch counts those of its own ops. Lengths
of requests are data, which no formula
reads: a query is counted with as many keys as the shapes allow, whatever mask, window or length
leaves of them.
"""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType
from typing import Any

from attnops.core.arguments import evaluate
from attnops.core.kernel import Kernel, on_register
from attnops.core.op import OPS, Op
from attnops.core.record import sizes_of
from attnops.on_import import once_imported

COUNTER = "torch.utils.flop_counter"


def flops_of(op: Op, *args: Any, out_val: Any = None, **kwargs: Any) -> Any:
    """The operations of a call with these arguments, an upper bound where lengths are data.
    out_val: the results, which do not matter."""
    return evaluate(op.flops, sizes_of(op.call(*args, **kwargs)))


def register_formulas(counter: ModuleType) -> None:
    """Give torch's counter a formula for every op that has one."""
    for op in OPS.values():
        _register(counter, op)


def _register(counter: ModuleType, op: Op) -> None:
    if op.flops and op.packet not in counter.flop_registry:
        counter.register_flop_formula(op.packet, get_raw=True)(partial(flops_of, op))


def _of_op(kernel: Kernel) -> None:
    """Give torch's counter the formula of the kernel's op again.

    A kernel is one more overload of its op, and torch hashes an op by its overloads: the counter's
    dict no longer finds what it has, or finds it by chance, until it grows. So all its keys are
    hashed anew first.
    """
    op = OPS.get(kernel.op)
    if op is None or COUNTER not in sys.modules:
        return
    counter = sys.modules[COUNTER]
    formulas = list(counter.flop_registry.items())
    counter.flop_registry.clear()
    counter.flop_registry.update(formulas)
    _register(counter, op)


def install() -> None:
    """Register the formulas with torch's counter, now or when it is imported: it imports Triton,
    and no call of an op needs it."""
    if COUNTER in sys.modules:
        register_formulas(sys.modules[COUNTER])
    else:
        once_imported(COUNTER, register_formulas)
    on_register(_of_op, lambda kernel: None)
