"""Calls of ops as data, with their inputs, for timing and testing kernels. `build` makes the calls that are timed."""

from attnops.inputs.call import Call as Call
from attnops.inputs.call import filled as filled
from attnops.inputs.equip import equip as equip
from attnops.inputs.equip import equip_as_used as equip_as_used
from attnops.inputs.equip import plan_call as plan_call
from attnops.inputs.equip import planned as planned
from attnops.inputs.equip import with_device_plan as with_device_plan
from attnops.inputs.sized import Pool as Pool
from attnops.inputs.sized import build as build
from attnops.inputs.sized import lengths as lengths
from attnops.inputs.sized import problem_of as problem_of
