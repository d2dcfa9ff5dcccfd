"""Tests of a kernel against its contract, for built-in and third-party kernels. Needs torch alone.

`for case in CASES[kernel.op]: print(check_kernel(kernel, case.call(seed=0, device="cuda")))` is the whole of a numerics test.
"""

from attnops.testing.calls import Call, equip, equip_as_used, planned, with_device_plan
from attnops.testing.case import Case, Features, Source
from attnops.testing.cases import CASES
from attnops.testing.check import Figures, Mismatch, check_kernel, oracle, refusals
from attnops.testing.error_bounds import allowance

__all__ = [
    "CASES", "Call", "Case", "Features", "Figures", "Mismatch", "Source", "allowance", "check_kernel", "equip", "equip_as_used", "oracle",
    "planned", "refusals", "with_device_plan",
]  # fmt: skip
