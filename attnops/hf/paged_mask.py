"""Masks for a cache of pages: the padding on the left of each row, checked, as a descriptor.

Pages hold a row's tokens without its padding, so a mask may say one thing only: how much padding a row begins with. Everything else
(holes, padding on the right, a mask shorter than the text, another padding than before, more tokens than there is room for) is an error,
and not another way to compute. The host looks at the mask, which makes it wait for the device; where it must not (a tracer, and
one-token steps on CUDA outside `generate()`), the device asserts instead. Inside `generate()` the prompt's mask has been looked at, and
one-token steps only add ones to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function

from attnops.errors import InvalidInput, fail
from attnops.hf import descriptor
from attnops.hf.generation import Generation, current_generation
from attnops.hf.mask import Call, Mode, far, mask_function, pattern_of, tracing

_RUN = 'zeros on the left and ones up to the newest token, all there is in pages. Use cache="hf" for such masks'
_STOP = "attnops: a mask that pages cannot follow, or a cache that is full"
_SAME = "the padding it began with, in every step: pages hold what was not padding then"


def paged_mask_function(mode: Mode) -> Callable[..., Tensor | None]:
    """A function for `AttentionMaskInterface.register`: as `mask_function(mode)`, and for a cache of pages what is told above."""
    other = mask_function(mode)

    def attnops_mask(
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: Any = 0,
        kv_offset: Any = 0,
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
        # Only a cache of pages has an offset for each row.
        if isinstance(kv_offset, Tensor) and kv_offset.dim() > 0:
            call = Call(batch_size, q_length, kv_length, q_offset, 0, attention_mask, torch.device(device), mode, False)
            # At one-token steps transformers forbids the skip of every cache that can be compiled. Of one token over a cache it edits no
            # sliding pattern: packed texts have no cache, and blocks of an image come with the prompt.
            skip = allow_is_causal_skip or (q_length == 1 and local_size is not None)
            pattern = pattern_of(call, mask_function, local_size, skip, allow_is_bidirectional_skip, use_vmap, config)
            if pattern is None or not pattern.causal:
                fail(InvalidInput, "mask_function", "another pattern", "causal, or a causal window, for a cache of pages")
            start = _padding(call, kv_offset) if kv_offset.dim() == 1 else kv_offset[:, 0]
            return descriptor.build(pattern, batch_size, start, q_offset + q_length, q_offset, 0, call.device)
        return other(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, local_size, allow_is_causal_skip,
            allow_is_bidirectional_skip, use_vmap, config, device, **others,
        )  # fmt: skip

    return attnops_mask


def _padding(call: Call, known: Tensor) -> Tensor:
    """int64 `[B]`: the padding each row begins with. known: `[rows]`, what it was so far, EMPTY for a row that the last step had not."""
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
    # A prompt of one token is looked at as any other: all steps after it rely on that.
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
    """Is this a step after the prompt, of which chunks may come one token at a time, too?"""
    return call.padding is not None and generation.prompt is not None and call.padding.shape[1] > generation.prompt
