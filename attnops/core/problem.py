"""`Problem`: the facts of a call by which a kernel takes or refuses it, and `Refusal`: its reason
against the call."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from threading import local
from typing import Any

import torch

from attnops.core.errors import InvalidInput, fail, portable
from attnops.core.record import EXTENTS, Call, Fact, asked, name, sizes_of, values
from attnops.core.tensors import surely as surely

_USUAL = 1024
"""Tokens of a request, where only data tell how many requests share the tokens."""


@dataclass(frozen=True)
class Extent:
    """Bounds of a size that may be symbolic: `lo <= size`, `size <= hi` (None: unbounded), and
    `hint`, a typical value, for costs.

    Concrete sizes are rounded out to powers of two, and the hint up to one of eight steps an
    octave, so that a growing context does not make a new Problem at every step.
    """

    lo: int = 0
    hi: int | None = None
    hint: int = 1

    @classmethod
    def of(cls, size: int | torch.SymInt, typical: int = 1) -> Extent:
        """The extent of an int (its power-of-two bucket, the hint in it) or of a SymInt (its range;
        no guard is installed).

        typical: the hint of a SymInt that the trace has none for, because only data decide it.
        """
        if not isinstance(size, torch.SymInt):
            return _bucket(int(size))
        node = size.node
        if (known := node.maybe_as_int()) is not None:
            return _bucket(known)
        bounds = node.shape_env.bound_sympy(node.expr)
        # Several infinities stand for an unbounded side, and so does the largest int64. No infinity
        # is an Integer.
        lo = int(bounds.lower) if bounds.lower.is_Integer else 0
        hi = int(bounds.upper) if bounds.upper.is_Integer and int(bounds.upper) < 2**62 else None
        hint = node.hint if node.has_hint() else None
        if hint is None:
            return cls(lo, hi, max(lo, 1, typical if hi is None else min(typical, hi)))
        return cls(lo, hi, _bucket(int(hint)).hint)

    def __str__(self) -> str:
        return (
            str(self.lo)
            if self.lo == self.hi
            else f"{self.lo}..{'' if self.hi is None else self.hi}"
        )


ONE = Extent(1, 1, 1)
OPEN = Extent(0, None, 1024)
"""A size that is left open: any, more than one as a rule."""


@functools.cache
def _bucket(n: int) -> Extent:
    if n <= 2:
        return Extent(n, n, n)
    top = 1 << (n - 1).bit_length()
    # The faster of two kernels changes between one power of two and the next, so the hint is finer
    # (docs/tuning.md).
    shift = max(n.bit_length() - 4, 0)
    return Extent(top // 2 + 1, top, -(-n >> shift) << shift)


def alike(size: int) -> tuple[int, int]:
    """The least and the largest int with the extent of `size`."""
    hint = _bucket(size).hint
    if size <= 2:
        return hint, hint
    # Steps are as wide as below the octave's end everywhere in it; at the end itself they are twice
    # that, and it is a multiple of both.
    top = 1 << (size - 1).bit_length()
    return hint - (1 << max(top.bit_length() - 5, 0)) + 1, hint


@dataclass(frozen=True)
class Refusal:
    """`field` is `got`; the kernel wants `want`."""

    field: str
    got: object
    want: str

    def __str__(self) -> str:
        return f"{self.field}={_short(self.got)} (wants {self.want})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.field, portable(self.got), self.want)


GPUS = {
    "a100": ("NVIDIA A100-SXM4-80GB", 80),
    "h100": ("NVIDIA H100 80GB HBM3", 90),
    "h200": ("NVIDIA H200", 90),
    "b200": ("NVIDIA B200", 100),
    "rtx4090": ("NVIDIA GeForce RTX 4090", 89),
}
"""GPUs by the names that `Target.parse` takes: the name by the driver, as tables of measured times
have it, and the architecture."""


@dataclass(frozen=True)
class Target:
    """The machine a choice is made for. device: "cpu", "cuda", or "hip" for an AMD GPU, which torch
    itself calls "cuda".

    arch: compute capability times ten (90 for SM90), the hexadecimal number of a gfx name (0x942),
    0 on other devices.
    assume: the modules that are installed; None asks the machine at hand. gpu: the device's name as
    its driver says it, for measured times; "" where it is not known.
    """

    device: str = "cpu"
    arch: int = 0
    assume: tuple[str, ...] | None = None
    gpu: str = ""

    @classmethod
    def parse(cls, text: str, assume: tuple[str, ...] | None = None) -> Target:
        """`cpu`, `smNN` such as `sm90`, `gfxNNN` such as `gfx942`, or a name of GPUS. Raises
        InvalidInput on anything else."""
        if text == "cpu":
            return cls("cpu", 0, assume)
        if gpu := GPUS.get(text.lower()):
            return cls("cuda", gpu[1], assume, gpu[0])
        if m := re.fullmatch(r"sm_?(\d{2,3})a?", text):
            return cls("cuda", int(m[1]), assume)
        if m := re.fullmatch(r"gfx([\da-f]{3,4})", text):
            return cls("hip", int(m[1], 16), assume)
        fail(
            InvalidInput,
            "target",
            repr(text),
            f"cpu, {', '.join(GPUS)}, smNN such as sm80, or gfxNNN such as gfx942",
        )

    @classmethod
    def of(cls, device: torch.device) -> Target:
        """The target of a tensor's device; `explain` may have put another in its place."""
        return _OVERRIDE.target or _target_of(device.type, _index(device))

    @property
    def on_gpu(self) -> bool:
        """Is it a GPU, NVIDIA's or AMD's?"""
        return self.device in ("cuda", "hip")

    @property
    def title(self) -> str:
        """`NVIDIA H200 (sm90)`, or the architecture alone where the GPU's name is not known."""
        return f"{self.gpu} ({self})" if self.gpu else str(self)

    def __str__(self) -> str:
        return {"cuda": f"sm{self.arch}", "hip": f"gfx{self.arch:x}"}.get(self.device, self.device)


class _Override(local):
    target: Target | None = None


_OVERRIDE = _Override()


@contextmanager
def pretend(target: Target | None) -> Iterator[None]:
    """Within the block every Problem is built for `target` (None: for the machine at hand)."""
    before, _OVERRIDE.target = _OVERRIDE.target, target
    try:
        yield
    finally:
        _OVERRIDE.target = before


def pretended() -> Target | None:
    """The target that `pretend` has put in force, if any."""
    return _OVERRIDE.target


def _index(device: torch.device) -> int | None:
    """The number of a GPU; that of the current one where none is given, once CUDA is
    initialised."""
    if device.type != "cuda" or device.index is not None or not torch.cuda.is_initialized():
        return device.index
    return torch.cuda.current_device()


@functools.cache
def _target_of(kind: str, index: int | None) -> Target:
    if kind != "cuda" or not torch.cuda.is_available():
        return Target(kind, 0)
    gpu = torch.cuda.get_device_name(index)
    if torch.version.hip:
        # "gfx942:sramecc+:xnack-"
        return replace(
            Target.parse(torch.cuda.get_device_properties(index).gcnArchName.partition(":")[0]),
            gpu=gpu,
        )
    major, minor = torch.cuda.get_device_capability(index)
    return Target("cuda", major * 10 + minor, gpu=gpu)


@dataclass(frozen=True)
class Visibility:
    """The keys a query sees, and terms of its softmax. `window` is (left, right) in keys, -1
    unbounded; `attention_chunk` in keys, 0 off; `mask` "none", "bool" or "additive". `temperature`:
    every query token has a factor for its logits.
    """

    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: bool = False
    attention_chunk: int = 0
    temperature: bool = False
    sinks: bool = False
    sinks_dtype: torch.dtype | None = None
    mask: str = "none"
    kv_range: bool = False

    @property
    def windowed(self) -> bool:
        """A finite window on the left, or on the right of a call that is not causal."""
        return self.window[0] >= 0 or (self.window[1] >= 0 and not self.causal)


@dataclass(frozen=True)
class PageFacts:
    """`kv_scales`: keys and values have scales, or a latent's query has one. `per_head_scales`:
    those of keys and values differ by head. `pages_packed`: pages follow one another without gaps.
    `pages_in_rows`: each begins whole rows after the one before, and its rows follow one another.
    `pages_alike`: key and value pages have equal strides, multiples of the head dim.
    """

    kv_scales: bool = False
    per_head_scales: bool = False
    pages_packed: bool = True
    pages_in_rows: bool = True
    pages_alike: bool = True


@dataclass(frozen=True)
class Results:
    """The results asked for beside the output. `grad`: the call is a backward. `lse_grad`: the lse
    has a gradient."""

    lse: bool = False
    grad: bool = False
    mask_grad: bool = False
    lse_grad: bool = False


@dataclass(frozen=True)
class StepFacts:
    """`plan` "none", "device" (an int32 tensor beside the query) or "host" (an int64 tensor on the
    CPU); `workspace` the least bytes of scratch. `padded`: there may be tokens of no request (only
    packed and paged calls say no). `holes`: there may be ids of no page, which every layer looks
    for itself. `sizes_equal`: dense only, as many keys as queries. `capturing`: an eager call, into
    a CUDA graph. `deterministic`: the policy is, and the call as it sees it, of any size.
    `repeatable`: see `repeatable`. `compiled`: the call is lowered by a compiler, which fuses plain
    torch with its neighbours; an eager call launches each of its ops.
    """

    plan: str = "none"
    padded: bool = True
    holes: bool = False
    workspace: int = 0
    sizes_equal: bool = False
    capturing: bool = False
    deterministic: bool = False
    repeatable: str = "no"
    compiled: bool = False


_NONE = Extent(0, 0, 0)


@dataclass(frozen=True)
class Extents:
    """`tokens`: query tokens of the whole call. `batch`: requests. `queries`, `context`: query
    tokens and keys of a request, at most."""

    tokens: Extent = _NONE
    batch: Extent = _NONE
    queries: Extent = _NONE
    context: Extent = _NONE


AS_OTHERS = {"kv_dtype": "dtype", "v_head_dim": "head_dim"}
"""Fields of a kind that are as another, unless they are given and not None."""

ANY = Extents(OPEN, OPEN, OPEN, OPEN)
"""Every size is left open."""


@dataclass(frozen=True)
class Problem:
    """One call without its data, or a kind of call, whose sizes are left open. Hashable; two equal
    Problems get the same kernel.

    Fields that do not apply to an op keep their defaults.

    `dtype` of the query (or of what is computed), `kv_dtype` of key, value and pages; uint8:
    latents in the packed format. Latents: the first `v_head_dim` of the `head_dim` numbers are the
    value, the other `rope_dim` the rotated key. `in_features`, `out_features`: columns and rows of
    the weight of a linear layer; of experts, those of a gate. `experts`: how many there are, and
    `top_k` how many a token chooses. `asks`: arguments that are not neutral and have no field.
    Names are unique: needs and refusals say `window` for `rules.window`.
    """

    op: str
    target: Target
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype = torch.float32
    q_heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    v_head_dim: int = 0
    rope_dim: int = 0
    page_size: int = 0
    in_features: int = 0
    out_features: int = 0
    experts: int = 0
    top_k: int = 0
    last_dim_contiguous: bool = True
    rules: Visibility = Visibility()
    pages: PageFacts = PageFacts()
    results: Results = Results()
    step: StepFacts = StepFacts()
    asks: frozenset[str] = frozenset()
    sizes: Extents = Extents()

    @classmethod
    def of(cls, op: str, target: Target, **leaves: Any) -> Problem:
        """The Problem with these fields, its own or those of its records, by name."""
        return altered(cls(op, target), **leaves)

    @classmethod
    def kind(cls, op: str, **leaves: Any) -> Problem:
        """A kind of call: of any sizes but those among the fields, e.g. `queries=ONE` of a decode
        step, on any target.

        Keys, values and pages have the query's dtype, and values the key's head dim, unless the
        fields say otherwise.
        """
        as_others = {
            n: leaves[other]
            for n, other in AS_OTHERS.items()
            if leaves.get(n) is None and other in leaves
        }
        return altered(cls(op, Target(), sizes=ANY), **leaves | as_others)

    @property
    def group_size(self) -> int:
        """Query heads a key head serves."""
        return self.q_heads // self.kv_heads if self.kv_heads else 0

    def summary(self) -> str:
        """One line for tables: the fields that differ from their defaults."""
        skip = {
            "op",
            "target",
            "last_dim_contiguous",
            "pages_packed",
            "pages_in_rows",
            "pages_alike",
            "sinks_dtype",
        }
        shown = ((n, leaf(self, n)) for n in LEAVES if n not in skip)
        return " ".join(f"{n}={_short(value)}" for n, value in shown if value != LEAVES[n].default)


_RECORDS = {
    x.name: f.name for f in fields(Problem) if is_dataclass(f.default) for x in fields(f.default)
} | {"windowed": "rules"}
LEAVES = {
    x.name: x
    for f in fields(Problem)
    for x in (fields(f.default) if is_dataclass(f.default) else (f,))
}
"""Fields of a Problem and of its records, by name."""


def leaf(problem: Problem, name: str) -> Any:
    """The field or property of `problem`, or of one of its records, with this name."""
    return getattr(getattr(problem, _RECORDS[name]) if name in _RECORDS else problem, name)


def altered(problem: Problem, **leaves: Any) -> Problem:
    """As `dataclasses.replace`, by the names of LEAVES."""
    parts: dict[str, dict[str, Any]] = {}
    for n, value in leaves.items():
        parts.setdefault(_RECORDS.get(n, ""), {})[n] = value
    own = parts.pop("", {}) | {
        record: replace(getattr(problem, record), **given) for record, given in parts.items()
    }
    return replace(problem, **own)


class _Heard(local):
    made: list[tuple[Call, Problem]] | None = None


_HEARD = _Heard()


@contextmanager
def hearing() -> Iterator[list[tuple[Call, Problem]]]:
    """The calls whose Problems are made within the block in this thread, each with its Problem."""
    before, _HEARD.made = _HEARD.made, []
    try:
        yield _HEARD.made
    finally:
        _HEARD.made = before


def problem_of(call: Call) -> Problem:
    """The Problem of a call that keeps its op's contract. Heads, head dims and page size become
    ints, each a guard under a compiler."""
    spec, sizes = call.spec, sizes_of(call)
    given: dict[str, Any] = dict(zip(spec.names, values(call), strict=True))
    first = values(call)[0]
    found: dict[str, Any] = {"op": spec.op, "target": Target.of(first.device), "dtype": first.dtype}
    found["repeatable"] = repeatable()
    found["kv_dtype"] = given[spec.stored].dtype if spec.stored else first.dtype
    for field, code in spec.measures.items():
        size = eval(code, {"__builtins__": {}}, sizes)
        typical = found["tokens"].hint // _USUAL if field == "batch" and "tokens" in found else 1
        found[field] = Extent.of(size, typical) if field in EXTENTS else int(size)
    strides = [
        given[a.name].stride(-1) for a in spec.args if a.unit_stride and given[a.name] is not None
    ]
    found["last_dim_contiguous"] = all(isinstance(n, int) and n == 1 for n in strides)
    more = spec.facts(call, sizes) if callable(spec.facts) else spec.facts or {}
    problem = Problem.of(
        **{**found, **_fields_of(call), "asks": asked(call) - spec.feature_names, **more}
    )
    if _HEARD.made is not None:
        _HEARD.made.append((call, problem))
    return problem


def _fields_of(call: Call) -> dict[str, Any]:
    """The fields that follow from single arguments, by their facts."""
    fields: dict[str, Any] = {}
    for a, argument in zip(call.spec.args, values(call), strict=True):
        for fact in a.facts:
            value = told_by(fact, argument)
            if fact.part is not None:
                parts = list(fields.get(fact.field, LEAVES[fact.field].default))
                parts[fact.part] = value
                value = tuple(parts)
            elif fact.field in fields:
                value = max(value, fields[fact.field])
            fields[fact.field] = value
    return fields


def told_by(fact: Fact, argument: Any) -> Any:
    """The value of a fact's field, or of its part of a field that is a tuple, for an argument."""
    return argument if fact.of is None else fact.of(argument)


def value_of(problem: Problem, fact: Fact) -> Any:
    """The field of a fact, or its part of a field that is a tuple."""
    value = leaf(problem, fact.field)
    return value if fact.part is None else value[fact.part]


def repeatable() -> str:
    """Shall the same call give the same bits at every run? As torch.use_deterministic_algorithms
    asks: "must", "warn" where it only warns, or "no"."""
    return ("no", "warn", "must")[torch.get_deterministic_debug_mode()]


def bytes_of(workspace: torch.Tensor | None) -> int:
    """The size of a workspace as a Problem says it: if it is symbolic, the least that it may be; no
    guard is installed."""
    size = 0 if workspace is None else workspace.numel()
    return size if isinstance(size, int) else Extent.of(size).lo


def _short(value: Any) -> str:
    if isinstance(value, frozenset):
        return ",".join(sorted(map(str, value)))
    return name(value) if isinstance(value, torch.dtype) else str(value)
