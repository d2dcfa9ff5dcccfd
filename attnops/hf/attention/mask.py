"""The mask function that transformers calls once a forward and layer type.

`dense`: a bool `[B, 1, S, T]`, or None where the pattern is plain and without padding.
`explicit`: as dense, but a causal mask is always written out, for models that compute with it.
`additive`: floats that are added to scores, as eager attention gets them.
`compact`: a descriptor (see descriptor.py and packed.py) where it is exact, else dense.
`auto`: compact on CUDA, dense elsewhere, except that packed documents, and training without
padding, are compact on every device.

A descriptor can say "keys from a to b", so each row of a 2-D mask must be one run of ones. The host
checks the mask itself, and waits for the device. Where it must not wait, the mask is dense: under a
tracer, and in one-token steps on CUDA under `auto`. One-token steps inside `generate()` of a
patched model need no check: generate appends ones only to the prompt's mask
(attnops.hf.generation).

Packed documents need a count and no check. A compiled graph of a training step counts them when it
runs. In other compiled graphs, and while a CUDA graph is captured, layers without cumulative
lengths write their mask out.

Where torch.jit.trace or torch.onnx.export records the model, masks are dense or additive.

A cache of pages gets a descriptor in every mode: pages hold a row's tokens without its padding, so
that a mask may say only how much padding a row begins with; any other mask is an error. Where the
host must not wait, the device asserts instead.

In training a causal mask becomes packed requests and not ranges of keys, which the kernels with the
fastest gradients do not take.

Outputs of padding are finite, and differ from eager's: a query that sees no key gives 0 (in eager:
the mean of all values), and in a descriptor a padded query may see padded keys: with right padding,
and on either side among packed requests. Two callers read such outputs: generate() from a
right-padded prompt, which transformers itself warns of, and a loss whose label is the first token
after left padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from transformers import masking_utils
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    eager_mask,
    sdpa_mask,
)

from attnops.core.errors import InvalidInput, fail
from attnops.core.private_torch import FakeTensor, assert_async, capturing
from attnops.core.problem import pretended
from attnops.core.record import need
from attnops.core.tracers import is_recorded
from attnops.hf.attention import descriptor, packed, positions
from attnops.hf.attention.descriptor import Pattern
from attnops.hf.generation import Generation, Verdict, current_generation

_JOINED_LAST = hasattr(masking_utils, "remap_positions_for_packed_sequence")
"""Does transformers join documents to a rule last, after blocks whose tokens see both ways? A
tracer has to tell such a rule apart."""

_SHOWN = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)
"""Does Dynamo show the variables of a closure?"""

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


Found = tuple[Tensor | None] | None
"""A mask, which may be None, in a tuple; None: it must be written out."""


def mask_function(mode: Mode) -> Callable[..., Tensor | None]:
    """A function for `AttentionMaskInterface.register`."""

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
        if (
            request.mask_function is not bidirectional_mask_function
            and not torch.compiler.is_compiling()
        ):
            positions.look(request.mask_function, q_length)
        found = _short(request) if mode in ("auto", "compact") and not is_recorded() else None
        return _written_out(request, given) if found is None else found[0]

    return attnops_mask


def _written_out(request: Request, given: dict[str, Any]) -> Tensor | None:
    """A bool or additive mask; None where the pattern is plain. given: arguments of transformers'
    own functions."""
    skips = request.mode not in ("explicit", "additive") and request.allow_is_causal_skip
    if skips and torch.compiler.is_compiling():
        if _plainly_causal(request):
            return None
        skips = False  # transformers 5.24 also skips one query of more keys than it sees
    may_wait = not _must_not_wait(request)
    given["allow_is_causal_skip"] = skips and may_wait
    given["allow_is_bidirectional_skip"] = bool(request.allow_is_bidirectional_skip) and may_wait
    return (eager_mask if request.mode == "additive" else sdpa_mask)(**given)


def _plainly_causal(request: Request) -> bool:
    """Do the sizes alone show a plain causal mask? transformers writes every mask out while a
    compiler traces."""
    if request.attention_mask is not None or isinstance(request.q_offset, Tensor):
        return False
    known, queries, keys = statically_known_true, request.q_length, request.kv_length
    inside = request.local_size is None or known(keys < request.local_size)
    return (
        inside
        and known(request.q_offset + queries == request.kv_offset + keys)
        and (known(queries == keys) or known(queries == 1))
    )


def _short(request: Request) -> Found:
    """A descriptor, or no mask at all, where that is exact."""
    documents = _documents(request)
    if documents is not None:
        return (documents,)
    compact = (
        request.mode == "compact"
        or far(request.device)
        or (request.attention_mask is None and _trains(request))
    )
    pattern = pattern_of(request) if compact else None
    return None if pattern is None else _compact(request, pattern)


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
        return _hidden(request, request.allow_is_causal_skip and request.local_size is not None)
    window = _window_of(rule)
    return None if window is None else Pattern(True, window)


def _hidden(request: Request, plain: bool) -> Pattern | None:
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


def _documents(request: Request) -> Tensor | None:
    """The descriptor of a causal rule that transformers restricts to packed documents; None:
    another rule."""
    rule = request.mask_function
    if (
        request.allow_is_causal_skip
        or request.attention_mask is not None
        or request.use_vmap
        or not _alone(request)
    ):
        return None
    if getattr(rule, "__name__", "") != "and_mask":
        return None
    if torch.compiler.is_compiling():
        # Without the skip, transformers itself joins causal rules by "and" with documents or chunks
        # alone.
        pattern = _hidden(
            request, request.allow_is_bidirectional_skip is None and not _may_see_ahead(rule)
        )
    else:
        pattern = pattern_of(
            request._replace(mask_function=packed.of_rule(rule), allow_is_causal_skip=True)
        )
    if pattern is None or not pattern.causal:
        return None
    begins = packed.documents(rule, request.batch_size, request.q_length, request.device)
    return packed.build(begins, pattern.window, tracing(begins), counted=_counted(begins))


def _may_see_ahead(rule: Any) -> bool:
    """May the pattern that is joined with documents let a token see those after it? While a
    compiler traces."""
    if not _JOINED_LAST:
        return False
    if not _SHOWN:
        return True
    pattern = packed.of_rule(rule)
    return pattern is None or getattr(pattern, "__name__", "") == "or_mask"


def _counted(begins: Tensor) -> bool:
    """A tracer is given packed documents for every pass without a mask and a cache. Those that do
    not train are not worth the wait."""
    if torch.compiler.is_compiling():
        return torch.is_grad_enabled() and not torch.compiler.is_exporting()
    return not (
        capturing(begins) or (isinstance(begins, FakeTensor) and begins.fake_mode.shape_env is None)
    )


def _alone(request: Request) -> bool:
    """Are the keys those of the queries, all of them, with none before?"""
    if isinstance(request.q_offset, Tensor) or isinstance(request.kv_offset, Tensor):
        return False
    known = statically_known_true
    return (
        known(request.q_length == request.kv_length)
        and known(request.q_offset == 0)
        and known(request.kv_offset == 0)
    )


def _trains(request: Request) -> bool:
    """May the descriptor of a causal mask be packed requests, for kernels with a gradient?"""
    return (
        torch.is_grad_enabled()
        and request.allow_is_causal_skip
        and request.q_length > 1
        and _alone(request)
    )


def _compact(request: Request, pattern: Pattern) -> Found:
    """The descriptor of a pattern, where it is exact."""
    padding = request.attention_mask
    if padding is None:
        return (_unpadded(request, pattern),)
    high = (
        request.q_offset + request.q_length
        if pattern.causal
        else request.kv_offset + request.kv_length
    )
    if _is_unknown(padding, high, pattern):  # asked first: a compiler would guard on the generation
        return None
    generation = current_generation() if pattern.causal else None
    if generation is None and _must_not_wait(request):
        return None
    verdict = generation.verdict if generation is not None and request.q_length == 1 else None
    if verdict is not None and verdict.full:
        return (_unpadded(request, pattern),)
    return _looked_at(request, pattern, padding, high, verdict, generation)


def _looked_at(
    request: Request,
    pattern: Pattern,
    padding: Tensor,
    high: Any,
    verdict: Verdict | None,
    generation: Generation | None,
) -> Found:
    """As `_compact`, by the rows of the padding. verdict: on the masks of the generation so far;
    None: this one gives it."""
    columns = torch.arange(padding.shape[1], device=padding.device)
    seen = padding & (columns >= request.kv_offset) & (columns < high)
    first, past = _first(seen, columns), (seen * (columns + 1)).amax(-1)
    if verdict is None:
        verdict = _look(request, pattern, seen.sum(-1), first, past, high)
        if generation is not None:
            generation.note(verdict)
    if not verdict.run:
        return None
    if verdict.full:
        return (_unpadded(request, pattern),)
    return (_padded(request, pattern, first, past, high),)


def _is_unknown(padding: Tensor, high: int | Tensor, pattern: Pattern) -> bool:
    """Does the padding not say what is a token? high: one past the last position that is seen."""
    length = padding.shape[1]
    return (
        tracing(padding)
        or length == 0
        or (pattern.causal and not isinstance(high, Tensor) and length < high)
    )


def _padded(request: Request, pattern: Pattern, first: Tensor, past: Tensor, high: Any) -> Tensor:
    """The descriptor of rows `[B]` that show the positions from `first` up to `past`."""
    low, padding = request.kv_offset, request.attention_mask
    if (
        padding is not None
        and pattern.causal
        and _trains(request)
        and padding.shape[1] == request.kv_length
    ):
        return packed.build(packed.runs(padding), pattern.window, traced=False, padded=True)
    end = high - low if pattern.causal else (past - low).clamp(min=0)
    start = (first - low).clamp(min=0)
    # In a row without any key `start` is past the end, which would give kernels a negative length.
    start = torch.minimum(start, end) if isinstance(end, Tensor) else start.clamp(max=end)
    return _range(request, pattern, start, end, low)


def _range(request: Request, pattern: Pattern, start: Any, end: Any, low: Any) -> Tensor:
    return descriptor.build(
        pattern, request.batch_size, start, end, request.q_offset, low, request.device
    )


def _first(seen: Tensor, columns: Tensor) -> Tensor:
    """int64 `[B]`: the first column of each row that is seen, their number if none is."""
    return columns.shape[0] - (seen * (columns.shape[0] - columns)).amax(-1)


def _unpadded(request: Request, pattern: Pattern) -> Tensor | None:
    if not pattern.causal or _is_plain(request, pattern):
        return None
    if _trains(request):
        return packed.whole(request.batch_size, request.q_length, pattern.window, request.device)
    low = request.kv_offset
    return _range(request, pattern, 0, request.q_offset + request.q_length - low, low)


def _is_plain(request: Request, pattern: Pattern) -> bool:
    """Does the attention function see the same without a mask?"""
    keys, queries, low = request.kv_length, request.q_length, request.kv_offset
    unbounded = pattern.window == 0 or (isinstance(keys, int) and keys <= pattern.window)
    if not (request.allow_is_causal_skip and unbounded) or isinstance(request.q_offset, Tensor):
        return False
    if queries != 1 and request.q_offset == 0 and low == 0:
        return True  # of an empty static cache: the attention function cuts the keys
    return request.q_offset + queries - low == keys and queries in (keys, 1)


def _look(
    request: Request,
    pattern: Pattern,
    count: Tensor,
    first: Tensor,
    past: Tensor,
    high: int | Tensor,
) -> Verdict:
    """The verdict on the rows' runs (`[B]` each: ones, first one, one past the last one). The host
    waits for the device here."""
    assert request.attention_mask is not None
    empty = count == 0
    run = (count == past - first) | empty
    if pattern.causal and (request.q_length == 1 or isinstance(high, Tensor)):
        run = run & ((past == high) | empty)
    grows = run & ((past == request.attention_mask.shape[1]) | empty)
    return Verdict(
        *torch.stack([run.all(), (count == high - request.kv_offset).all(), grows.all()]).tolist()
    )


def far(device: torch.device) -> bool:
    """Does the host wait for this device when it reads its data?"""
    # `explain` for another machine needs the masks of that machine.
    target = pretended()
    return (device.type if target is None else target.device) in _FAR


def _must_not_wait(request: Request) -> bool:
    return (
        request.mode != "compact"
        and request.q_length == 1
        and request.attention_mask is not None
        and far(request.device)
    )


def tracing(padding: Tensor) -> bool:
    """Is the data of `padding` unreadable: under a compiler, of a fake tensor, or while a CUDA
    graph is captured?"""
    return torch.compiler.is_compiling() or isinstance(padding, FakeTensor) or capturing(padding)


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
    start = _read_padding(request, known)[0] if known.dim() == 1 else known[:, 0]
    return _range(request, pattern, start, request.q_offset + request.q_length, 0)


def padding_of(
    mask: Tensor | None, pages: Any, rows: int, columns: int, fresh: bool
) -> tuple[Tensor, list[int]]:
    """(int64 `[rows]`, the padding of each row of a prompt over these pages, as the model's mask
    function finds and checks it; as numbers the positions before the prompt, and that padding).

    mask: `[rows, positions]`, as `generate()` has it. columns: of the prompt. fresh: the pages hold
    no token. The host waits for the device once; not at all for fresh pages without a mask. Raises
    InvalidInput.
    """
    padding = None if mask is None else mask.bool()
    if padding is None and fresh and rows <= pages.pad.shape[0] and columns <= pages.sizes.length:
        if (generation := current_generation()) is not None:
            generation.checked = pages.pad
        return pages.pad.new_zeros(rows), [0] * (1 + rows)
    return _read_padding(
        Request("auto", rows, columns, pages.sizes.length, pages.seen, attention_mask=padding),
        pages.pad,
    )


def _read_padding(request: Request, known: Tensor) -> tuple[Tensor, list[int]]:
    """(int64 `[B]`, the padding of each row; the positions so far and that padding as numbers,
    where the host reads them, else []).

    known: `[rows]`, the padding so far, EMPTY for a row that the last step did not have.
    """
    batch, queries = request.batch_size, request.q_length
    if batch > known.shape[0]:
        fail(InvalidInput, "batch size", batch, f"at most {known.shape[0]}, the rows of this cache")
    own, known = known, known[:batch]
    seen = torch.as_tensor(request.q_offset, device=known.device)
    high = seen + queries
    unseen = tracing(high)
    generation = None if unseen else current_generation()
    checked = getattr(generation, "checked", None) is own
    fits = high <= request.kv_length
    one = queries == 1 and far(known.device)
    if checked and _is_after_prompt(request, generation, one):
        assert_async(fits, _STOP)
        return known, []
    start, run = _run(request, known, high)
    same = torch.where(known >= seen, start >= seen, start == known)
    # The host checks a prompt of one token as well: all later steps rely on that.
    if unseen or (one and request.mode != "compact" and (generation is None or checked)):
        assert_async((run & same).all() & fits, _STOP)
        return start, []
    run_all, same_all, fits_all, past, *starts = torch.cat(
        [torch.stack([run.all(), same.all(), fits, seen]), start]
    ).tolist()
    need(
        bool(fits_all),
        "length",
        past + queries,
        f"at most {request.kv_length} positions, the room of this cache",
    )
    want = (
        "zeros on the left and ones up to the newest token: pages hold no other pattern. Use "
        'cache="hf" for such masks'
    )
    need(bool(run_all), "attention_mask", "holes, padding on the right, or too few columns", want)
    want = (
        "the padding of the first step, in every step: pages hold the tokens that were not "
        "padding then"
    )
    need(
        bool(same_all),
        "attention_mask",
        "another padding than before, or rows that the step before left out",
        want,
    )
    if generation is not None:
        generation.checked = own
    return start, [past, *starts]


def _is_after_prompt(request: Request, generation: Any, one: bool) -> bool:
    """Is it a step after the prompt of this generation? one: it has one token, as chunks of a
    prompt may have, too."""
    padding, prompt = request.attention_mask, generation.prompt
    return one and prompt is not None and padding is not None and padding.shape[1] > prompt


def _run(request: Request, known: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row: (the first position that is no padding, are those from it up to `high`
    tokens?)."""
    padding = request.attention_mask
    if padding is None:
        return torch.zeros_like(known), torch.ones_like(known, dtype=torch.bool)
    columns = torch.arange(padding.shape[1], device=known.device)
    shown = padding & (columns < high)
    start = torch.minimum(_first(shown, columns), high)
    run = (shown.sum(-1) == high - start) & (high <= padding.shape[1])
    return start, run
