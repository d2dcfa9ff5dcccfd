"""A mask in four numbers a request, where the pattern allows it: no `[S, T]` tensor is built or
read. And the mask function that transformers calls, which answers for caches of pages itself.

transformers passes any 4-D tensor from the mask function to the attention function untouched, so
the descriptor is one:

    int64 [B, kind, 1 + window, 4]    kind 1: causal, 2: bidirectional; window 0: unbounded
    fields: kv_start, kv_end (indices into the keys at hand), q_offset, kv_offset (positions, as
        transformers gave them)

The shape holds the facts that select a kernel; the data may change from step to step. The two inner
dims are expanded, so the memory is that of `[B, 4]`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from attnops.core.errors import InvalidInput, fail
from attnops.core.private_torch import FakeTensor, assert_async, capturing, count_dispatch_modes
from attnops.core.problem import _OVERRIDE
from attnops.hf.attention import packed
from attnops.hf.generation import Generation, current_generation, on_host

FIELDS = 4
DTYPE = torch.int64
Number = int | Tensor

# attribute of a mask that was made eagerly: None, or its version and range when it was read
_RANGE = "_attnops_range"

BUILT = "_attnops_built"
"""Attribute of a mask that was made eagerly: what `read` gives of it, views of its memory. Layers
that read it make no call."""


class Pattern(NamedTuple):
    """The keys a query may see, apart from padding. window: keys a causal query sees, its own
    included; 0 is unbounded."""

    causal: bool
    window: int


class Range(NamedTuple):
    """A descriptor as `attnops.attention` takes it. window_left: keys left of the query's own, -1
    unbounded. start, end: int `[B]`.

    whole: the host knows that each row sees all keys from the first one on: it has no padding and
    no past.
    """

    causal: bool
    window_left: int
    start: Tensor
    end: Tensor
    whole: bool = False


def build(
    pattern: Pattern,
    batch: int,
    start: Number,
    end: Number,
    q_offset: Number,
    kv_offset: Number,
    device: torch.device,
    whole: bool = False,
) -> Tensor:
    """The descriptor of `batch` requests. Each number is an int, a 0-dim tensor or `[batch]`.

    whole: as `Range` has it.
    """
    # Field by field in memory: a kernel that wants contiguous lengths gets them without a copy.
    rows = [
        x if isinstance(x, Tensor) else torch.full((), x, dtype=DTYPE, device=device)
        for x in (start, end, q_offset, kv_offset)
    ]
    fields = torch.stack([row.to(device=device, dtype=DTYPE).expand(batch) for row in rows])
    mask = fields.t()[:, None, None, :].expand(
        batch, 1 if pattern.causal else 2, 1 + pattern.window, FIELDS
    )
    if not (
        torch.compiler.is_compiling()
        or count_dispatch_modes()
        or (mask.is_cuda and capturing(mask))
    ):
        built = Range(pattern.causal, pattern.window - 1, fields[0], fields[1], whole)
        setattr(mask, BUILT, built)
        if not mask.is_inference():  # which has no version
            setattr(mask, _RANGE, None)
    return mask


def read(mask: Tensor, batch: int) -> Range:
    """The inverse of `build`. Raises InvalidInput when `mask` is an int64 tensor of another shape:
    no mask transformers or attnops made."""
    if (
        mask.dim() != 4
        or mask.shape[3] != FIELDS
        or mask.shape[1] not in (1, 2)
        or mask.shape[0] != batch
    ):
        want = (
            f"bool or float [B, H, S, T], or attnops' descriptor [{batch}, 1 or 2, 1 + "
            f"window, {FIELDS}]. A model that edits its "
        )
        fail(
            InvalidInput,
            "attention_mask",
            f"int64 {list(mask.shape)}",
            want + 'masks needs attnops.patch(model, mask="dense")',
        )
    fields = mask[:, 0, 0]
    return Range(mask.shape[1] == 1, mask.shape[2] - 2, fields[:, 0], fields[:, 1])


def read_once(mask: Tensor, batch: int) -> Range:
    """As `read`, for all layers of a step: an eager mask keeps the range that the first layer
    reads, in int32, which kernels take.

    Not so a graph's mask, which is the same tensor at every replay: a replay does not change its
    version.
    """
    if torch.compiler.is_compiling() or not hasattr(mask, _RANGE) or capturing(mask):
        return read(mask, batch)
    kept: tuple[int, Range] | None = getattr(mask, _RANGE)
    if kept is None or kept[0] != mask._version or mask.shape[0] != batch:
        found = read(mask, batch)
        start, end = found.start.to(torch.int32), found.end.to(torch.int32)
        kept = mask._version, found._replace(start=start, end=end)
        setattr(mask, _RANGE, kept)
    return kept[1]


# What transformers asks for -----------------------------------------------------------------------


Mode = Literal["auto", "dense", "explicit", "compact", "additive"]
MODES: tuple[Mode, ...] = get_args(Mode)

# Device types that run behind the host: a read of their data waits, and a mask costs more than
# lengths.
_FAR = ("cuda", "hip")

_STOP = "attnops: a mask that pages cannot follow, or a cache that is full"


class Request(NamedTuple):
    """One request for a mask, in transformers' own names. Query i is at position i + q_offset, key
    j at j + kv_offset.

    q_offset: an int, or a tensor `[]` for a static cache. kv_offset: an int, or a tensor for pages,
    see PagedLayer.get_mask_sizes.
    attention_mask: bool `[B, positions]`, False for padding; or None. local_size: the window.
    allow_is_causal_skip, allow_is_bidirectional_skip: may None stand for a plain causal or
    bidirectional mask? transformers gives the second one for bidirectional masks only.
    """

    mode: Mode
    batch_size: int
    q_length: int
    kv_length: int
    q_offset: Any = 0
    kv_offset: Any = 0
    mask_function: Callable[..., Any] = causal_mask_function
    attention_mask: Tensor | None = None
    local_size: int | None = None
    allow_is_causal_skip: bool = True
    allow_is_bidirectional_skip: bool | None = None
    use_vmap: bool = False
    config: Any = None
    device: torch.device = torch.device("cpu")


def interface_function(
    mode: Mode, of_keys: Callable[[Request, dict[str, Any]], Tensor | None]
) -> Callable[..., Tensor | None]:
    """A function for `AttentionMaskInterface.register`. of_keys: makes the masks of all calls but
    those over pages, of (a request, transformers' arguments)."""

    def attnops_mask(
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: Any = 0,
        kv_offset: Any = 0,
        **more: Any,
    ) -> Tensor | None:
        """The mask of a forward and a kind of layer. more: as the fields of Request, and others
        that transformers' functions take."""
        given = {
            "batch_size": batch_size,
            "q_length": q_length,
            "kv_length": kv_length,
            "q_offset": q_offset,
            "kv_offset": kv_offset,
        }
        given |= more | {"device": torch.device(more.get("device", "cpu"))}
        request = Request(
            mode, **{name: value for name, value in given.items() if name in Request._fields}
        )
        if isinstance(kv_offset, Tensor) and kv_offset.dim() > 0:
            return _of_pages(request)
        return of_keys(request, given)

    return attnops_mask


def pattern_of(request: Request) -> Pattern | None:
    """The pattern of transformers' rule; None: a descriptor cannot describe it."""
    rule = request.mask_function
    if request.use_vmap:
        return None
    if rule is bidirectional_mask_function:
        return Pattern(False, 0) if request.allow_is_bidirectional_skip else None
    # transformers forbids the skip when it edits the mask, and also in one-token steps of a static
    # cache, where it does not edit it.
    if not request.allow_is_causal_skip and request.q_length != 1:
        return None
    if rule is causal_mask_function:
        return (
            Pattern(True, 0)
            if request.allow_is_causal_skip or isinstance(request.q_offset, Tensor)
            else None
        )
    if torch.compiler.is_compiling():
        # A tracer hides closures. The skip is allowed for unedited patterns only: sliding, or
        # chunked.
        return plain_pattern(
            request, request.allow_is_causal_skip and request.local_size is not None
        )
    window = _window_of(rule)
    return None if window is None else Pattern(True, window)


def plain_pattern(request: Request, plain: bool) -> Pattern | None:
    """The pattern of a rule that a tracer does not show. plain: it may be chunked, but nothing
    else."""
    plain = plain and getattr(request.config, "attention_chunk_size", None) is None
    return Pattern(True, request.local_size or 0) if plain else None


def _window_of(rule: Callable[..., Any]) -> int | None:
    """That of transformers' sliding_window_causal_mask_function(window), which joins two functions
    in a closure; None: another rule."""
    parts = packed.cells(rule).get("mask_functions", ())
    if (
        len(parts) != 2
        or parts[1] is not causal_mask_function
        or not parts[0].__qualname__.startswith("sliding_window_overlay.")
    ):
        return None
    window = packed.cells(parts[0]).get("sliding_window")
    return window if isinstance(window, int) and window > 0 else None


def range_of(
    request: Request, pattern: Pattern, start: Any, end: Any, low: Any, whole: bool = False
) -> Tensor:
    offset, device = request.q_offset, request.device
    return build(pattern, request.batch_size, start, end, offset, low, device, whole)


def first_of(seen: Tensor, columns: Tensor) -> Tensor:
    """int64 `[B]`: the first column of each row that is seen, their number if none is."""
    return columns.shape[0] - (seen * (columns.shape[0] - columns)).amax(-1)


def far(device: torch.device) -> bool:
    """Does the host wait for this device when it reads its data?"""
    # `explain` for another machine needs the masks of that machine.
    target = _OVERRIDE.target
    return (device.type if target is None else target.device) in _FAR


def tracing(padding: Tensor) -> bool:
    """Is the data of `padding` unreadable: under a compiler, of a fake tensor, or while a CUDA
    graph is captured?"""
    return (
        torch.compiler.is_compiling()
        or isinstance(padding, FakeTensor)
        or (padding.is_cuda and capturing(padding))
    )


# Pages -------------------------------------------------------------------------------------------


def _of_pages(request: Request) -> Tensor:
    # transformers forbids the skip in one-token steps of every cache that can be compiled, but
    # edits no sliding pattern there: packed texts have no cache, and blocks of an image come with
    # the prompt.
    skip = request.allow_is_causal_skip or (
        request.q_length == 1 and request.local_size is not None
    )
    pattern = pattern_of(request._replace(allow_is_causal_skip=skip))
    if pattern is None or not pattern.causal:
        fail(
            InvalidInput,
            "mask_function",
            "another pattern",
            "causal, or a causal window, for a cache of pages",
        )
    known = request.kv_offset
    end = request.q_offset + request.q_length
    if known.dim() != 1:
        return range_of(request, pattern, known[:, 0], end, 0)
    start, numbers = _read_padding(request, known)
    whole = bool(numbers) and not any(numbers)
    return range_of(request, pattern, start, end, 0, whole)


def padding_of(
    mask: Tensor | None, pages: Any, rows: int, columns: int, fresh: bool
) -> tuple[Tensor, list[int]]:
    """(int64 `[rows]`, the padding of each row of a prompt over these pages, as the model's mask
    function finds and checks it; as numbers the positions before the prompt, and that padding).

    mask: `[rows, positions]`, as `generate()` has it. columns: of the prompt. fresh: the pages hold
    no token. The host waits for the device once; for fresh pages only where it has not read the
    mask. Raises InvalidInput.
    """
    request = Request("auto", rows, columns, pages.sizes.length, pages.seen, attention_mask=mask)
    if not fresh:
        return _read_padding(request, pages.pad)
    own = _known(request, pages.pad)
    if mask is not None and mask.shape[0] != rows:
        got, want = f"{list(mask.shape)}, {mask.shape[0]} rows", f"{rows}, as input_ids"
        fail(InvalidInput, "attention_mask.shape", got, want)
    generation = current_generation()
    shown = None if mask is None else _zeros_of(on_host(mask), columns)
    if shown is None:
        _check_length(request, columns)
        if generation is not None:
            generation.checked = pages.pad
        return pages.positions[:1].expand_as(own), [0] * (1 + rows)
    known = torch.zeros(rows, dtype=torch.int64, device="cpu")
    read = _run(request._replace(attention_mask=shown), known, columns)
    return _checked(request, pages.pad, _Read(0, known, *read), generation)


def _zeros_of(shown: Tensor, columns: int) -> Tensor | None:
    """A mask on the host; None for one of so many columns without zeros, in which there is nothing
    to search for."""
    return None if shown.shape[1] == columns and shown.all() else shown


class _Read(NamedTuple):
    """On the CPU: the positions so far; of each row the padding so far, and what `_run` returns."""

    past: int
    known: Tensor
    start: Tensor
    run: Tensor


def _read_padding(request: Request, own: Tensor) -> tuple[Tensor, list[int]]:
    """(int64 `[B]`, the padding of each row; the positions so far and that padding as numbers,
    where the host reads them, else []).

    own: `[rows]`, the padding so far of all rows of the cache, EMPTY for a row that the last step
    did not have.
    """
    known, queries = _known(request, own), request.q_length
    seen = torch.as_tensor(request.q_offset, device=known.device)
    high = seen + queries
    unseen = tracing(high)
    generation = None if unseen else current_generation()
    checked = getattr(generation, "checked", None) is own
    one = queries == 1 and far(known.device)
    if checked and _is_after_prompt(request, generation, one):
        assert_async(high <= request.kv_length, _STOP)
        return known, []
    # The host checks a prompt of one token as well: all later steps rely on that.
    if unseen or (one and request.mode != "compact" and (generation is None or checked)):
        start, run = _run(request, known, high)
        fits = high <= request.kv_length
        assert_async((run & _same(start, known, seen)).all() & fits, _STOP)
        return start, []
    return _checked(request, own, _on_host(request, known, seen), generation)


def _known(request: Request, own: Tensor) -> Tensor:
    """own: of all rows of the cache. Raises InvalidInput for more rows."""
    batch, most = request.batch_size, own.shape[0]
    if batch > most:
        fail(InvalidInput, "batch size", batch, f"at most {most}, the rows of this cache")
    return own[:batch]


def _checked(
    request: Request, own: Tensor, read: _Read, generation: Generation | None
) -> tuple[Tensor, list[int]]:
    """As `_read_padding`, of what the host has read. Raises InvalidInput."""
    starts = _checked_padding(read, request)
    if generation is not None:
        generation.checked = own
    if read.start.device == own.device:
        return read.start, [read.past, *starts]
    known = _known(request, own)
    high = read.past + request.q_length
    start = _run(request, known, high)[0] if any(starts) else torch.zeros_like(known)
    return start, [read.past, *starts]


def _checked_padding(read: _Read, request: Request) -> list[int]:
    """The padding of each row. Raises InvalidInput where pages cannot hold the tokens."""
    _check_length(request, read.past + request.q_length)
    if not read.run.all():
        want = (
            "zeros on the left and ones up to the newest token: pages hold no other pattern. Use "
            'cache="hf" for such masks'
        )
        got = "holes, padding on the right, or too few columns"
        fail(InvalidInput, "attention_mask", got, want)
    if not _same(read.start, read.known, read.past).all():
        want = (
            "the padding of the first step, in every step: pages hold the tokens that were not "
            "padding then"
        )
        got = "another padding than before, or rows that the step before left out"
        fail(InvalidInput, "attention_mask", got, want)
    return read.start.tolist()


def _check_length(request: Request, length: int) -> None:
    """Raise InvalidInput for more positions than the cache has room for."""
    if length > request.kv_length:
        want = f"at most {request.kv_length} positions, the room of this cache"
        fail(InvalidInput, "length", length, want)


def _same(start: Tensor, known: Tensor, seen: Tensor | int) -> Tensor:
    """Is the padding of each row that of its first step? known: so far, see `_read_padding`. seen:
    positions so far."""
    return torch.where(known >= seen, start >= seen, start == known)


def _on_host(request: Request, known: Tensor, seen: Tensor) -> _Read:
    """The host waits for the device once, and reads some numbers a row and no mask."""
    start, run = _run(request, known, seen + request.q_length)
    numbers = torch.cat([seen.reshape(1), known, start, run]).cpu()
    past, *of_rows = numbers.split([1, *[known.shape[0]] * 3])
    return _Read(int(past), *of_rows)


def _is_after_prompt(request: Request, generation: Any, one: bool) -> bool:
    """Is it a step after the prompt of this generation? one: it has one token, as chunks of a
    prompt may have, too."""
    padding, prompt = request.attention_mask, generation.prompt
    return one and prompt is not None and padding is not None and padding.shape[1] > prompt


def _run(request: Request, known: Tensor, high: Tensor | int) -> tuple[Tensor, Tensor]:
    """Of each row: (the first position that is no padding, are those from it up to `high`
    tokens?)."""
    padding = request.attention_mask
    if padding is None:
        return torch.zeros_like(known), torch.ones_like(known, dtype=torch.bool)
    columns = torch.arange(padding.shape[1], device=known.device)
    shown = padding.bool() & (columns < high)
    start = first_of(shown, columns).clamp(max=high)
    run = (shown.sum(-1) == high - start) & (high <= padding.shape[1])
    return start, run
