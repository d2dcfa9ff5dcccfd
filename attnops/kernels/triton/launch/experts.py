"""Launches of the experts of a mixture. Importing this module imports triton."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attnops.core.kernel import deterministic
from attnops.kernels.shared.experts import experts as composed
from attnops.kernels.shared.launch.beside import ALIGNED, BESIDE, Pointer
from attnops.kernels.shared.launch.compiled import Made, is_plain
from attnops.kernels.shared.launch.gpu import (
    computed_in,
    flat,
    gpu_of,
    launch,
    overlapped,
    overlaps,
)
from attnops.kernels.shared.memory import address
from attnops.kernels.shared.parts import GRID, turns_of
from attnops.kernels.shared.sizes import power
from attnops.kernels.triton.device import experts as device
from attnops.kernels.triton.launch import experts_tiles as tiles
from attnops.kernels.triton.launch.experts_tiles import Shape, Tile

if TYPE_CHECKING:
    from attnops.ops.experts.mxfp4 import Mxfp4Experts
    from attnops.ops.experts.record import Experts

BLOCK = 1024
"""Numbers of a program of the last launch, the sum."""


def experts(call: Experts, choice: tuple[Tile, Tile] | None = None) -> None:
    """Two launches for one token, three for more; under a deterministic policy one way serves every
    number of tokens.

    A token whose weights have their rows next to each other takes three as well: sums of products
    read such weights at half of the rate.

    A compiled graph of any number of tokens calls this: more tokens than a program has are left to
    torch's products.
    choice: the tiles of the two products, in place of the table's.
    """
    tokens, fixed = call.x.shape[0], deterministic(call.policy)
    if tokens == 0:
        return
    if tokens > tiles.MOST_TOKENS and not fixed:
        composed(call)
    elif not fixed and _takes_two(call):
        _one_token(call, choice)
    elif not fixed:
        _few_tokens(call, choice, tiles.block_of(tokens))
    else:
        for _, part in turns_of(call, "T", GRID * tiles.MOST_TOKENS):
            _few_tokens(part, choice, tiles.MOST_TOKENS)


def _takes_two(call: Experts) -> bool:
    """Does the call take two launches, where the policy is not deterministic?"""
    return call.x.shape[0] == 1 and not (_along(call.gate_up) or _along(call.down))


def shapes(call: Experts) -> tuple[Shape, Shape]:
    """Of the two products."""
    (_, outs, inner), size = call.down.shape, call.x.dtype.itemsize
    up = Shape(
        inner, call.x.shape[1], size, call.interleaved, not call.interleaved, _along(call.gate_up)
    )
    return up, Shape(outs, inner, size, along=_along(call.down))


def _along(weight: Tensor) -> bool:
    return weight.stride(2) != 1 and weight.stride(1) == 1


def activation(
    call: Experts | Mxfp4Experts, name: str
) -> tuple[tuple[float, float, float], dict[str, Any]]:
    """The numbers and the constants of an activation, as the device functions take them."""
    shaped = bool(call.alpha != 1 or call.limit or call.offset)
    return (call.alpha, call.limit, call.offset), {"ACT": name, "SHAPED": shaped}


def _one_token(call: Experts, choice: tuple[Tile, Tile] | None) -> tuple[Made | None, ...]:
    x, index, output = call.x, call.top_k_index.contiguous(), call.output
    (experts, outs, inner), k = call.down.shape, index.shape[1]
    first, second = choice or tuple(tiles.one_token(shape, power(k)) for shape in shapes(call))
    act, overlap = x.new_empty((k, inner)), overlaps(output.device)
    numbers, given = activation(call, call.activation)
    block = first.rows // 2 if call.interleaved else first.rows
    up = launch(
        device.one_token_up,
        (-(-inner // block), k),
        {
            "IN": x.shape[1],
            "BLOCK_N": block,
            "BLOCK_K": first.columns,
            "STAGES": first.stages,
            "INTERLEAVED": call.interleaved,
            **given,
            **overlapped(first.overlap and overlap),
        },
        (
            x,
            call.gate_up,
            flat(call.gate_up_bias),
            index,
            act,
            inner,
            experts,
            *numbers,
            *call.gate_up.stride(),
        ),
        first.warps,
    )
    down = launch(
        device.one_token_down,
        (-(-outs // second.rows),),
        {
            "IN": inner,
            "K": k,
            "KP": power(k),
            "BLOCK_N": second.rows,
            "BLOCK_K": second.columns,
            "STAGES": second.stages,
            **overlapped(second.overlap and overlap),
        },
        (
            act,
            call.down,
            flat(call.down_bias),
            index,
            call.top_k_weights.contiguous(),
            output,
            outs,
            experts,
            *call.down.stride(),
            output.stride(1),
        ),
        second.warps,
    )
    return up, down


def _few_tokens(
    call: Experts, choice: tuple[Tile, Tile] | None, block: int
) -> tuple[Made | None, ...]:
    x, index, weights, output = (
        call.x,
        call.top_k_index.contiguous(),
        call.top_k_weights.contiguous(),
        call.output,
    )
    tokens, (experts, outs, inner), k = x.shape[0], call.down.shape, index.shape[1]
    memory, overlap = gpu_of(x).memory, overlaps(output.device)
    chosen = choice or tuple(tiles.few_tokens(shape, block, memory) for shape in shapes(call))
    act = x.new_empty((tokens * k, inner))
    y = x.new_empty((tokens * k, outs), dtype=torch.float32)
    numbers, given = activation(call, call.activation)
    programs = min(experts, min(tokens, block) * k)
    products = []
    for up, tile, source, weight, bias, result in (
        (True, chosen[0], x, call.gate_up, call.gate_up_bias, act),
        (False, chosen[1], act, call.down, call.down_bias, y),
    ):
        pairs, along = up and call.interleaved, _along(weight)
        read: Any = weight
        if tile.described and gpu_of(x).warpgroups:
            read = _descriptor(weight, tile, along)
        n = tile.rows // 2 if pairs else tile.rows
        args = (
            source,
            read,
            flat(bias),
            index,
            weights,
            result,
            tokens,
            int(programs == experts),
            result.shape[1],
            experts,
            *numbers,
            source.stride(0),
            *weight.stride(),
        )
        products.append(
            launch(
                device.few_tokens,
                (-(-result.shape[1] // n), programs, -(-tokens // block)),
                {
                    "IN": source.shape[1],
                    "K": k,
                    "KP": power(k),
                    "BLOCK_T": block,
                    "BLOCK_N": n,
                    "BLOCK_K": tile.columns,
                    "STAGES": tile.stages,
                    "UP": up,
                    **given,
                    "INTERLEAVED": pairs,
                    "COMPUTE": computed_in(x),
                    "DESCRIBED": read is not weight,
                    "ALONG_N": along,
                    **overlapped(tile.overlap and overlap),
                },
                args,
                tile.warps,
            )
        )
    combined = launch(
        device.combine,
        (tokens, -(-outs // BLOCK)),
        {
            "K": k,
            "KP": power(k),
            "BLOCK": min(BLOCK, power(outs)),
            **overlapped(chosen[1].overlap and overlap),
        },
        (
            y,
            index,
            output,
            outs,
            experts,
            *output.stride(),
        ),
    )
    return *products, combined


def _descriptor(weight: Tensor, tile: Tile, along: bool) -> Any:
    """As that of a linear's weight."""
    strides = [n * weight.dtype.itemsize for n in weight.stride() if n != 1]
    along_one = 1 in weight.stride()[1:] and len(strides) == 2
    if not along_one or any(n % ALIGNED or n <= 0 for n in strides) or address(weight) % ALIGNED:
        return weight
    memory = weight.transpose(1, 2) if along else weight
    block = (tile.columns, tile.rows) if along else (tile.rows, tile.columns)
    return TensorDescriptor(memory, [*memory.shape], [*memory.stride()], [1, *block])


# Calls like one before ----------------------------------------------------------------------------

MEMORY_OF_TWO, MEMORY_OF_THREE = (5, 6), (6, 6, 3)
"""How many arguments of each launch, its first ones, are memory. The others are numbers."""

MOST_WEIGHTS = 1024
"""Descriptors of one product that are kept: a model has one for each of its layers."""


def repeated(call: Experts) -> Callable[[Experts], None]:
    """`experts`, of calls that differ from this one in their memory alone: they have its sizes,
    strides, dtypes, device and numbers."""
    copied = (call.top_k_index, call.top_k_weights, call.gate_up_bias, call.down_bias)
    own = 0 < call.x.shape[0] <= tiles.MOST_TOKENS and not deterministic(call.policy)
    if not own or any(x is not None and not x.is_contiguous() for x in copied):
        return experts
    return Repeated(call)


class Repeated:
    """Calls that make the same launches with other memory.

    The launches of the first calls, which find the compiled kernels, are made as ever.
    """

    def __init__(self, call: Experts) -> None:
        tokens, k = call.top_k_index.shape
        _, outs, inner = call.down.shape
        self._act = tokens * k, inner
        self._y = tokens * k, outs
        self._block = tiles.block_of(tokens)
        self._two = _takes_two(call)
        self._functions = device.few_tokens, device.combine
        if self._two:
            self._functions = device.one_token_up, device.one_token_down
        self._made: tuple[Made, ...] = ()
        self._reads: tuple[Read, ...] = ()

    def __call__(self, call: Experts) -> None:
        if not (self._made and self._may_repeat(call)):
            self._begin(call)
        elif self._two:
            self._launch_two(call)
        else:
            self._launch_three(call)

    def _may_repeat(self, call: Experts) -> bool:
        """Triton compiles other kernels for memory that is not aligned, and its debuggers and
        profilers see only the launches that it makes itself."""
        at = call.x.data_ptr() | call.gate_up.data_ptr() | call.down.data_ptr()
        at |= call.top_k_index.data_ptr() | call.top_k_weights.data_ptr() | call.output.data_ptr()
        for bias in (call.gate_up_bias, call.down_bias):
            if bias is not None:
                at |= bias.data_ptr()
        one, other = self._functions
        return at % ALIGNED == 0 and not BESIDE.looks and is_plain(one) and is_plain(other)

    def _begin(self, call: Experts) -> None:
        """Make the launches as ever, and keep what was launched."""
        found = _one_token(call, None) if self._two else _few_tokens(call, None, self._block)
        made = [each for each in found if each is not None]
        if len(made) < len(found) or not self._may_repeat(call):
            return
        self._reads = tuple(Read(values[1]) for _, values in made[:2])
        memory = MEMORY_OF_TWO if self._two else MEMORY_OF_THREE
        pairs = zip(made, memory, strict=True)
        self._made = tuple((launch, values[count:]) for (launch, values), count in pairs)

    def _launch_two(self, call: Experts) -> None:
        (up, of_up), (down, of_down) = self._made
        index, weights = call.top_k_index, call.top_k_weights
        act = call.x.new_empty(self._act)
        up(call.x, call.gate_up, call.gate_up_bias, index, act, *of_up)
        down(act, call.down, call.down_bias, index, weights, call.output, *of_down)

    def _launch_three(self, call: Experts) -> None:
        (up, of_up), (down, of_down), (combine, of_sum) = self._made
        read_up, read_down = self._reads
        x, index, weights = call.x, call.top_k_index, call.top_k_weights
        act = x.new_empty(self._act)
        y = x.new_empty(self._y, dtype=torch.float32)
        up(x, read_up.of(call.gate_up), call.gate_up_bias, index, weights, act, *of_up)
        down(act, read_down.of(call.down), call.down_bias, index, weights, y, *of_down)
        combine(y, index, call.output, *of_sum)


class Read:
    """What launches read a weight by: the tensor, or a descriptor of it.

    A descriptor is an address here and no tensor, so it holds no memory, and serves whatever weight
    of this kind is at the address.
    """

    def __init__(self, read: Any) -> None:
        self._like = None
        if isinstance(read, TensorDescriptor):
            self._like = replace(read, base=Pointer(read.base.dtype, 0))
        self._known: dict[int, TensorDescriptor] = {}

    def of(self, weight: Tensor) -> Any:
        """What a launch takes in the weight's place."""
        if self._like is None:
            return weight
        at = weight.data_ptr()
        found = self._known.get(at)
        if found is None:
            if len(self._known) >= MOST_WEIGHTS:
                self._known.clear()
            found = self._known[at] = replace(self._like, base=Pointer(weight.dtype, at))
        return found
