"""What type checkers know of arguments that are handed on by name."""

import dataclasses
import inspect

import pytest

import attnops
from attnops.graphs.options import Options, Shared
from attnops.ops.attention import record, varlen


def arguments(function, *others):
    """The names of those that come by name."""
    found = inspect.signature(function).parameters.values()
    return {p.name for p in found if p.kind is p.KEYWORD_ONLY} - {*others}


@pytest.mark.parametrize(
    "function, options",
    [(attnops.attention, record._Ranged), (attnops.varlen_attention, varlen._Packed)],
    ids=["attention", "varlen_attention"],
)
def test_overloads_take_what_the_function_takes(function, options):
    assert {*options.__annotations__} >= arguments(function, "return_lse")
    known = {*inspect.signature(function).parameters}
    assert {*options.__annotations__} <= known


def test_piecewise_takes_what_graphed_takes():
    assert {*Shared.__annotations__} == {f.name for f in dataclasses.fields(Options)} - {
        "model",
        "buckets",
    }
