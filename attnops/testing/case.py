"""`Features`: the options of an attention call. `Source`: random inputs. `Case`: a grid point."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from attnops.core.arguments import Arg
from attnops.testing.calls import QUANTISED as QUANTISED, Call as Call


@dataclass(frozen=True)
class Features:
    """The options of an attention call, without its lengths.

    kv_dtype: a quantised dtype, or None for `dtype`. q_dtype: a quantised query's, with `dtype` that of the output.
    v_head_dim: None for head_dim. sinks: the sinks' dtype.
    mask: "none", "bool", "additive" in `dtype`, or "biases", additive in float32 and as large as position biases of long contexts.
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

    def sizes(self) -> dict[str, int]:
        """The sizes of heads by the letters of the records' layouts."""
        heads = {"Hq": self.q_heads, "H": self.q_heads, "Hkv": self.kv_heads}
        return heads | {"D": self.head_dim, "Dv": self.v_dim, "Dc": self.v_dim, "Dr": self.rope_dim}

    def narrow(self) -> list[str]:
        """Those of the letters whose dims are 1 here where the layout leaves the choice."""
        mask = [size for letter, size in (("b", "B"), ("h", "Hq"), ("q", "S")) if letter not in self.mask_shape]
        return mask if self.scale_per_head else [*mask, "Hkv"]

    def statics(self) -> dict[str, Any]:
        """The scale, causality, and the other options that are on, by the records' names."""
        scale, (left, right) = self.head_dim**-0.5 if self.scale is None else self.scale, self.window
        given = {"window_left": left, "window_right": right, "softcap": self.softcap, "attention_chunk": self.chunk, "return_lse": self.lse}
        off = dict(zip(given, (-1, -1, 0.0, 0, False), strict=True))
        return {"scale": scale, "causal": self.causal} | {n: value for n, value in given.items() if value != off[n]}


SPREAD = {torch.int8: 3.0, torch.float8_e4m3fn: 60.0, torch.float8_e5m2: 9000.0}
"""Of the rows of a write into quantised pages: some exceed the range of the dtype by far."""


class Source:
    """Random inputs from one seed; the same numbers on every device."""

    def __init__(self, seed: int = 0, device: torch.device | str = "cpu") -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.device = torch.device(device)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, spread: float = 1.0) -> Tensor:
        """Normal numbers, rounded to `dtype`."""
        return (torch.randn(shape, generator=self.generator, dtype=torch.float64) * spread).to(dtype).to(self.device)

    def stored(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Keys or values in the format of a cache of `dtype`; uint8 is any bytes."""
        if dtype in (torch.int8, torch.uint8):
            top = torch.iinfo(dtype).max
            return torch.randint(-127 if dtype == torch.int8 else 0, top + 1, shape, generator=self.generator).to(dtype).to(self.device)
        return self.normal(*shape, dtype=dtype, spread=8.0 if dtype in QUANTISED else 1.0)

    def scales(self, heads: int, dtype: torch.dtype) -> Tensor:
        """float32 `[heads]` scales that bring `stored` to about one."""
        low = 1 / 64 if dtype == torch.int8 else 1 / 8
        return (low * (1 + torch.rand(heads, generator=self.generator))).float().to(self.device)

    def ints(self, values: Iterable[Any], dtype: torch.dtype = torch.int32) -> Tensor:
        """These ints, or lists of ints, as a tensor."""
        return torch.tensor(list(values), dtype=dtype, device=self.device)

    def cumulative(self, lengths: Sequence[int]) -> Tensor:
        """int32 `[B + 1]`: 0 and the running sums."""
        return self.ints(accumulate(lengths, initial=0))

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
        return self.stored(*shape, dtype=f.q_dtype) if f.q_dtype else self.normal(*shape, dtype=f.dtype, spread=60.0 if f.loud else 1.0)

    def argument(self, a: Arg, shape: Sequence[int], f: Features, stored: str) -> Tensor | None:
        """The tensor of this argument as `f` asks; None where `f` or the lengths leave it out. stored: that of `Spec`."""
        kv = torch.uint8 if a.dtypes == (torch.uint8,) else f.kv_dtype or f.dtype
        quantised = {"k_scale": f.kv_dtype, "v_scale": f.kv_dtype, "kv_scale": f.kv_dtype, "q_scale": f.q_dtype}
        if stored in (a.name, a.dtypes):
            return self.stored(*shape, dtype=kv)
        if a.name in ("query", "q_nope", "q_pe"):
            return self.query(shape, f)
        if a.name in ("key", "value", "latent", "k_pe"):
            return self.normal(*shape, dtype=f.dtype, spread=SPREAD.get(kv, 1.0))
        if (dtype := quantised.get(a.name)) is not None:
            return self.scales(shape[0], dtype)
        if a.name == "sinks" and f.sinks is not None:
            return self.normal(*shape, dtype=f.sinks)
        if a.name == "mask":
            return self.mask(shape, f)
        if a.name == "temperature" and f.temperature:
            return self.normal(*shape).exp()
        if a.name == "output" or (a.name == "lse" and f.lse):
            return torch.empty(*shape, dtype=f.dtype if a.name == "output" else torch.float32, device=self.device)
        return None

    def mask(self, shape: Sequence[int], f: Features) -> Tensor | None:
        """A mask of `shape` as `f` asks, whose first row (all dims but the last at 0) hides every key."""
        if f.mask == "none":
            return None
        hidden = self.chance(*shape, p=0.3)
        if hidden.numel():
            hidden[(0,) * (len(shape) - 1)] = True
        if f.mask == "bool":
            return ~hidden
        dtype, spread = (torch.float32, 20.0) if f.mask == "biases" else (f.dtype, 1.0)
        return self.normal(*shape, dtype=dtype, spread=spread).masked_fill(hidden, float("-inf"))


@dataclass(frozen=True)
class Case:
    """One point of the grid. `label` is unique within the op and names its special features."""

    op: str
    label: str
    build: Callable[[Source], Call]

    def call(self, seed: int = 0, device: torch.device | str = "cpu") -> Call:
        """The call with fresh inputs from `seed`."""
        return self.build(Source(seed, device))

    def __str__(self) -> str:
        return f"{self.op}:{self.label}"


Rows = dict[str, tuple[Any, ...]]


def table(op: str, build: Callable[..., Call], rows: Rows) -> tuple[Case, ...]:
    """A case a row, which holds the builder's arguments after the source: Features is `f`, a dict holds those given by name."""

    def case(name: str, row: tuple[Any, ...]) -> Case:
        named: dict[str, Any] = {}
        for part in row:
            named |= {"f": part} if isinstance(part, Features) else part if isinstance(part, dict) else {}
        lengths = [part for part in row if not isinstance(part, (dict, Features))]
        return Case(op, name, lambda source: build(source, *lengths, **named))

    return tuple(case(name, row) for name, row in rows.items())


def crossed(shapes: Rows, features: Mapping[str, Features]) -> Rows:
    """The rows of every shape with all of these features."""
    return {f"{shape}-{name}": (*row, f) for shape, row in shapes.items() for name, f in features.items()}
