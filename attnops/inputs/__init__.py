"""Calls of ops as data, their inputs, and the error allowed to their results. `build` makes the calls that are timed."""

from attnops.inputs.budget import allowance
from attnops.inputs.call import Call, equip, equip_as_used, filled, plan_call, planned, with_device_plan
from attnops.inputs.linears import COLD_BYTES, with_copies
from attnops.inputs.pool import Pool
from attnops.inputs.sized import build, call_of, lengths, problem_at, problem_of

__all__ = [
    "COLD_BYTES", "Call", "Pool", "allowance", "build", "call_of", "equip", "equip_as_used", "filled", "lengths", "plan_call",
    "planned", "problem_at", "problem_of", "with_copies", "with_device_plan",
]  # fmt: skip
