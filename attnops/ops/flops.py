"""Floating-point operations of calls, for `torch.utils.flop_counter.FlopCounterMode`.

An op counts the products of its record (`Op.flops`), as torch counts those of its own ops. Lengths of requests are data, which no formula
reads: a query is counted with as many keys as the shapes allow, whatever mask, window or length leaves of them.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from attnops.call import sizes_of
from attnops.layout import evaluate
from attnops.ops.op import OPS, Op

COUNTER = "torch.utils.flop_counter"


def flops_of(op: Op, *args: Any, out_val: Any = None, **kwargs: Any) -> Any:
    """The operations of a call with these arguments, an upper bound where lengths are data. out_val: the results, which do not matter."""
    return evaluate(op.flops, sizes_of(op.call(*args, **kwargs)))


def register_formulas(counter: ModuleType) -> None:
    """Give torch's counter a formula for every op that has one."""
    for op in OPS.values():
        if op.flops and op.packet not in counter.flop_registry:
            counter.register_flop_formula(op.packet, get_raw=True)(partial(flops_of, op))


class _OnImport(MetaPathFinder):
    """Registers the formulas once torch's counter is imported."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                register_formulas(module)

            vars(spec.loader)["exec_module"] = exec_module
        return spec


def install() -> None:
    """Register the formulas with torch's counter, now or when it is imported: it imports Triton, and no call of an op needs it."""
    if COUNTER in sys.modules:
        register_formulas(sys.modules[COUNTER])
    else:
        sys.meta_path.insert(0, _OnImport())
