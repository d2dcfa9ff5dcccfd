"""Calls of ops as data, their inputs, and the error allowed to their results. `build` makes the calls that are timed."""

from attnops.inputs.budget import allowance as allowance
from attnops.inputs.call import Call as Call, filled as filled
from attnops.inputs.equip import (
    equip as equip,
    equip_as_used as equip_as_used,
    plan_call as plan_call,
    planned as planned,
    with_device_plan as with_device_plan,
)
from attnops.inputs.sized import Pool as Pool, build as build, lengths as lengths, problem_of as problem_of
