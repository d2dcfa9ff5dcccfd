"""Calls of ops as data, their inputs, and the error allowed to their results. `build` makes the calls that are timed."""

from attnops.inputs.budget import allowance
from attnops.inputs.call import Call, equip, equip_as_used, filled, plan_call, planned, with_device_plan
from attnops.inputs.sized import Pool, build, lengths, problem_of

__all__ = [
    "Call", "Pool", "allowance", "build", "equip", "equip_as_used", "filled", "lengths", "plan_call", "planned", "problem_of",
    "with_device_plan",
]  # fmt: skip
