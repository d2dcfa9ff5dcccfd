"""The mask function that transformers calls once a forward and layer type.

`dense`: a bool `[B, 1, S, T]`, or None where the pattern is plain and without padding.
`explicit`: as dense, but a causal mask is always written out, for models that compute with it.
`additive`: floats that are added to scores, as eager attention gets them.
`compact`: a descriptor (see descriptor.py and packed.py) where it is exact, else dense.
`auto`: compact on CUDA, dense elsewhere, except that packed documents, and training without padding, are compact on every device.

A descriptor can say "keys from a to b", so each row of a 2-D mask must be one run of ones. The host checks the mask itself, and waits for
the device. Where it must not wait, the mask is dense: under a tracer, and in one-token steps on CUDA under `auto`. One-token steps inside
`generate()` of a patched model need no check: generate appends ones only to the prompt's mask (attnops.hf.generation).

Packed documents need a count and no check. A compiled graph of a training step counts them when it runs. In other compiled graphs, and
while a CUDA graph is captured, layers without cumulative lengths write their mask out.

Where torch.jit.trace or torch.onnx.export records the model, masks are dense or additive.

A cache of pages gets a descriptor in every mode: pages hold a row's tokens without its padding, so that a mask may say only how much
padding a row begins with; any other mask is an error. Where the host must not wait, the device asserts instead.

In training a causal mask becomes packed requests and not ranges of keys, which the kernels with the fastest gradients do not take.

Outputs of padding are finite, and differ from eager's: a query that sees no key gives 0 (in eager: the mean of all values), and in a
descriptor a padded query may see padded keys: with right padding, and on either side among packed requests. Only generate() from a
right-padded prompt, of which transformers itself warns, and a loss whose label is the first token after left padding read them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from transformers import masking_utils
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, eager_mask, sdpa_mask

from attnops.core.errors import InvalidInput, fail
from attnops.core.private_torch import capturing
from attnops.core.problem import pretended
from attnops.core.record import need
from attnops.core.tracers import is_recorded
from attnops.hf.attention import descriptor, packed, positions
from attnops.hf.attention.descriptor import Pattern
from attnops.hf.generation import Verdict, current_generation

_JOINED_LAST = hasattr(masking_utils, "remap_positions_for_packed_sequence")
"""Does transformers join documents to a rule last, after blocks whose tokens see both ways? A tracer has to tell such a rule apart."""

_SHOWN = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)
"""Does Dynamo show the variables of a closure?"""

Mode = Literal["auto", "dense", "explicit", "compact", "additive"]
MODES: tuple[Mode, ...] = get_args(Mode)

_FAR = ("cuda", "hip")  # device types that run behind the host: a read of their data waits, and a mask costs more than lengths

_STOP = "attnops: a mask that pages cannot follow, or a cache that is full"


class Request(NamedTuple):
    """One request for a mask, as transformers makes it. Query i is at position i + q_offset, key j at j + kv_offset.

    q_offset: an int, or a tensor `[]` for a static cache. kv_offset: an int, or a tensor for pages, see PagedLayer.get_mask_sizes.
    padding: bool `[B, positions]`, or None.
    rule, window: transformers' mask_function and local_size.
    causal_skip, bidirectional_skip: may None stand for a plain causal or bidirectional mask? transformers gives the second one for
        bidirectional masks only.
    """

    batch: int
    queries: int
    keys: int
    q_offset: Any
    kv_offset: Any
    padding: Tensor | None
    device: torch.device
    mode: Mode
    rule: Callable[..., Any]
    window: int | None
    causal_skip: bool
    bidirectional_skip: bool | None
    use_vmap: bool
    config: Any


def mask_function(mode: Mode) -> Callable[..., Tensor | None]:
    """A function for `AttentionMaskInterface.register`."""

    def attnops_mask(
        batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: Any = 0,
        mask_function: Callable[..., Any] = causal_mask_function, attention_mask: Tensor | None = None, local_size: int | None = None,
        allow_is_causal_skip: bool = True, allow_is_bidirectional_skip: bool | None = None, use_vmap: bool = False, config: Any = None,
        device: torch.device | str = "cpu", **others: Any,
    ) -> Tensor | None:  # fmt: skip
        request = Request(
            batch_size, q_length, kv_length, q_offset, kv_offset, attention_mask, torch.device(device), mode, mask_function, local_size,
            allow_is_causal_skip, allow_is_bidirectional_skip, use_vmap, config,
        )  # fmt: skip
        if isinstance(kv_offset, Tensor) and kv_offset.dim() > 0:
            return _of_pages(request)
        if mask_function is not bidirectional_mask_function and not torch.compiler.is_compiling():
            positions.look(mask_function, q_length)
        short = mode in ("auto", "compact") and not is_recorded()
        if short and (documents := _documents(request)) is not None:
            return documents
        compact = mode == "compact" or far(request.device) or (attention_mask is None and _trains(request))
        if short and compact and (pattern := pattern_of(request)) is not None:
            exact, mask = _compact(request, pattern)
            if exact:
                return mask
        low: Any = kv_offset
        skips = mode not in ("explicit", "additive") and allow_is_causal_skip
        if skips and torch.compiler.is_compiling():
            if _plainly_causal(request):
                return None
            skips = False  # transformers 5.24 also skips one query of more keys than it sees
        skip = not _must_not_wait(request)
        return (eager_mask if mode == "additive" else sdpa_mask)(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=low,
            mask_function=mask_function, attention_mask=attention_mask, local_size=local_size, allow_is_causal_skip=skips and skip,
            allow_is_bidirectional_skip=bool(allow_is_bidirectional_skip) and skip, use_vmap=use_vmap, config=config, device=device,
            **others,
        )  # fmt: skip

    return attnops_mask


def _plainly_causal(request: Request) -> bool:
    """Do the sizes alone show a plain causal mask? transformers writes every mask out while a compiler traces."""
    if request.padding is not None or isinstance(request.q_offset, Tensor):
        return False
    known, queries, keys = statically_known_true, request.queries, request.keys
    inside = request.window is None or known(keys < request.window)
    return inside and known(request.q_offset + queries == request.kv_offset + keys) and (known(queries == keys) or known(queries == 1))


def pattern_of(request: Request) -> Pattern | None:
    """The pattern of transformers' rule; None: a descriptor cannot describe it."""
    rule, window = request.rule, request.window
    if request.use_vmap:
        return None
    if rule is bidirectional_mask_function:
        return Pattern(False, 0) if request.bidirectional_skip else None
    # transformers forbids the skip when it edits the mask, and also in one-token steps of a static cache, where it does not edit it.
    if not request.causal_skip and request.queries != 1:
        return None
    if rule is causal_mask_function:
        return Pattern(True, 0) if request.causal_skip or isinstance(request.q_offset, Tensor) else None
    if torch.compiler.is_compiling():
        # A tracer hides closures. The skip is allowed for unedited patterns only: sliding, or chunked.
        plain = request.causal_skip and window is not None and getattr(request.config, "attention_chunk_size", None) is None
        return Pattern(True, window or 0) if plain else None
    # transformers' sliding_window_causal_mask_function(window) joins two functions in a closure.
    parts = packed.cells(rule).get("mask_functions", ())
    if len(parts) != 2 or parts[1] is not causal_mask_function or not parts[0].__qualname__.startswith("sliding_window_overlay."):
        return None
    window = packed.cells(parts[0]).get("sliding_window")
    return Pattern(True, window) if isinstance(window, int) and window > 0 else None


def _documents(request: Request) -> Tensor | None:
    """The descriptor of a causal rule that transformers restricts to packed documents; None: another rule."""
    rule = request.rule
    if request.causal_skip or request.padding is not None or request.use_vmap or not _alone(request):
        return None
    if getattr(rule, "__name__", "") != "and_mask":
        return None
    if torch.compiler.is_compiling():
        # A tracer hides closures. Without the skip, transformers itself joins causal rules by "and" with documents or chunks alone.
        plain = request.bidirectional_skip is None and getattr(request.config, "attention_chunk_size", None) is None
        plain = plain and not _may_see_ahead(rule)
        pattern = Pattern(True, request.window or 0) if plain else None
    else:
        pattern = pattern_of(request._replace(rule=packed.of_rule(rule), causal_skip=True))
    if pattern is None or not pattern.causal:
        return None
    begins = packed.documents(rule, request.batch, request.queries, request.device)
    return packed.build(begins, pattern.window, tracing(begins), counted=_counted(begins))


def _may_see_ahead(rule: Any) -> bool:
    """May the pattern that is joined with documents let a token see those after it? While a compiler traces."""
    if not _JOINED_LAST:
        return False
    if not _SHOWN:
        return True
    pattern = packed.of_rule(rule)
    return pattern is None or getattr(pattern, "__name__", "") == "or_mask"


def _counted(begins: Tensor) -> bool:
    """A tracer is given packed documents for every pass without a mask and a cache. Those that do not train are not worth the wait."""
    if torch.compiler.is_compiling():
        return torch.is_grad_enabled() and not torch.compiler.is_exporting()
    return not (capturing(begins) or (isinstance(begins, FakeTensor) and begins.fake_mode.shape_env is None))


def _alone(request: Request) -> bool:
    """Are the keys those of the queries, all of them, with none before?"""
    if isinstance(request.q_offset, Tensor) or isinstance(request.kv_offset, Tensor):
        return False
    known = statically_known_true
    return known(request.queries == request.keys) and known(request.q_offset == 0) and known(request.kv_offset == 0)


def _trains(request: Request) -> bool:
    """May the descriptor of a causal mask be packed requests, for kernels with a gradient?"""
    return torch.is_grad_enabled() and request.causal_skip and request.queries > 1 and _alone(request)


def _compact(request: Request, pattern: Pattern) -> tuple[bool, Tensor | None]:
    """(is a descriptor exact, the mask). (False, None): the mask must be dense."""
    padding = request.padding
    if padding is None:
        return True, _unpadded(request, pattern)
    low, length = request.kv_offset, padding.shape[1]
    high = request.q_offset + request.queries if pattern.causal else low + request.keys
    if tracing(padding) or length == 0 or (pattern.causal and not isinstance(high, Tensor) and length < high):
        return False, None
    generation = current_generation() if pattern.causal else None
    verdict = generation.verdict if generation is not None and request.queries == 1 else None
    if generation is None and _must_not_wait(request):
        return False, None
    if verdict is not None and verdict.full:
        return True, _unpadded(request, pattern)
    columns = torch.arange(length, device=padding.device)
    seen = padding & (columns >= low) & (columns < high)
    first, past = _first(seen, columns), (seen * (columns + 1)).amax(-1)
    if verdict is None:
        verdict = _look(request, pattern, seen.sum(-1), first, past, high)
        if generation is not None:
            generation.note(verdict)
    if not verdict.run:
        return False, None
    if verdict.full:
        return True, _unpadded(request, pattern)
    end = high - low if pattern.causal else (past - low).clamp(min=0)
    start = (first - low).clamp(min=0)
    if pattern.causal and _trains(request) and length == request.keys:
        return True, packed.build(packed.runs(padding), pattern.window, traced=False, padded=True)
    # In a row without any key `start` is past the end, which would give kernels a negative length.
    start = torch.minimum(start, end) if isinstance(end, Tensor) else start.clamp(max=end)
    return True, descriptor.build(pattern, request.batch, start, end, request.q_offset, low, request.device)


def _first(seen: Tensor, columns: Tensor) -> Tensor:
    """int64 `[B]`: the first column of each row that is seen, their number if none is."""
    return columns.shape[0] - (seen * (columns.shape[0] - columns)).amax(-1)


def _unpadded(request: Request, pattern: Pattern) -> Tensor | None:
    if not pattern.causal:
        return None
    keys, queries, low = request.keys, request.queries, request.kv_offset
    end = request.q_offset + queries - low
    unbounded = pattern.window == 0 or (isinstance(keys, int) and keys <= pattern.window)
    if request.causal_skip and unbounded and not isinstance(request.q_offset, Tensor):
        first = queries != 1 and request.q_offset == 0 and low == 0  # of an empty static cache: the attention function cuts the keys
        if first or (end == keys and (queries == keys or queries == 1)):
            return None
    if _trains(request):
        return packed.whole(request.batch, queries, pattern.window, request.device)
    return descriptor.build(pattern, request.batch, 0, end, request.q_offset, low, request.device)


def _look(request: Request, pattern: Pattern, count: Tensor, first: Tensor, past: Tensor, high: int | Tensor) -> Verdict:
    """The verdict on the rows' runs (`[B]` each: ones, first one, one past the last one). The host waits for the device here."""
    assert request.padding is not None
    empty = count == 0
    run = (count == past - first) | empty
    if pattern.causal and (request.queries == 1 or isinstance(high, Tensor)):
        run = run & ((past == high) | empty)
    grows = run & ((past == request.padding.shape[1]) | empty)
    return Verdict(*torch.stack([run.all(), (count == high - request.kv_offset).all(), grows.all()]).tolist())


def far(device: torch.device) -> bool:
    """Does the host wait for this device when it reads its data?"""
    # `explain` for another machine needs the masks of that machine.
    target = pretended()
    return (device.type if target is None else target.device) in _FAR


def _must_not_wait(request: Request) -> bool:
    return request.mode != "compact" and request.queries == 1 and request.padding is not None and far(request.device)


def tracing(padding: Tensor) -> bool:
    """Is the data of `padding` unreadable: under a compiler, of a fake tensor, or while a CUDA graph is captured?"""
    return torch.compiler.is_compiling() or isinstance(padding, FakeTensor) or capturing(padding)


def _of_pages(request: Request) -> Tensor:
    # transformers forbids the skip in one-token steps of every cache that can be compiled, but edits no sliding pattern there: packed
    # texts have no cache, and blocks of an image come with the prompt.
    skip = request.causal_skip or (request.queries == 1 and request.window is not None)
    pattern = pattern_of(request._replace(causal_skip=skip))
    if pattern is None or not pattern.causal:
        fail(InvalidInput, "mask_function", "another pattern", "causal, or a causal window, for a cache of pages")
    known = request.kv_offset
    start = _left_padding(request, known) if known.dim() == 1 else known[:, 0]
    end = request.q_offset + request.queries
    return descriptor.build(pattern, request.batch, start, end, request.q_offset, 0, request.device)


def padding_of(mask: Tensor | None, pages: Any, rows: int, columns: int, fresh: bool) -> tuple[Tensor, list[int]]:
    """(int64 `[rows]`, the padding of each row of a prompt over these pages, as the model's mask function finds and checks it; as numbers
    the positions before the prompt, and that padding).

    mask: `[rows, positions]`, as `generate()` has it. columns: of the prompt. fresh: the pages hold no token. The host waits for the
    device once; not at all for fresh pages without a mask. Raises InvalidInput.
    """
    padding = None if mask is None else mask.bool()
    if padding is None and fresh and rows <= pages.pad.shape[0] and columns <= pages.sizes.length:
        if (generation := current_generation()) is not None:
            generation.checked = pages.pad
        return pages.pad.new_zeros(rows), [0] * (1 + rows)
    request = Request(
        rows, columns, pages.sizes.length, pages.seen, pages.pad, padding, pages.pad.device, "auto", causal_mask_function, None, True,
        False, False, None,
    )  # fmt: skip
    return _read_padding(request, pages.pad)


def _left_padding(request: Request, known: Tensor) -> Tensor:
    """int64 `[B]`: the padding of each row. known: `[rows]`, the padding so far, EMPTY for a row that the last step did not have."""
    return _read_padding(request, known)[0]


def _read_padding(request: Request, known: Tensor) -> tuple[Tensor, list[int]]:
    """As `_left_padding`, and the positions so far and that padding as numbers, where the host reads them, else []."""
    batch, queries, padding = request.batch, request.queries, request.padding
    if batch > known.shape[0]:
        fail(InvalidInput, "batch size", batch, f"at most {known.shape[0]}, the rows of this cache")
    own, known = known, known[:batch]
    seen = torch.as_tensor(request.q_offset, device=known.device)
    high = seen + queries
    unseen = tracing(high)
    generation = None if unseen else current_generation()
    checked = generation is not None and generation.checked is own
    fits = high <= request.keys
    # Chunks of a prompt may have one token, too.
    prompt = None if generation is None or padding is None else generation.prompt
    if checked and queries == 1 and far(request.device) and prompt is not None and padding is not None and padding.shape[1] > prompt:
        torch.ops.aten._assert_async.msg(fits, _STOP)
        return known, []
    if padding is None:
        start, run = torch.zeros_like(known), torch.ones_like(known, dtype=torch.bool)
    else:
        columns = torch.arange(padding.shape[1], device=known.device)
        shown = padding & (columns < high)
        start = torch.minimum(_first(shown, columns), high)
        run = (shown.sum(-1) == high - start) & (high <= padding.shape[1])
    same = torch.where(known >= seen, start >= seen, start == known)
    # The host checks a prompt of one token as well: all later steps rely on that.
    if unseen or (queries == 1 and request.mode != "compact" and far(request.device) and (generation is None or checked)):
        torch.ops.aten._assert_async.msg((run & same).all() & fits, _STOP)
        return start, []
    run_all, same_all, fits_all, past, *starts = torch.cat([torch.stack([run.all(), same.all(), fits, seen]), start]).tolist()
    need(bool(fits_all), "length", past + queries, f"at most {request.keys} positions, the room of this cache")
    want = 'zeros on the left and ones up to the newest token: pages hold no other pattern. Use cache="hf" for such masks'
    need(bool(run_all), "attention_mask", "holes, padding on the right, or too few columns", want)
    want = "the padding of the first step, in every step: pages hold the tokens that were not padding then"
    need(bool(same_all), "attention_mask", "another padding than before, or rows that the step before left out", want)
    if generation is not None:
        generation.checked = own
    return start, [past, *starts]
