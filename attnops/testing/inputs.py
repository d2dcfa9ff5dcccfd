"""`Features`: the options of an attention call. `Source`: random inputs. `Case`: a grid point."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnops.inputs.call import QUANTISED as QUANTISED, Call as Call


@dataclass(frozen=True)
class Features:
    """The options of an attention call, without its lengths.

    kv_dtype: a quantised dtype, or None for `dtype`. q_dtype: a quantised query's, with `dtype` that of the output.
    v_head_dim: None for head_dim. sinks: the sinks' dtype.
    mask: "none", "bool", "additive" in `dtype`, or "biases", additive in float32 and as large as position biases of long contexts.
    mask_shape, dense only: which of batch, head and query the mask has ("bhq"), the others being 1.
    temperature, paged only: a factor of every query token.
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

    def sizes(self) -> dict[str, int]:
        """The sizes of heads by the letters of the records' layouts."""
        rope = self.head_dim - self.v_dim
        heads = {"Hq": self.q_heads, "H": self.q_heads, "Hkv": self.kv_heads}
        return heads | {"D": self.head_dim, "Dv": self.v_dim, "Dc": self.v_dim, "Dr": rope}

    def statics(self) -> dict[str, Any]:
        """The scalar arguments of the op that are not at their defaults."""
        out: dict[str, Any] = {"scale": self.head_dim**-0.5 if self.scale is None else self.scale, "causal": self.causal}
        for name, value in (("window_left", self.window[0]), ("window_right", self.window[1])):
            if value != -1:
                out[name] = value
        return out | ({"softcap": self.softcap} if self.softcap else {}) | ({"attention_chunk": self.chunk} if self.chunk else {})


class Source:
    """Random inputs from one seed; the same numbers on every device."""

    def __init__(self, seed: int = 0, device: torch.device | str = "cpu") -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.device = torch.device(device)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, spread: float = 1.0) -> Tensor:
        """Normal numbers, rounded to `dtype`."""
        return (torch.randn(shape, generator=self.generator, dtype=torch.float64) * spread).to(dtype).to(self.device)

    def stored(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Keys or values in the format of a cache of `dtype`."""
        if dtype == torch.int8:
            return torch.randint(-127, 128, shape, generator=self.generator).to(dtype).to(self.device)
        return self.normal(*shape, dtype=dtype, spread=8.0 if dtype in QUANTISED else 1.0)

    def scales(self, heads: int, dtype: torch.dtype) -> Tensor:
        """float32 `[heads]` scales that bring `stored` to about one."""
        low = 1 / 64 if dtype == torch.int8 else 1 / 8
        return (low * (1 + torch.rand(heads, generator=self.generator))).float().to(self.device)

    def ints(self, values: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
        """These ints as a tensor."""
        return torch.tensor(list(values), dtype=dtype, device=self.device)

    def cumulative(self, lengths: Sequence[int]) -> Tensor:
        """int32 `[B + 1]`: 0 and the running sums."""
        return self.ints([sum(lengths[:i]) for i in range(len(lengths) + 1)])

    def permutation(self, n: int) -> list[int]:
        """0 to n - 1 in random order."""
        return torch.randperm(n, generator=self.generator).tolist()

    def chance(self, *shape: int, p: float) -> Tensor:
        """bool, True with probability `p`."""
        return (torch.rand(shape, generator=self.generator) < p).to(self.device)

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """An output to write into."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def argument(self, name: str, shape: Sequence[int], f: Features) -> Tensor | None:
        """The tensor of this name of an attention call, as `f` asks; None where it asks for none, or where lengths decide."""
        kv, quantised = f.kv_dtype or f.dtype, f.kv_dtype is not None
        if name in ("query", "q_nope", "q_pe"):
            loud = 60.0 if f.loud else 1.0
            return self.normal(*shape, dtype=f.dtype, spread=loud) if f.q_dtype is None else self.stored(*shape, dtype=f.q_dtype)
        if name in ("key", "value", "k_pages", "v_pages", "latent_pages"):
            return self.stored(*shape, dtype=kv)
        if name in ("k_scale", "v_scale", "kv_scale"):
            return self.scales(shape[0] if f.scale_per_head else 1, kv) if quantised else None
        if name == "q_scale":
            return None if f.q_dtype is None else self.scales(shape[0] if f.scale_per_head else 1, f.q_dtype)
        if name == "sinks":
            return None if f.sinks is None else self.normal(*shape, dtype=f.sinks)
        if name == "mask":
            return self.mask(shape, f)
        if name == "temperature":
            return self.normal(*shape).exp() if f.temperature else None
        if name == "output":
            return self.empty(*shape, dtype=f.dtype)
        return self.empty(*shape, dtype=torch.float32) if name == "lse" and f.lse else None

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


Build = Callable[[Source, Features], Call]


def table(op: str, build: Callable[..., Call], rows: Mapping[str, tuple[Any, ...]]) -> tuple[Case, ...]:
    """A case a row, which holds the builder's arguments after the source; a dict at its end holds those given by name."""

    def bound(row: tuple[Any, ...]) -> Callable[[Source], Call]:
        more = row[-1] if row and isinstance(row[-1], dict) else None
        return lambda source: build(source, *row) if more is None else build(source, *row[:-1], **more)

    return tuple(Case(op, name, bound(row)) for name, row in rows.items())


def points(op: str, rows: Mapping[str, tuple[Build, Features]]) -> tuple[Case, ...]:
    """A case a row: a shape and its features."""
    return table(op, lambda source, build, f: build(source, f), rows)
