"""What the cases of a family are written in: `Features`, `Source` of random numbers, and a `Grid`
of rows for each op.

`attnops.testing` builds calls from them: from sizes, from what the record says of its arguments,
and from a function of the family for what is an op's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnops.core.arguments import QUANTISED
from attnops.core.record import Spec

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
E4M3, E5M2, INT8, U8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8
I32, I64 = torch.int32, torch.int64


@dataclass(frozen=True)
class Features:
    """The options of an attention call, without its lengths.

    kv_dtype: a quantised dtype, or None for `dtype`. q_dtype: a quantised query's, with `dtype`
    that of the output.
    v_head_dim: None for head_dim. sinks: the sinks' dtype.
    mask: "none", "bool", "additive" in `dtype`, or "biases", additive in float32 and as large as
    position biases of long contexts.
    mask_shape: which of batch, head and query a dense mask has ("bhq"), the others being 1.
    temperature: a factor of every query token, paged only.
    loud: logits of several hundred, where a softmax that does not subtract its maximum overflows.
    """

    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    q_dtype: torch.dtype | None = None
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    v_head_dim: int | None = None
    scale: float | None = None
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    chunk: int = 0
    sinks: torch.dtype | None = None
    mask: str = "none"
    mask_shape: str = "bhq"
    temperature: bool = False
    scale_per_head: bool = True
    lse: bool = False
    loud: bool = False

    @property
    def v_dim(self) -> int:
        """The value's head dim."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def rope_dim(self) -> int:
        """Of latents, the numbers that are rotated."""
        return self.head_dim - self.v_dim

    @property
    def attention_chunk(self) -> int:
        """`chunk`, by a Problem's name."""
        return self.chunk

    def sizes(self) -> dict[str, int]:
        """The sizes of heads by the letters of the records' layouts."""
        heads = {"Hq": self.q_heads, "H": self.q_heads, "Hkv": self.kv_heads}
        return heads | {"D": self.head_dim, "Dv": self.v_dim, "Dc": self.v_dim, "Dr": self.rope_dim}

    def narrow(self) -> list[str]:
        """Those of the letters whose dims are 1 here where the layout leaves the choice."""
        mask = [
            size
            for letter, size in (("b", "B"), ("h", "Hq"), ("q", "S"))
            if letter not in self.mask_shape
        ]
        return mask if self.scale_per_head else [*mask, "Hkv"]


class OnDevice:
    """Integers on a device."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)

    def ints(self, values: Iterable[Any], dtype: torch.dtype = torch.int32) -> Tensor:
        """These ints, or lists of ints, as a tensor."""
        return torch.tensor(list(values), dtype=dtype, device=self.device)

    def cumulative(self, lengths: Sequence[int]) -> Tensor:
        """int32 `[B + 1]`: 0 and the running sums."""
        return self.ints(accumulate(lengths, initial=0))


class Source(OnDevice):
    """Random inputs from one seed; the same numbers on every device."""

    def __init__(self, seed: int = 0, device: torch.device | str = "cpu") -> None:
        super().__init__(device)
        self.generator = torch.Generator().manual_seed(seed)

    def normal(
        self, *shape: int, dtype: torch.dtype = torch.float32, spread: float = 1.0
    ) -> Tensor:
        """Normal numbers, rounded to `dtype`."""
        return (
            (torch.randn(shape, generator=self.generator, dtype=torch.float64) * spread)
            .to(dtype)
            .to(self.device)
        )

    def stored(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Keys or values in the format of a cache of `dtype`; uint8 is any bytes."""
        if dtype in (torch.int8, torch.uint8):
            top = torch.iinfo(dtype).max
            return (
                torch.randint(
                    -127 if dtype == torch.int8 else 0, top + 1, shape, generator=self.generator
                )
                .to(dtype)
                .to(self.device)
            )
        return self.normal(*shape, dtype=dtype, spread=8.0 if dtype in QUANTISED else 1.0)

    def scales(self, heads: int, dtype: torch.dtype) -> Tensor:
        """float32 `[heads]` scales that bring `stored` to about one."""
        low = 1 / 64 if dtype == torch.int8 else 1 / 8
        return (low * (1 + torch.rand(heads, generator=self.generator))).float().to(self.device)

    def permutation(self, n: int) -> list[int]:
        """0 to n - 1 in random order."""
        return torch.randperm(n, generator=self.generator).tolist()

    def chance(self, *shape: int, p: float) -> Tensor:
        """bool, True with probability `p`."""
        return (torch.rand(shape, generator=self.generator) < p).to(self.device)

    def past(self, end: int, total: int) -> Tensor:
        """bool `[total]`: True from `end` on."""
        return torch.arange(total, device=self.device) >= end

    def query(self, shape: Sequence[int], f: Features) -> Tensor:
        """A query in the dtype that `f` asks for."""
        return (
            self.stored(*shape, dtype=f.q_dtype)
            if f.q_dtype
            else self.normal(*shape, dtype=f.dtype, spread=60.0 if f.loud else 1.0)
        )

    def mask(self, shape: Sequence[int], f: Features) -> Tensor | None:
        """A mask of `shape` as `f` asks, whose first row (all dims but the last at 0) hides every
        key."""
        if f.mask == "none":
            return None
        hidden = self.chance(*shape, p=0.3)
        if hidden.numel():
            hidden[(0,) * (len(shape) - 1)] = True
        if f.mask == "bool":
            return ~hidden
        dtype, spread = (torch.float32, 20.0) if f.mask == "biases" else (f.dtype, 1.0)
        return self.normal(*shape, dtype=dtype, spread=spread).masked_fill(hidden, float("-inf"))


class Pages(NamedTuple):
    """The pages of a call that reads or writes a cache.

    spare: pages of no request. wider: columns of the table past the longest request; entries past a
    request's end are -1 or a spare page. shared: the second request's first page is the first
    one's. interleaved: key and value pages are views of one buffer.
    """

    spare: int = 2
    wider: int = 1
    shared: bool = False
    interleaved: bool = False


@dataclass
class Scene:
    """A call before its arguments are made: what a row says of it, and what follows from that.

    q_lens, k_lens: new tokens and keys of each request. padding: (tokens, keys) past the last
    request, free; one number for both; None is no padding, and the promises that there is none and
    that no page is missing. slack: how loose the maxima are.
    index: the dtype of integers that may have two.
    given: arguments. sizes: by the letters of the layouts.
    free: bool, True where nothing may be read: "tokens" `[T]`, "keys" `[N]` or `[B, K]`, "slots"
    `[P, page]`.
    """

    source: Source
    spec: Spec
    f: Features = Features()
    q_lens: Sequence[int] | None = None
    k_lens: Sequence[int] | None = None
    padding: int | tuple[int, int] | None = (2, 3)
    slack: int = 0
    pages: Pages = Pages()  # noqa: RUF009, a tuple
    index: torch.dtype = torch.int64
    given: dict[str, Any] = field(init=False, default_factory=dict)
    sizes: dict[str, Any] = field(init=False, default_factory=dict)
    free: dict[str, Tensor] = field(init=False, default_factory=dict)

    @property
    def past(self) -> tuple[int, int]:
        """Tokens and keys of no request."""
        if isinstance(self.padding, tuple):
            return self.padding
        tokens = self.padding or 0
        return tokens, tokens


Rows = dict[str, tuple[Any, ...]]
Given = dict[str, Any]
"""Arguments by name."""


@dataclass(frozen=True)
class Grid:
    """The cases of an op.

    names: of the values of a row, in order; a row may leave out the last ones. A name is that of a
    field of `Scene`, of an argument, of a size in the record's layouts, or of a parameter of `own`.
    `dtype` is that of the features. A list of integers given for a tensor is made one, and True or
    a dtype asks for random numbers.
    rows: by label. Features, and dicts of values by name, stand anywhere in a row.
    own: what is neither data nor said by the record. Takes the scene and the values by names that
    are its parameters alone; returns arguments, and may change the scene.
    of: the op whose calls the rows are; a gradient is that of such a call. A plan is made for one,
    and `own` takes the device and returns its two buffers.
    """

    names: str
    rows: Rows
    own: Callable[..., Any] | None = None
    of: str = ""


EDGES: Rows = {
    "page_1": ((3, 8, 1), 9, 1),
    "all_skipped": ((-1, -1, -1), 4, 3),
    "first_slot_skipped": ((-1, 5, -2), 4, 3),
    "last_slot": ((11,), 4, 3),
    "no_tokens": ((), 4, 3),
    "no_pages": ((-1, -1), 0, 3),
}
"""Slots of new tokens, pages and their size, of writes."""


def at(main: tuple[Any, ...], each: Mapping[str, Features | Given]) -> Rows:
    """The rows of one shape with each of these features, or values by name."""
    return {name: (*main, more) for name, more in each.items()}


def crossed(shapes: Rows, features: Mapping[str, Features]) -> Rows:
    """The rows of every shape with all of these features."""
    return {
        f"{shape}-{name}": (*row, f)
        for shape, row in shapes.items()
        for name, f in features.items()
    }
