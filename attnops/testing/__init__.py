"""Tests of a kernel against its contract, for built-in and third-party kernels. Needs torch alone.

`for case in CASES[kernel.op]: print(check_kernel(kernel, case.call(seed=0, device="cuda")))` is the
whole of a numerics test.
"""

from attnops.ops.case_data import Features, Pages, Source
from attnops.testing.calls import Call, equip, equip_as_used, planned, with_device_plan
from attnops.testing.cases import CASES, Case
from attnops.testing.check import Figures, Mismatch, check_kernel, oracle, refusals
from attnops.testing.error_bounds import allowance
from attnops.testing.made_calls import gradient_call, make_call

__all__ = [
    "CASES",
    "Call",
    "Case",
    "Features",
    "Figures",
    "Mismatch",
    "Pages",
    "Source",
    "allowance",
    "check_kernel",
    "equip",
    "equip_as_used",
    "gradient_call",
    "make_call",
    "oracle",
    "planned",
    "refusals",
    "with_device_plan",
]
