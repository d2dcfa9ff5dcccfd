"""Call records: one frozen record an op lists its arguments. The schema, the checks, the fake and
the cache key follow from the list.

    @record("merge_state", Result("output", like="output_a"), Result("lse", like="lse_a"))
    class MergeState(Call):
        output_a: Tensor = arg("T, H, D", FLOATS)
        lse_a: Tensor = arg("T, H", FLOAT32)
        ...

`attnops.core.arguments` says how an argument is written.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY as KW_ONLY, dataclass, field, replace
from functools import cached_property
from inspect import get_annotations
from types import CodeType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor

from attnops.core.arguments import (
    FLOAT32 as FLOAT32,
    FLOATS as FLOATS,
    INDEX as INDEX,
    INT32 as INT32,
    MASK as MASK,
    QUANTISED as QUANTISED,
    QUERY as QUERY,
    REQUIRED,
    STORED as STORED,
    Arg as Arg,
    Fact as Fact,
    Result as Result,
    Size,
    Sizes as Sizes,
    arg as arg,
    compiled,
    evaluate as evaluate,
    layout_of,
)
from attnops.core.checks import (
    check_number,
    check_strided,
    check_written,
    name as name,
    need as need,
    python_number,
)
from attnops.core.errors import InvalidInput, RegistrationError, fail
from attnops.core.tensors import surely
from attnops.core.tracers import wanted

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: Any) -> Any:
        """typing's own, which Python has from 3.11 on."""
        return lambda cls: cls


TYPES = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "int": "int",
    "float": "float",
    "bool": "bool",
    "str": "str",
}


@dataclass(frozen=True, eq=False)
class Spec:
    """All that follows from a record's class body. args, results: in order. rules: further checks
    of a call, given its sizes by name.

    least: lower bounds of sizes, as `">= 1 head"`.
    measures: the fields of a Problem that are sizes, as code over the names in the layouts. stored:
    the argument whose dtype is the Problem's `kv_dtype`. facts: further fields of the Problem, or a
    function of the call and its sizes that returns them.
    grows: the size that callers raise from call to call, as a decode step does with the keys.
    Checks, rules and facts must not tell two values of it apart that have one extent and differ
    from all other sizes.
    sums: its products are sums whose order, in plain torch, may follow from the whole batch.
    counted: a `measured.Counting`: how tables of measured times tell kinds of its calls apart;
    None: as those of attention.
    """

    op: str
    args: tuple[Arg, ...]
    results: tuple[Result, ...] = ()
    least: Mapping[str, str] = field(default_factory=dict)
    rules: Callable[[Any, Sizes], None] | None = None
    measures: Mapping[str, CodeType] = field(default_factory=dict)
    stored: str = ""
    facts: Callable[[Any, Sizes], Mapping[str, Any]] | Mapping[str, Any] | None = None
    grows: str = ""
    sums: bool = False
    counted: Any = None

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the arguments, in order."""
        return tuple(a.name for a in self.args)

    @cached_property
    def positional(self) -> int:
        """How many arguments come before the keyword-only ones."""
        return sum(not a.keyword for a in self.args)

    @cached_property
    def optional(self) -> frozenset[str]:
        """The arguments that a kernel lists: those with a default, but for hints and those that
        every kernel takes."""
        return frozenset(
            a.name
            for a in self.args
            if a.default is not REQUIRED and not (a.hint or a.always or a.name == "policy")
        )

    @cached_property
    def features(self) -> dict[Fact, tuple[Arg, ...]]:
        """The features of the op, each with its arguments. A kernel that takes the feature lists
        one of them."""
        features: dict[Fact, tuple[Arg, ...]] = {}
        for a in self.args:
            for fact in a.facts:
                if fact.feature and a.name in self.optional:
                    features[fact] = (*features.get(fact, ()), a)
        return features

    @cached_property
    def feature_names(self) -> frozenset[str]:
        """The arguments of the features."""
        return frozenset(a.name for args in self.features.values() for a in args)

    @cached_property
    def roles(self) -> dict[str, tuple[str, ...]]:
        """The names of the arguments, by what they hold."""
        roles: dict[str, tuple[str, ...]] = {}
        for a in self.args:
            if a.holds:
                roles[a.holds] = (*roles.get(a.holds, ()), a.name)
        return roles

    @cached_property
    def output(self) -> str:
        """The argument that the result is written into; "" where results are returned, or pages are
        all that is written."""
        return next((a.name for a in self.args if a.written and not (a.hint or a.is_kept)), "")

    @cached_property
    def weights(self) -> tuple[str, ...]:
        """The arguments whose bytes are most of a call's."""
        return tuple(a.name for a in self.args if a.weight)

    def __getitem__(self, name: str) -> Arg:
        return next(a for a in self.args if a.name == name)


RECORDS: dict[str, Spec] = {}
"""What follows from each op's record, by the op's name."""

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(arg,))
def group(cls: type[T]) -> type[T]:
    """Mark a class as a group of arguments that several records have: they derive from it."""
    return cls


@group
class Call:
    """The base of all records. A record is a tuple of the op's arguments in the schema's order,
    with their names as attributes."""

    __slots__ = ()
    spec: ClassVar[Spec]
    _: KW_ONLY
    policy: str = ""


C = TypeVar("C", bound=Call)


@dataclass_transform(frozen_default=True, field_specifiers=(arg,))
def record(
    op: str,
    *results: Result,
    least: Mapping[str, str] | None = None,
    rules: Callable[[Any, Sizes], None] | None = None,
    problem: Mapping[str, str] | None = None,
    facts: Callable[[Any, Sizes], Mapping[str, Any]] | Mapping[str, Any] | None = None,
    grows: str = "",
    keywords: str = "",
    sums: bool = False,
    counted: Any = None,
) -> Callable[[type[C]], type[C]]:
    """Make a record of a class whose annotations, inherited ones first, are the op's arguments;
    `_: KW_ONLY` begins those given by name.

    problem: fields of its Problem: sizes as code over the names in the layouts, and `kv_dtype` as
    the argument that has it (`Spec.measures`, `Spec.stored`).
    keywords: the names of the keyword-only arguments in the schema's order, where that is another.
    `policy` comes last, but for arguments that are written. See `Spec` for the others. A record is
    stored as a tuple, which takes half a microsecond to build with 23 fields. Raises
    RegistrationError for an annotation that no schema can express.
    """

    def make(cls: type[C]) -> type[C]:
        found = _arguments(op, cls)
        policy = found.pop("policy")
        args = [a for a in found.values() if not a.keyword]
        named = [found[name] for name in keywords.split()] or [
            a for a in found.values() if a.keyword
        ]
        place = next((i for i, a in enumerate(named) if a.written), len(named))
        args += [*named[:place], policy, *named[place:]]
        base = namedtuple(cls.__name__, [a.name for a in args], defaults=[a.default for a in args])  # type: ignore[misc]
        fields = problem or {}
        spec = Spec(
            op,
            tuple(args),
            results,
            least or {},
            rules,
            _measures(args, fields),
            fields.get("kv_dtype", ""),
            facts,
            grows,
            sums,
            counted,
        )
        RECORDS[op] = spec
        # All that is derived hangs on one attribute, because `key`, `output` and `args` are or may
        # become arguments.
        members = {
            "__slots__": (),
            "__doc__": cls.__doc__,
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "spec": spec,
        }
        return cast(type[C], type(cls.__name__, (base, Call), members))

    return make


def _arguments(op: str, cls: type) -> dict[str, Arg]:
    """By name, inherited ones first."""
    found: dict[str, Arg] = {}
    for part in reversed(cls.__mro__[:-1]):
        keyword = False
        for field_name, kind in get_annotations(part).items():
            keyword |= field_name == "_"
            if field_name not in ("_", "spec"):
                given = getattr(cls, field_name, REQUIRED)
                found[field_name] = _argument(op, field_name, kind, given, keyword)
    return found


def _argument(op: str, name: str, kind: str, given: Any, keyword: bool) -> Arg:
    if kind not in TYPES:
        fail(RegistrationError, f"{op}: {name} got the type {kind}, want one of {', '.join(TYPES)}")
    a = given if isinstance(given, Arg) else Arg(default=given)
    neutral = a.default if a.off is REQUIRED else a.off
    return replace(
        a,
        name=name,
        kind=kind,
        keyword=keyword,
        layout=layout_of(a.dims),
        tensor=kind.startswith("Tensor"),
        neutral=neutral,
    )


EXTENTS = {"tokens": "T", "batch": "B", "queries": "most_queries", "context": "most_keys"}
"""Sizes of a Problem that may be symbolic, and the names that they have in a layout, or what the
argument holds that says them."""

INTS = {
    "q_heads": "Hq",
    "kv_heads": "Hkv",
    "head_dim": "D",
    "v_head_dim": "Dv",
    "rope_dim": "Dr",
    "page_size": "page",
}
"""As EXTENTS, of sizes that are always known."""


def _measures(args: list[Arg], problem: Mapping[str, str]) -> dict[str, CodeType]:
    known = {a.name for a in args if not a.tensor} | {
        s.text for a in args if a.kind == "Tensor" for s in a.layout if not s.options
    }
    held: dict[str, str] = {a.holds: a.name for a in args if not a.tensor}
    found = {}
    for f, letter in (EXTENTS | INTS).items():
        names = f, letter, held.get(letter, "")
        found[f] = problem.get(f) or next((n for n in names if n in known), "")
    return {f: compiled(expression) for f, expression in found.items() if expression}


def values(call: Call) -> tuple[Any, ...]:
    """The arguments, in the schema's order."""
    return cast(tuple[Any, ...], call)


def changed(call: C, **changes: Any) -> C:
    """The call with some arguments replaced."""
    return cast(C, cast(Any, call)._replace(**changes))


def split(call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(positional, keyword) arguments, as the op's overloads take them."""
    given, spec = values(call), call.spec
    n = spec.positional
    return given[:n], dict(zip(spec.names[n:], given[n:], strict=True))


def asked(call: Call) -> frozenset[str]:
    """The optional arguments that ask a kernel for something: all but hints and those that are
    off."""
    optional = call.spec.optional
    given = zip(call.spec.args, values(call), strict=True)
    return frozenset(
        a.name for a, value in given if a.name in optional and not same(value, a.neutral)
    )


def same(value: Any, other: Any) -> bool:
    """Are two values of an argument equal? Tensors are if they are one."""
    return value is other or (
        not isinstance(value, Tensor) and type(value) is type(other) and bool(value == other)
    )


# Checks -------------------------------------------------------------------------------------------


def check(call: Call) -> Sizes:
    """The sizes of a call by name. Raises InvalidInput on the first argument that breaks the
    contract; looks at no data."""
    sizes = Sizes()
    device = None
    for a, value in zip(call.spec.args, values(call), strict=True):
        _check_kind(a, value)
        if not a.tensor:
            sizes[a.name] = value
        elif value is not None:
            _check_tensor(call, a, value)
            device = device or value.device
            if value.device != device and not a.any_device:
                fail(
                    InvalidInput,
                    f"{a.name}.device",
                    value.device,
                    f"{device}, as the first argument",
                )
    _check_sizes(call, sizes)
    for letter, want in call.spec.least.items():
        enough = sizes[letter] >= int(want.split()[1])
        if enough is not True:
            need(enough, place(call.spec, letter), sizes[letter], want)
    if call.spec.rules is not None:
        call.spec.rules(call, sizes)
    return sizes


def with_python_numbers(call: C) -> C:
    """The call with numbers of numpy, or of another library, as Python's; the call itself where it
    has none."""
    numbers = {a.name: x for a, x in zip(call.spec.args, values(call), strict=True) if not a.tensor}
    changes = {name: n for name, x in numbers.items() if (n := python_number(x)) is not x}
    return changed(call, **changes) if changes else call


def check_kinds(call: Call) -> None:
    """Raise InvalidInput on the first argument of another type, or the first number out of its
    bounds."""
    for a, value in zip(call.spec.args, values(call), strict=True):
        _check_kind(a, value)


# What is of its exact type and within these bounds needs no closer look.
_LARGEST = 2**62
_EXACT: Any = {"int": int, "float": float, "bool": bool, "str": str}


def _check_kind(a: Arg, value: Any) -> None:
    if not a.tensor:
        if a.choices or type(value) is not _EXACT[a.kind]:
            check_number(a, value)
        elif a.kind != "str":
            least = -_LARGEST if a.least is None else a.least
            most = _LARGEST if a.most is None else a.most
            if not least <= value <= most:
                check_number(a, value)
    elif not isinstance(value, Tensor) and (value is not None or a.kind == "Tensor"):
        got = "nothing" if value is REQUIRED else "None" if value is None else type(value).__name__
        fail(InvalidInput, a.name, got, wanted(f"a tensor [{a.dims}]", value))


def _check_tensor(call: Call, a: Arg, value: Tensor) -> None:
    if value.layout != torch.strided or value.is_nested:
        check_strided(a.name, value, a.dims)
    dims = len(a.layout)
    if value.dim() < dims if a.layout and a.layout[-1].text == "..." else value.dim() != dims:
        fail(InvalidInput, a.name, f"shape {tuple(value.shape)}", f"[{a.dims}]")
    if a.written and (type(value) is not Tensor or not value.is_contiguous() or value.is_neg()):
        check_written(a.name, value)
    if isinstance(a.dtypes, str):
        like = getattr(call, a.dtypes)
        if like is None:
            fail(InvalidInput, a.dtypes, "None", f"a tensor, because {a.name} is one")
        if value.dtype != like.dtype:
            fail(
                InvalidInput,
                f"{a.name}.dtype",
                name(value.dtype),
                f"{name(like.dtype)}, as {a.dtypes}",
            )
        return
    allowed = a.dtypes(call) if callable(a.dtypes) else a.dtypes
    if value.dtype not in allowed:
        fail(InvalidInput, f"{a.name}.dtype", name(value.dtype), " | ".join(map(name, allowed)))


def place(spec: Spec, letter: str) -> str:
    """Where a call has the size of this name: `key.shape[2]`."""
    return next(
        f"{a.name}.shape[{i}]"
        for a in spec.args
        for i, size in enumerate(a.layout)
        if size.text == letter
    )


def _check_sizes(call: Call, sizes: Sizes) -> None:
    """Of every tensor; names before expressions, which may speak of ints and tensors that come
    later."""
    owners: dict[str, str] = {}
    for expressed in (False, True):
        for a, value in zip(call.spec.args, values(call), strict=True):
            if value is None:
                continue
            for i, size in enumerate(a.layout):
                if bool(size.options) is expressed and size.text != "...":
                    _check_size(f"{a.name}.shape[{i}]", value.shape[i], size, sizes, owners)


def _check_size(field: str, got: Any, size: Size, sizes: Sizes, owners: dict[str, str]) -> None:
    if not size.options:
        if size.text in sizes:
            same_size = got == sizes[size.text]
            if same_size is not True:
                owner = owners.get(size.text)
                why = f"{size.text}{f', as {owner}' if owner else ''}"
                need(same_size, field, got, f"{sizes[size.text]} ({why})")
        else:
            sizes[size.text], owners[size.text] = got, field
        return
    wants = [eval(option, {"__builtins__": {}}, sizes) for option in size.options]
    fits = got >= wants[0] if size.least else got == wants[0]
    if fits is True:
        return
    if size.least:
        need(fits, field, got, f">= {wants[0]} ({size.text[2:].strip()})")
    elif len(wants) == 1:
        why = "" if size.text.isdigit() else f" ({size.text})"
        need(fits, field, got, f"{wants[0]}{why}")
    else:
        want = " or ".join(map(str, wants)) + f" ({size.text.replace(' |', ' or')})"
        need(any(surely(got == w) for w in wants) or got == wants[-1], field, got, want)


def sizes_of(call: Call) -> Sizes:
    """The sizes of a call by name, unchecked: for a call that `check` has passed."""
    sizes = Sizes()
    for a, value in zip(call.spec.args, values(call), strict=True):
        if not a.tensor:
            sizes[a.name] = value
        elif value is not None:
            for i, size in enumerate(a.layout):
                if not size.options and size.text != "...":
                    sizes.setdefault(size.text, value.shape[i])
    return sizes


# The fake -----------------------------------------------------------------------------------------


def fake(call: Call) -> Any:
    """Empty results with the shapes and dtypes that the record promises, contiguous, on the first
    tensor's device."""
    results = call.spec.results
    if not results:
        return None
    sizes = sizes_of(call)
    first = next(value for value in values(call) if isinstance(value, Tensor))
    made = tuple(_empty(r, call, first, sizes) for r in results)
    return made[0] if len(made) == 1 else made


def _empty(r: Result, call: Call, first: Tensor, sizes: Sizes) -> Tensor:
    absent = bool(r.when) and ((asks := getattr(call, r.when)) is None or asks is False)
    if r.like:
        like = getattr(call, r.like)
        return (
            first.new_empty(0)
            if like is None or absent
            else cast(Tensor, like.new_empty(like.shape))
        )
    dtype = (
        getattr(call, r.dtype).dtype
        if isinstance(r.dtype, str)
        else r.dtype
        if isinstance(r.dtype, torch.dtype)
        else r.dtype(call)
    )
    if absent:
        return first.new_empty((0,), dtype=dtype)
    shape = (
        tuple(evaluate(d.text, sizes) for d in layout_of(r.dims))
        if isinstance(r.dims, str)
        else r.dims(call)
    )
    return first.new_empty(shape, dtype=dtype)
