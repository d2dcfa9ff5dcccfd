"""The shapes of calls that `attnops tune` times, and the sizes of each. The most used shapes come first, in case the budget ends."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from attnops.core.errors import InvalidInput
from attnops.measured import Shape, Sizes
from attnops.measured.table import AnyShape, Axes, Axis
from attnops.testing.timed_calls import GRADIENT
from attnops.tune import linears

LARGEST_BYTES = 5e9
LARGEST_FLOPS = 1e13


@dataclass(frozen=True)
class Sweep(Axes):
    """A shape and the sizes it is timed at: every combination except the largest."""

    def allows(self, at: Sizes) -> bool:
        """Is a call of these sizes timed?"""
        shape = replace(self.shape, window=-1) if isinstance(self.shape, Shape) else self.shape  # a window reads a part of the cache
        held = shape.work(at).bytes
        products = 2.5 if asked_by(self.shape).endswith(GRADIENT) else 1.0  # five where a forward makes two
        return held <= LARGEST_BYTES and products * self.shape.work(at).flops <= LARGEST_FLOPS

    @property
    def allowed(self) -> int:
        """The number of sizes that are timed."""
        return sum(map(self.allows, self.points()))


def powers(low: int, high: int, step: int = 2) -> Axis:
    """low, low * step, ... up to high."""
    return tuple(itertools.takewhile(lambda n: n <= high, (float(low * step**i) for i in itertools.count())))


ONE = (1.0,)
# Times are nearly linear in the keys of a request, and jump with the batch when it needs another wave: at 16 or at 17.
BATCHES = (1, 2, 3, 4, 5, 6, 8, 10, 13, 16, 17, 20, 24, 28, 32, 33, 40, 49, 64, 65, 81, 97, 128, 131, 160, 193, 256)
KEYS = powers(64, 65536, 4)
COARSE = (powers(1, 256, 4), powers(256, 65536, 4))
FINE = (tuple(map(float, BATCHES)), KEYS)
USUAL = ((1.0, 2.0, 4.0, 8.0, 13.0, 17.0, 33.0, 65.0, 129.0, 256.0), KEYS)
FEW, SOME = powers(1, 16, 4), powers(1, 64, 4)
MANY, EACH_MANY = powers(2, 2048, 4), (2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 512.0, 2048.0)
VERIFY = (2.0, 8.0, 64.0, 512.0)
PROMPTS = powers(32, 8192, 4)
# Times are flat within a tile of 64 or 128 queries and jump at the next one: 128 and 136, 256 and 272.
LONG_PROMPTS = (32.0, 64.0, 128.0, 136.0, 192.0, 256.0, 272.0, 384.0, 512.0, 640.0, *powers(1024, 16384))
PASTS, STRIDES = (1.0, 2.0, 4.0, 16.0, 64.0, 512.0, 4096.0), powers(4, 2048, 8)
PAGED = Shape("paged_attention", page_size=16)
DENSE = Shape("attention", square=True)
PADDED = Shape("attention", kv_range=True)
PACKED = Shape("varlen_attention")
DENSE_GRADIENT = Shape("attention_backward", square=True)
PACKED_GRADIENT = Shape("varlen_attention_backward")
STEP = Shape("decode_attention", page_size=16, causal=False)
MLA = Shape("mla_attention", q_heads=128, kv_heads=1, head_dim=576, v_head_dim=512, rope_dim=64, page_size=64)
D64: dict[str, Any] = {"q_heads": 64, "kv_heads": 8, "head_dim": 64, "v_head_dim": 64}
D64_4: dict[str, Any] = D64 | {"q_heads": 32}
D64_MHA: dict[str, Any] = D64 | {"q_heads": 16, "kv_heads": 16}
D256: dict[str, Any] = {"q_heads": 16, "kv_heads": 8, "head_dim": 256, "v_head_dim": 256}
MHA: dict[str, Any] = {"q_heads": 32, "kv_heads": 32}
SMALL: dict[str, Any] = {"q_heads": 12, "kv_heads": 2}
ONE_KEY_HEAD: dict[str, Any] = {"q_heads": 8, "kv_heads": 1}
DEEPSEEK: dict[str, Any] = {"q_heads": 16, "kv_heads": 16, "head_dim": 192, "v_head_dim": 128}
FP8: dict[str, Any] = {"kv_dtype": "float8_e4m3fn"}
D96: dict[str, Any] = MHA | {"head_dim": 96, "v_head_dim": 96}
F32: dict[str, Any] = {"dtype": "float32", "kv_dtype": "float32"}


def _decode(shape: Shape, batch: Axis = COARSE[0], ratio: Axis = COARSE[1], /, **more: Any) -> Sweep:
    return Sweep(replace(shape, **more, decode=True, square=False), batch, ONE, ratio)


def _extend(shape: Shape, batch: Axis = SOME, queries: Axis = MANY, /, **more: Any) -> Sweep:
    return Sweep(replace(shape, **more), batch, queries, PASTS)


def _prefill(shape: Shape, batch: Axis = FEW, queries: Axis = PROMPTS, /, **more: Any) -> Sweep:
    return Sweep(replace(shape, **more), batch, queries, ONE)


LINEARS = tuple(Sweep(shape, linears.ROWS, ONE, ONE) for shape in linears.SHAPES)

TRAINED, LONG = powers(512, 32768), powers(512, 32768, 4)
WINDOW: dict[str, Any] = {"window": 1023}
GPT_OSS: dict[str, Any] = D64 | {"window": 127, "sinks": True}
GRADIENTS: tuple[Sweep, ...] = (
    *(_prefill(shape, (1.0, 2.0, 4.0, 16.0), TRAINED) for shape in (DENSE_GRADIENT, PACKED_GRADIENT)),
    *(
        _prefill(shape, (1.0, 4.0, 16.0), LONG, **more)
        for more in (D64_4, GPT_OSS, WINDOW, DEEPSEEK, {"softcap": True}, D256, D64_MHA, MHA)
        for shape in (DENSE_GRADIENT, PACKED_GRADIENT)
    ),
    *(_prefill(DENSE_GRADIENT, (1.0, 4.0, 16.0), LONG, **more) for more in (D96, D64_MHA | {"causal": False})),
)


def forward(gradient: Sweep) -> Sweep:
    """The forward of a training step, at the sizes of its gradient."""
    assert isinstance(gradient.shape, Shape)
    return replace(gradient, shape=replace(gradient.shape, op=gradient.shape.op.removesuffix(GRADIENT), lse=True))


def asked_by(shape: AnyShape) -> str:
    """The op whose name asks for a shape: the forward of a training step is timed with its gradient."""
    return shape.op + GRADIENT * (isinstance(shape, Shape) and shape.lse)


TRAINING = tuple(step for sweep in GRADIENTS for step in (forward(sweep), sweep))

KEY_HEADS = ({"q_heads": 64}, MHA, ONE_KEY_HEAD, {"q_heads": 4, "kv_heads": 1}, {"q_heads": 32, "kv_heads": 2})
# Head dims of 128 come first: prebuilt kernels have them, and compilation for others may exhaust a kernel's first_calls_s.
FULL = (
    _decode(PAGED, *FINE),
    _extend(PAGED, SOME, EACH_MANY),
    *(_decode(MLA, *FINE, q_heads=n) for n in (128, 16)),
    *(_prefill(shape, FEW, LONG_PROMPTS) for shape in (DENSE, PACKED)),
    *(kind(PADDED) for kind in (_decode, _prefill)),
    _decode(PAGED, *USUAL, page_size=64),
    _extend(PAGED, FEW, page_size=64),
    *(_decode(PAGED, *USUAL, **more) for more in (*KEY_HEADS, {"page_size": 1}, {"page_size": 128})),
    *(_extend(PAGED, **heads) for heads in ({"q_heads": 64}, MHA)),
    _extend(PAGED, FEW, **SMALL),
    _extend(PAGED, FEW, STRIDES, **ONE_KEY_HEAD),
    *(_decode(MLA, *USUAL, q_heads=n) for n in (32, 64)),
    *(_decode(MLA, q_heads=n, page_size=16) for n in (128, 16)),
    *(_extend(MLA, FEW, VERIFY, q_heads=n) for n in (128, 16)),
    *LINEARS,
    _decode(STEP, *FINE),
    *(_decode(STEP, *USUAL, **more) for more in ({"page_size": 64}, {"q_heads": 64}, MHA, D64, D64_4)),
    _decode(STEP, **GPT_OSS),
    _decode(DENSE),
    *(_prefill(DENSE, **heads) for heads in (MHA, ONE_KEY_HEAD, SMALL)),
    _prefill(PACKED, **ONE_KEY_HEAD),
    Sweep(replace(DENSE, square=False), FEW, (64.0, 256.0, 1024.0), (2.0, 8.0, 32.0)),
    _prefill(DENSE, **D64),
    _prefill(DENSE, SOME, **D64, causal=False),
    _prefill(DENSE, causal=False),
    _prefill(PACKED, **D64),
    *(_decode(PAGED, *USUAL, **heads) for heads in (D64, D64_4, D64_MHA)),
    _extend(PAGED, SOME, **D64),
    _extend(PAGED, FEW, STRIDES, **D64_MHA),
    *(_decode(PAGED, **heads, page_size=1) for heads in (MHA, D64_4)),
    *(_prefill(shape, **DEEPSEEK) for shape in (PACKED, DENSE)),
    _decode(PAGED, **GPT_OSS),
    _extend(PAGED, FEW, STRIDES, **GPT_OSS),
    *(kind(PADDED, **GPT_OSS | {"window": window}) for window in (-1, 127) for kind in (_decode, _prefill)),
    *(_decode(PAGED, **more) for more in (FP8, D256)),
    _prefill(DENSE, **D256),
    *TRAINING,
)


def _thinned(axis: Axis, most: int) -> Axis:
    """At most `most` of the points, evenly spaced, with both ends."""
    return tuple(axis[round(i * (len(axis) - 1) / (most - 1))] for i in range(most)) if len(axis) > most else axis


def _brief(p: Sweep) -> Sweep:
    batch = _thinned(p.batch, 5) if isinstance(p.shape, Shape) else linears.FEW_ROWS
    return Sweep(p.shape, batch, _thinned(p.queries, 5), _thinned(p.ratio, 4))


BRIEF = tuple(map(_brief, FULL))
TOY: dict[str, Any] = {**F32, "q_heads": 4, "kv_heads": 2, "head_dim": 16, "v_head_dim": 16}
LATENT = TOY | {"kv_heads": 1, "head_dim": 20, "rope_dim": 4}


def toy(shape: Shape) -> Shape:
    """With few and small heads, those of latents as wide as they are, in float32."""
    return replace(shape, **(F32 | {"q_heads": 4} if shape.rope_dim else TOY))


FEWEST, SHORTEST = (1.0, 2.0), (8.0, 16.0)
TINY = (
    *(_prefill(toy(shape), FEWEST, SHORTEST) for shape in (DENSE, PACKED)),
    *(_decode(s, FEWEST, SHORTEST, **heads, page_size=4) for s, heads in ((PAGED, TOY), (MLA, LATENT))),
    *(_prefill(toy(shape), FEWEST, SHORTEST) for shape in (DENSE_GRADIENT, PACKED_GRADIENT)),
    forward(_prefill(toy(DENSE_GRADIENT), FEWEST, SHORTEST)),
)
CPU = (
    _prefill(DENSE, (1.0, 4.0), (64.0, 256.0), **F32),
    _decode(PADDED, (1.0, 4.0), (256.0, 1024.0), **F32),
    _prefill(PACKED, (1.0, 4.0), (64.0, 256.0), **F32),
    _decode(PAGED, (1.0, 8.0), (256.0, 1024.0), **F32),
    _prefill(DENSE_GRADIENT, (1.0, 4.0), (64.0, 256.0), **F32),
)
GRIDS: dict[str, tuple[Sweep, ...]] = {"full": FULL, "brief": BRIEF, "cpu": CPU, "tiny": TINY}


def sweeps_of(grid: str, ops: Sequence[str] = ()) -> tuple[Sweep, ...]:
    """The sweeps of a named grid; ops: of these only, a gradient with its forward. Raises InvalidInput for an unknown name."""
    if grid not in GRIDS:
        raise InvalidInput("grid", repr(grid), " | ".join(GRIDS))
    known = {asked_by(p.shape) for p in GRIDS[grid]}
    if unknown := set(ops) - known:
        raise InvalidInput("ops", ", ".join(sorted(unknown)), " | ".join(sorted(known)))
    return tuple(p for p in GRIDS[grid] if not ops or asked_by(p.shape) in ops)
