"""The mask function that transformers calls once a forward and layer type.

`dense`: a bool `[B, 1, S, T]`, or None where the pattern is plain and without padding.
`explicit`: as dense, but a causal mask is always written out, for models that compute with it.
`additive`: floats that are added to scores, as eager attention gets them.
`compact`: a descriptor (see descriptor.py) where it is exact, else dense.
`auto`: compact on CUDA, dense elsewhere.

A descriptor can say "keys from a to b", so each row of a 2-D mask must be one run of ones. The host checks the mask itself, and waits for
the device. Where it must not wait, the mask is dense: under a tracer, and in one-token steps on CUDA under `auto`. One-token steps inside
`generate()` of a patched model need no check: the prompt's mask was checked, and generate appends ones only (attnops.hf.generation).
Outside of it, `mask="compact"` waits at one-token steps too.

A cache of pages gets a descriptor in every mode: pages hold a row's tokens without its padding, so that a mask may say only how much
padding a row begins with. Holes, padding on the right, a mask shorter than the text, another padding than before, and more tokens than
the cache has room for are errors. Where the host must not wait, the device asserts instead.

Outputs of padding are finite, and differ from eager's: a query that sees no key gives 0 (in eager: the mean of all values), and with right
padding a padded query sees padded keys in a descriptor. Only generate() from a right-padded prompt, of which transformers itself warns,
and a loss whose label is the first token after left padding read them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, eager_mask, sdpa_mask

from attnops.errors import InvalidInput, fail
from attnops.hf import descriptor
from attnops.hf.descriptor import Pattern
from attnops.hf.generation import Generation, Verdict, current_generation
from attnops.problem import pretended

Mode = Literal["auto", "dense", "explicit", "compact", "additive"]
MODES: tuple[Mode, ...] = ("auto", "dense", "explicit", "compact", "additive")


_FAR = ("cuda",)  # device types that run behind the host: a read of their data waits, and a mask costs more than lengths

_RUN = 'zeros on the left and ones up to the newest token: pages hold no other pattern. Use cache="hf" for such masks'
_STOP = "attnops: a mask that pages cannot follow, or a cache that is full"
_SAME = "the padding of the first step, in every step: pages hold the tokens that were not padding then"


class Call(NamedTuple):
    """One request for a mask. Query i is at position i + q_offset, key j at j + kv_offset.

    padding: bool `[B, positions]`, or None.
    may_skip: None may stand for a plain causal mask. It may not where a compiled step needs the same kind of mask every time.
    """

    batch: int
    queries: int
    keys: int
    q_offset: int | Tensor
    kv_offset: int
    padding: Tensor | None
    device: torch.device
    mode: Mode
    may_skip: bool


def mask_function(mode: Mode) -> Callable[..., Tensor | None]:
    """A function for `AttentionMaskInterface.register`."""

    def attnops_mask(
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: Any = 0,  # an int, or a 0-dim tensor for a static cache
        kv_offset: Any = 0,  # an int, or a tensor for a cache of pages, see PagedLayer.get_mask_sizes
        mask_function: Callable[..., Any] = causal_mask_function,
        attention_mask: Tensor | None = None,
        local_size: int | None = None,
        allow_is_causal_skip: bool = True,
        allow_is_bidirectional_skip: bool = False,
        use_vmap: bool = False,
        config: Any = None,
        device: torch.device | str = "cpu",
        **others: Any,
    ) -> Tensor | None:
        pads: Any = kv_offset
        if isinstance(pads, Tensor) and pads.dim() > 0:  # of a cache of pages alone
            call = Call(batch_size, q_length, kv_length, q_offset, 0, attention_mask, torch.device(device), mode, False)
            # transformers forbids the skip in one-token steps of every cache that can be compiled. It edits no sliding pattern of one
            # token over a cache: packed texts have no cache, and blocks of an image come with the prompt.
            skip = allow_is_causal_skip or (q_length == 1 and local_size is not None)
            pattern = pattern_of(call, mask_function, local_size, skip, allow_is_bidirectional_skip, use_vmap, config)
            if pattern is None or not pattern.causal:
                fail(InvalidInput, "mask_function", "another pattern", "causal, or a causal window, for a cache of pages")
            start = _left_padding(call, pads) if pads.dim() == 1 else pads[:, 0]
            return descriptor.build(pattern, batch_size, start, q_offset + q_length, q_offset, 0, call.device)
        call = Call(batch_size, q_length, kv_length, q_offset, kv_offset, attention_mask, torch.device(device), mode, allow_is_causal_skip)
        if mode == "compact" or (mode == "auto" and far(call.device)):
            pattern = pattern_of(call, mask_function, local_size, allow_is_causal_skip, allow_is_bidirectional_skip, use_vmap, config)
            if pattern is not None:
                exact, mask = _compact(call, pattern)
                if exact:
                    return mask
        skips = mode not in ("explicit", "additive") and allow_is_causal_skip
        if skips and torch.compiler.is_compiling() and _says_nothing(call, local_size):
            return None
        skip = not _must_not_wait(call)
        return (eager_mask if mode == "additive" else sdpa_mask)(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            mask_function=mask_function, attention_mask=attention_mask, local_size=local_size, allow_is_causal_skip=skips and skip,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip and skip, use_vmap=use_vmap, config=config, device=device, **others,
        )  # fmt: skip

    return attnops_mask


def _says_nothing(call: Call, local_size: int | None) -> bool:
    """Do the sizes alone show that it is plainly causal? transformers writes every mask out while a compiler traces."""
    if call.padding is not None or isinstance(call.q_offset, Tensor):
        return False
    if local_size is not None and not statically_known_true(call.keys < local_size):
        return False
    if not statically_known_true(call.q_offset + call.queries == call.kv_offset + call.keys):
        return False
    return statically_known_true(call.queries == call.keys) or statically_known_true(call.queries == 1)


# Patterns -------------------------------------------------------------------------------------------------------------


def pattern_of(
    call: Call, rule: Callable[..., Any], local_size: int | None, causal_skip: bool, bidirectional_skip: bool, use_vmap: bool, config: Any
) -> Pattern | None:
    """The pattern of transformers' `rule`; None: a descriptor cannot describe it. The other arguments are those of a mask function."""
    if use_vmap:
        return None
    if rule is bidirectional_mask_function:
        return Pattern(False, 0) if bidirectional_skip else None
    # transformers forbids the skip when it edits the mask, and also in one-token steps of a static cache, where it does not edit it.
    if not causal_skip and call.queries != 1:
        return None
    if rule is causal_mask_function:
        return Pattern(True, 0) if causal_skip or isinstance(call.q_offset, Tensor) else None
    if torch.compiler.is_compiling():
        # A tracer hides closures. The skip is allowed for unedited patterns only: sliding, or chunked.
        plain = causal_skip and local_size is not None and getattr(config, "attention_chunk_size", None) is None
        return Pattern(True, local_size or 0) if plain else None
    window = _window(rule)
    return None if window is None else Pattern(True, window)


def _cells(function: Any) -> dict[str, Any]:
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    return dict(zip(names, (cell.cell_contents for cell in function.__closure__ or ()), strict=True)) if names else {}


def _window(rule: Callable[..., Any]) -> int | None:
    """The window of transformers' `sliding_window_causal_mask_function(window)`; None for any other function."""
    parts = _cells(rule).get("mask_functions", ())
    if len(parts) != 2 or parts[1] is not causal_mask_function:
        return None
    if not parts[0].__qualname__.startswith("sliding_window_overlay."):
        return None
    window = _cells(parts[0]).get("sliding_window")
    return window if isinstance(window, int) and window > 0 else None


# The descriptor -------------------------------------------------------------------------------------------------------


def _compact(call: Call, pattern: Pattern) -> tuple[bool, Tensor | None]:
    """(is a descriptor exact, the mask). (False, None): the mask must be dense."""
    padding = call.padding
    if padding is None:
        return True, _unpadded(call, pattern)
    if tracing(padding) or padding.shape[1] == 0:
        return False, None
    low = call.kv_offset
    high = call.q_offset + call.queries if pattern.causal else low + call.keys
    if pattern.causal and not isinstance(high, Tensor) and padding.shape[1] < high:
        return False, None
    generation = current_generation() if pattern.causal else None
    verdict = generation.verdict if generation is not None and call.queries == 1 else None
    if verdict is None and generation is None and _must_not_wait(call):
        return False, None
    if verdict is not None and verdict.full:
        return True, _unpadded(call, pattern)
    columns = torch.arange(padding.shape[1], device=padding.device)
    seen = padding & (columns >= low) & (columns < high)
    length = padding.shape[1]
    first = length - (seen * (length - columns)).amax(-1)
    past = (seen * (columns + 1)).amax(-1)
    if verdict is None:
        verdict = _look(call, pattern, seen.sum(-1), first, past, high)
        if generation is not None:
            generation.note(verdict)
    if not verdict.run:
        return False, None
    if verdict.full:
        return True, _unpadded(call, pattern)
    end = high - low if pattern.causal else (past - low).clamp(min=0)
    start = (first - low).clamp(min=0)
    # In a row without any key `start` is past the end, which would give kernels a negative length.
    start = torch.minimum(start, end) if isinstance(end, Tensor) else start.clamp(max=end)
    return True, descriptor.build(pattern, call.batch, start, end, call.q_offset, call.kv_offset, call.device)


def _unpadded(call: Call, pattern: Pattern) -> Tensor | None:
    if not pattern.causal:
        return None
    keys, queries = call.keys, call.queries
    end = call.q_offset + queries - call.kv_offset
    unbounded = pattern.window == 0 or (isinstance(keys, int) and keys <= pattern.window)
    if call.may_skip and unbounded and not isinstance(call.q_offset, Tensor):
        if end == keys and (queries == keys or queries == 1):
            return None
        if queries != 1 and call.q_offset == 0 and call.kv_offset == 0:
            return None  # the first tokens of an empty static cache: the attention function cuts the keys
    return descriptor.build(pattern, call.batch, 0, end, call.q_offset, call.kv_offset, call.device)


def _look(call: Call, pattern: Pattern, count: Tensor, first: Tensor, past: Tensor, high: int | Tensor) -> Verdict:
    """The verdict on the rows' runs (`[B]` each: ones, first one, one past the last one). The host waits for the device here."""
    assert call.padding is not None
    empty = count == 0
    run = (count == past - first) | empty
    if pattern.causal and (call.queries == 1 or isinstance(high, Tensor)):
        run = run & ((past == high) | empty)
    grows = run & ((past == call.padding.shape[1]) | empty)
    flags = torch.stack([run.all(), (count == high - call.kv_offset).all(), grows.all()]).tolist()
    return Verdict(*flags)


def far(device: torch.device) -> bool:
    """Does the host wait for this device when it reads its data?"""
    # `explain` for another machine needs the masks of that machine.
    target = pretended()
    return (device.type if target is None else target.device) in _FAR


def _must_not_wait(call: Call) -> bool:
    return call.mode != "compact" and call.queries == 1 and call.padding is not None and far(call.device)


def tracing(padding: Tensor) -> bool:
    """Is the data of `padding` unreadable: under a compiler, of a fake tensor, or while a CUDA graph is captured?"""
    return (
        torch.compiler.is_compiling()
        or isinstance(padding, FakeTensor)
        or (padding.device.type == "cuda" and torch.cuda.is_current_stream_capturing())
    )


# Pages ----------------------------------------------------------------------------------------------------------------


def _left_padding(call: Call, known: Tensor) -> Tensor:
    """int64 `[B]`: the padding of each row. known: `[rows]`, the padding so far, EMPTY for a row that the last step did not have."""
    if call.batch > known.shape[0]:
        fail(InvalidInput, "batch size", call.batch, f"at most {known.shape[0]}, the rows of this cache")
    own, known = known, known[: call.batch]
    seen = torch.as_tensor(call.q_offset, device=known.device)
    high = seen + call.queries
    unseen = tracing(high)
    generation = None if unseen else current_generation()
    fits = high <= call.keys
    if generation is not None and generation.checked is own and call.queries == 1 and far(call.device) and _generated(call, generation):
        torch.ops.aten._assert_async.msg(fits, _STOP)
        return known
    if call.padding is None:
        start = torch.zeros_like(known)
        run = torch.ones_like(known, dtype=torch.bool)
    else:
        length = call.padding.shape[1]
        columns = torch.arange(length, device=known.device)
        shown = call.padding & (columns < high)
        start = torch.minimum(length - (shown * (length - columns)).amax(-1), high)
        run = (shown.sum(-1) == high - start) & (high <= length)
    same = torch.where(known >= seen, start >= seen, start == known)
    # The host checks a prompt of one token as well: all later steps rely on that.
    first = generation is not None and generation.checked is not own
    if unseen or (call.queries == 1 and call.mode != "compact" and far(call.device) and not first):
        torch.ops.aten._assert_async.msg((run & same).all() & fits, _STOP)
        return start
    run_all, same_all, fits_all, past = torch.stack([run.all(), same.all(), fits, seen]).tolist()
    if not fits_all:
        fail(InvalidInput, "length", past + call.queries, f"at most {call.keys} positions, the room of this cache")
    if not run_all:
        fail(InvalidInput, "attention_mask", "holes, padding on the right, or too few columns", _RUN)
    if not same_all:
        fail(InvalidInput, "attention_mask", "another padding than before, or rows that the last step had not", _SAME)
    if generation is not None:
        generation.checked = own
    return start


def _generated(call: Call, generation: Generation) -> bool:
    """Is this a step after the prompt? Chunks of a prompt may have one token, too."""
    return call.padding is not None and generation.prompt is not None and call.padding.shape[1] > generation.prompt
