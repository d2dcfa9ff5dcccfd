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
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from transformers import masking_utils
from transformers.masking_utils import bidirectional_mask_function, eager_mask, sdpa_mask

from attnops.core.private_torch import FakeTensor, capturing
from attnops.core.tracers import is_recorded
from attnops.hf.attention import descriptor, packed, positions
from attnops.hf.attention.descriptor import (
    MODES as MODES,
    Mode as Mode,
    Pattern,
    Request,
    far,
    first_of,
    pattern_of,
    plain_pattern,
    range_of,
    tracing,
)
from attnops.hf.generation import Generation, Verdict, current_generation

_JOINED_LAST = hasattr(masking_utils, "remap_positions_for_packed_sequence")
"""Does transformers join documents to a rule last, after blocks whose tokens see both ways? A
tracer has to tell such a rule apart."""

_SHOWN = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)
"""Does Dynamo show the variables of a closure?"""


Found = tuple[Tensor | None] | None
"""A mask, which may be None, in a tuple; None: it must be written out."""


def mask_function(mode: Mode) -> Callable[..., Tensor | None]:
    """A function for `AttentionMaskInterface.register`."""
    return descriptor.interface_function(mode, _of_keys)


def _of_keys(request: Request, given: dict[str, Any]) -> Tensor | None:
    """The mask of a call whose keys are a tensor. given: arguments of transformers' own
    functions."""
    if (
        request.mask_function is not bidirectional_mask_function
        and not torch.compiler.is_compiling()
    ):
        positions.look(request.mask_function, request.q_length)
    short = request.mode in ("auto", "compact") and not is_recorded()
    found = _short(request) if short else None
    return _written_out(request, given) if found is None else found[0]


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
        pattern = plain_pattern(
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
    first, past = first_of(seen, columns), (seen * (columns + 1)).amax(-1)
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
    return range_of(request, pattern, start, end, low)


def _unpadded(request: Request, pattern: Pattern) -> Tensor | None:
    if not pattern.causal or _is_plain(request, pattern):
        return None
    if _trains(request):
        return packed.whole(request.batch_size, request.q_length, pattern.window, request.device)
    low = request.kv_offset
    return range_of(request, pattern, 0, request.q_offset + request.q_length - low, low)


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


def _must_not_wait(request: Request) -> bool:
    return (
        request.mode != "compact"
        and request.q_length == 1
        and request.attention_mask is not None
        and far(request.device)
    )
