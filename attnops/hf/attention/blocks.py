"""The blocks of transformers' continuous batching as pages: slots, page table and lengths of a
step, made once for all layers of a group.

transformers gives a step the places of all keys that it sees, one request after the other, or a
table of blocks. The place of the first key in a block names the block.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnops.core.errors import InvalidInput, fail
from attnops.core.private_torch import capturing
from attnops.ops import slot_mapping

_CACHE: Any = None
with contextlib.suppress(
    ImportError
):  # another version, whose cache gathers the keys by its own `update`
    from transformers.generation.continuous_batching import PagedAttentionCache as _CACHE

_KEPT = "attnops_step"


class Asked(NamedTuple):
    """The step as one layer sees it.

    read, write: of each group int64 places of the keys that the step sees, and `[T]` of the new
    ones. Places outside the blocks belong to
        no request.
    starts_q, starts_k: int32 `[B + 1]`, cumulative lengths. longest_q, longest_k: upper bounds on
    one request's.
    window: the tokens that the layer's blocks keep; 0: all of them.
    tables: int32 `[groups, B, M]`, blocks of each request, in place of `read` and `write` in a step
    of one token a request; or None.
    """

    read: Sequence[Tensor]
    write: Sequence[Tensor]
    starts_q: Tensor
    starts_k: Tensor
    longest_q: int
    longest_k: int
    window: int
    tables: Tensor | None = None


class Blocks(NamedTuple):
    """The step of the layers of one group.

    slots: int64 `[T]`, as `write_kv` takes them.
    pages: (page table int32 `[B, M]`, lengths int32 `[B]`) as `paged_attention` takes them, or None
        where the step sees its new keys alone. Pages of a window hold its tokens and no others, in
        any order.
    """

    slots: Tensor
    pages: tuple[Tensor, Tensor] | None = None


@dataclass(eq=False)
class Kept:
    """Kept on transformers' cache.

    known: of each group, are its blocks read as pages?
    served: layers that have attended in the step under way; one that comes again begins the next
    step.
    blocks: of that step, by group.
    """

    known: dict[int, bool] = field(default_factory=dict)
    served: set[int] = field(default_factory=set)
    blocks: dict[int, Blocks | None] = field(default_factory=dict)


def blocks_of(cache: Any, layer: int, key: Tensor, value: Tensor, asked: Asked) -> Blocks | None:
    """The step's blocks, or None where `cache.update` has to gather the keys.

    It has to where a window's new keys overwrite keys that the step still sees (more than one new
    token of a request), where new keys have another shape or dtype than the cache's, for a cache of
    another kind, and while a compiler traces.

    key, value: `[1, Hkv, T, D]`. Raises InvalidInput where a step is captured for steps with longer
    requests.
    """
    # The cache of 5.18 shares its memory out in another way.
    if (
        torch.compiler.is_compiling()
        or type(cache) is not _CACHE
        or not hasattr(cache, "layer_index_to_group_indices")
    ):
        return None
    kept: Kept = vars(cache).setdefault(_KEPT, Kept())
    # Tensors do not tell steps apart: the capture of a graph gets those of the eager step before
    # it.
    if layer in kept.served or not kept.served:
        kept.served, kept.blocks = set(), {}
        _check_capture(asked)
    kept.served.add(layer)
    group, number = cache.layer_index_to_group_indices[layer]
    if group not in kept.known:
        kept.known[group] = _known(cache, group)
    pairs = (key, cache.key_cache[number]), (value, cache.value_cache[number])
    found = None
    if kept.known[group] and all(
        new.dtype == old.dtype and new.shape[1::2] == old.shape[1:] for new, old in pairs
    ):
        if group not in kept.blocks:
            kept.blocks[group] = _made(cache, asked, group)
        found = kept.blocks[group]
    return found


def pages_of(cache: Any, layer: int) -> tuple[Tensor, Tensor]:
    """The layer's pages, `[P, block, Hkv, D]` each."""
    number = cache.layer_index_to_group_indices[layer][1]
    k_pages, v_pages = (
        each[number].unflatten(0, (-1, cache.block_size))
        for each in (cache.key_cache, cache.value_cache)
    )
    return k_pages, v_pages


def _known(cache: Any, group: int) -> bool:
    """Is the group laid out as `_made` takes it? Asked of a copy of its allocator, which has one
    request in the first blocks."""
    try:
        size, allocator = cache.block_size, copy.copy(cache.group_cache_managers[group])
        window = getattr(allocator, "sliding_window", 0)
        room, past = (window, window + 1) if window else (2 * size, size)
        allocator.block_table = {"": list(range(-(-room // size)))}
        seen = range(past - window + 1, past) if window else range(past + 1)
        reads = allocator.get_read_indices("", past, 1)[: len(seen)] == [
            token % room for token in seen
        ]
        writes = allocator.get_write_indices("", past, 1) == [past % room]
        whole = all(
            x.dim() == 3 and x.is_contiguous() and x.shape[0] % size == 0
            for x in (*cache.key_cache, *cache.value_cache)
        )
        return whole and reads and writes
    except (AttributeError, TypeError, ValueError, LookupError):
        return False


def _check_capture(asked: Asked) -> None:
    short = asked.tables is None and asked.longest_q < asked.write[0].shape[0]
    if short and capturing(asked.starts_q):
        want = (
            "False: this transformers captures the longest request of one step for all later steps"
        )
        fail(InvalidInput, "use_cuda_graph", True, want)


def _made(cache: Any, asked: Asked, group: int) -> Blocks | None:
    size = cache.block_size
    end = cache.num_blocks * cache.block_size
    lengths = asked.starts_k.diff().int()
    if asked.tables is not None:
        table, rows = asked.tables[group], torch.arange(lengths.shape[0], device=lengths.device)
        slots = slot_mapping(lengths - 1, rows, table, page_size=size)
        return Blocks(slots, (table, lengths))
    read, write, window = asked.read[group], asked.write[group], asked.window
    slots = torch.where((write >= 0) & (write < end), write, -1)
    if not read.shape[0]:
        return Blocks(slots)
    if window and asked.longest_q != 1:
        return None
    first = torch.arange(
        0, min(asked.longest_k, window or end), 1 if window else size, device=read.device
    )
    places = read[(asked.starts_k[:-1, None] + first).clamp(max=read.shape[0] - 1)]
    if window:
        # The new key, whose place is not among those to read, completes the ring.
        own = write[asked.starts_q[:-1].clamp(max=write.shape[0] - 1)]
        places = _ring(
            torch.where((places >= 0) & (places < end), places, own[:, None]), lengths, window, size
        )
        first = first[::size]
    table = torch.where(first < lengths[:, None], places // size, 0).int()
    return Blocks(slots, (table, lengths))


def _ring(places: Tensor, lengths: Tensor, window: int, size: int) -> Tensor:
    """`[B, M]`: of the places `[B, K]` of each request's keys, in the order of their tokens, the
    first one of each block of the ring."""
    width, offset = places.shape[1], places % size
    # A full ring begins at any of its slots. Its last block, which may be cut short, ends where the
    # first block begins.
    begins = (offset == 0) & (offset.roll(1, 1) == (window - 1) % size)
    shift = torch.where(lengths == window, begins.int().argmax(1), 0)
    return places.gather(
        1, (shift[:, None] + torch.arange(0, width, size, device=places.device)) % width
    )
