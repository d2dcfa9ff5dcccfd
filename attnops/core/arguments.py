"""The arguments and results of a record: layout, dtypes, default and role of each.

Layouts. `"T, Hq, D"` names the dims of a tensor. The first tensor that bears a name binds it; every
other must agree. An entry may also be an integer or an expression of names (`"B + 1"`), several
allowed sizes (`"1 | Hkv"`), or a bound (`">= max_pages * page"`). An int of the call is a name,
too. `"..."` at the end allows one further dim or more. `attnops.core.problem` lists the names that
are sizes of a Problem.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from inspect import Parameter
from types import CodeType
from typing import Any, Literal

import torch

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
QUANTISED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
STORED = (*FLOATS, *QUANTISED)
QUERY = (*FLOATS, torch.float8_e4m3fn)
FLOAT32 = (torch.float32,)
INT32 = (torch.int32,)
INDEX = (torch.int32, torch.int64)
MASK = (torch.bool, *FLOATS)

FURTHEST = (1 << 30) - 1
"""The widest window and the longest chunk, in keys. Kernels add them to positions in 32 bits."""

Holds = Literal[
    "",
    "queries",
    "keys",
    "new_keys",
    "pages",
    "page_ids",
    "slots_of_tokens",
    "starts_of_queries",
    "starts_of_keys",
    "lengths_of_queries",
    "lengths_of_keys",
    "most_queries",
    "most_keys",
    "tokens",
    "page_count",
    "scale_of_logits",
    "scale_of_query",
    "scale_of_keys",
    "factors",
    "shares",
    "weight_rows",
    "exponents",
    "first_keys",
    "ends_of_keys",
    "states",
]
"""What the values of an argument are, where layout, dtypes and facts do not tell.

keys: keys or values that queries see. new_keys: those of new tokens, which are stored. pages: the
slots that hold keys. page_ids: the pages of each request. slots_of_tokens: where each token is
stored, negative for nowhere. starts: 0 and the running sums of the requests' lengths. most: the
greatest of these lengths, or more. first_keys, ends_of_keys: of the keys that a request's queries
see. tokens,
page_count: how many there are in all. scale_of_query, scale_of_keys: factors by which stored
numbers are multiplied. factors: of each token's logits. shares: of what is added up. weight_rows:
their products with the input are the results. exponents: of the powers of two that weights are
multiplied by, 253 more each. states: of each request, read before they are written.
"""

Dtypes = tuple[torch.dtype, ...]
Sizes = dict[str, Any]


REQUIRED: Any = Parameter.empty


@dataclass(frozen=True)
class Fact:
    """What a Problem says of an argument. Several arguments may share one: the greatest of their
    values counts.

    field: of the Problem. part: the place in a field that is a tuple.
    of: takes the argument's value and returns the field's; None: they are the same.
    feature: may a call ask a kernel for it? A kernel that takes it lists an argument with this
    fact.
    unless: Problems in which no kernel need list it. refused: the field that a refusal names; "":
    `field`.
    """

    field: str
    of: Callable[[Any], Any] | None = None
    part: int | None = None
    feature: bool = True
    unless: Callable[[Any], bool] | None = None
    refused: str = ""


@dataclass(frozen=True)
class Arg:
    """One argument of an op.

    dims: the layout of a tensor. dtypes: those it may have, the argument whose dtype it shares, or
    a function of the call.
    default: the value if left out. off: the value at which no kernel needs to know the argument;
    the default, unless given.
    least, most: of a number. choices: of a string. symbolic: the size may be a SymInt. written: the
    op writes the tensor.
    any_device: the tensor need not be on the first tensor's device. unit_stride: the last dim's
    stride is a fact of the Problem.
    hint: a promise, a plan or scratch that a kernel may ignore without changing the result; it
    never makes a kernel refuse.
    always: every kernel of the op takes every value of the argument, so `Kernel.takes` need not
    list it.
    without: takes a call with the flag on, and returns one that means the same with the flag off.
    Kernels that do not list the flag get it.
    facts: what the Problem says of it. holds: see `Holds`. weight: its bytes are most of a call's,
    and a step of a model reads them once.

    `record` fills in the rest. tensor: is it a tensor, or None in a tensor's place? neutral: `off`,
    or else the default.
    """

    dims: str = ""
    dtypes: Dtypes | str | Callable[[Any], Dtypes] = ()
    default: Any = REQUIRED
    off: Any = REQUIRED
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    symbolic: bool = False
    written: bool = False
    any_device: bool = False
    hint: bool = False
    always: bool = False
    unit_stride: bool = False
    weight: bool = False
    without: Callable[[Any], Any] | None = None
    facts: tuple[Fact, ...] = ()
    holds: Holds = ""
    name: str = ""
    kind: str = ""
    keyword: bool = False
    layout: tuple[Size, ...] = ()
    tensor: bool = False
    neutral: Any = REQUIRED

    @property
    def is_kept(self) -> bool:
        """Does the tensor keep what earlier calls wrote?"""
        return self.holds in ("pages", "states")


def arg(
    dims: str = "",
    dtypes: Dtypes | str | Callable[[Any], Dtypes] = (),
    *,
    default: Any = REQUIRED,
    **more: Any,
) -> Any:
    """An `Arg`. `default` is named, so that type checkers see that the record's constructor may
    leave it out."""
    return Arg(dims, dtypes, default, **more)


@dataclass(frozen=True)
class Result:
    """One result of an op. dims: its layout, or a function of the call that returns the shape.

    dtype: a dtype, the name of an argument that has it, or a function of the call. like: the
    argument whose shape and dtype it has, in place of dims and dtype. when: the argument without
    which (None, or False) the result is empty.
    """

    name: str
    dims: str | Callable[[Any], tuple[Any, ...]] = ""
    dtype: torch.dtype | str | Callable[[Any], torch.dtype] = torch.float32
    like: str = ""
    when: str = ""


@dataclass(frozen=True)
class Size:
    """One entry of a layout, compiled."""

    text: str
    options: tuple[CodeType, ...] = ()
    least: bool = False

    @classmethod
    @cache
    def of(cls, text: str) -> Size:
        """The entry with this text."""
        if text.isidentifier() or text == "...":
            return cls(text)
        least = text.startswith(">=")
        return cls(
            text, tuple(compiled(part) for part in (text[2:] if least else text).split("|")), least
        )


@cache
def compiled(expression: str) -> CodeType:
    """The code of a layout's expression."""
    return builtins.compile(expression.strip(), f"<layout {expression}>", "eval")


def evaluate(expression: str, sizes: Sizes) -> Any:
    """The value of a layout's expression, a text of ours, for these sizes."""
    return eval(compiled(expression), {"__builtins__": {}}, sizes)


def layout_of(dims: str) -> tuple[Size, ...]:
    """The entries of a layout."""
    return tuple(Size.of(part.strip()) for part in dims.split(",")) if dims else ()
