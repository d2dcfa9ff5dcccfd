"""What is launched for a call: tiles, splits and grids, from shapes alone, so that a captured graph replays for other lengths.

Plain Python: no triton, no device.
"""

from __future__ import annotations

from typing import NamedTuple

DECODE_QUERIES = 8
"""Up to this many queries a request counts as decoding, where a batch is served by two launches."""

SPLIT_KEYS = 512
"""Keys a split under a deterministic policy, so that a request's sum is cut at the same keys in every batch. Half of it for latents of
few heads, which have one tile of queries a request and no other heads of keys.
"""

PREFILL_QUERIES = 64
"""From more queries than this on, a batch of several requests is served by two launches: short ones may decode against long contexts."""

BLOCKS_PER_SM = 4
"""Programs a multiprocessor is given at once, where its shared memory holds so many."""

LEAST_KEYS, LEAST_LATENTS = 256, 128
"""A split of fewer keys costs more to merge than it saves."""

MANY_SPLITS, FEW_SPLITS = 64, 16
"""Parts that stage two reads at once. Under a deterministic policy always MANY_SPLITS: another would be another order of summation."""

MOST_ROUNDS, MERGE_COST = 4, 0.1
"""Splits where a device is filled without: at most so many, and only if they save more than this share of a round."""

MASKED_ROWS = 64
"""More rows than this leave no registers for a tile of the mask, as many only in eight warps."""

UNBOUNDED = 2**31 - 1


class Tile(NamedTuple):
    """Rows (queries times heads of a group) and keys of a program's step, its warps, and its loads in flight.

    registers: the most a thread may have, 0 for what the compiler makes of it.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int = 0


class Choice(NamedTuple):
    """A configuration to launch whatever the table and the rules say, for those who measure. splits: 0 for as the rules have it.

    overlap: stage two is launched while stage one runs, where the device can.
    """

    tile: Tile
    splits: int = 0
    overlap: bool = True


class Shape(NamedTuple):
    """What of a call decides how it is launched.

    tokens, requests: of the batch. queries: an upper bound of one request's. capacity: keys the page table has room for.
    q_width, width: numbers of one query, and of one key and its value, padded as they lie in shared memory. itemsize: bytes of a
    number that is multiplied; stored: of one in the pages. masked: there is a mask. left: keys before its own that a query
    may see, -1 for all. warpgroups: do they multiply, as on SM90? Elsewhere the widest tiles have no registers.
    """

    tokens: int
    requests: int
    queries: int
    capacity: int
    kv_heads: int
    group: int
    head_dim: int
    q_width: int
    width: int
    itemsize: int
    stored: int
    masked: bool = False
    left: int = -1
    warpgroups: bool = False


class Launch(NamedTuple):
    """One launch of stage one, and one of stage two where it leaves parts. Requests of fewest..most queries are served.

    blocks: programs of stage one. tiles, pads, each, ragged: as `attend` takes them. split_keys: 0 for an even share.
    at_once: parts that a program of stage two reads at once. overlap: as in Choice.
    """

    tile: Tile
    blocks: int
    tiles: int
    pads: int
    each: int
    ragged: bool
    splits: int
    split_keys: int
    queries: int
    fewest: int
    most: int
    at_once: int
    overlap: bool

    @property
    def parts(self) -> bool:
        """Are results left in parts? A fixed split always does so: one part and many take the same way to the output."""
        return self.splits > 1 or self.split_keys > 0


def part_of(launch: Launch, requests: int, last: bool) -> Launch:
    """The same for `requests` of the requests; padding is served with the last ones. Of a launch that is not ragged."""
    across = launch.blocks // ((launch.tiles - launch.pads) * launch.splits + launch.pads)
    direct, pads = requests * launch.each, launch.pads if last else 0
    return launch._replace(blocks=across * (direct * launch.splits + pads), tiles=direct + pads, pads=pads)


# (what is multiplied, widest padded head dim) -> tiles by rows. Head dims above 256 are latents (512 + 64). A tile of keys less than
# `stages` is in flight. Eight warps on 64 rows would each make the same scores twice, unless there is no room for four.
TABLE: dict[tuple[str, int], tuple[Tile, ...]] = {
    ("half", 64): (Tile(16, 64, 4, 3), Tile(32, 64, 4, 3), Tile(64, 64, 4, 3), Tile(128, 64, 8, 3)),
    ("half", 128): (Tile(16, 32, 4, 3), Tile(32, 32, 4, 3), Tile(64, 64, 4, 3), Tile(128, 64, 8, 3), Tile(256, 64, 16, 3)),
    ("half", 256): (Tile(16, 32, 4, 3), Tile(32, 32, 4, 3), Tile(64, 32, 4, 2), Tile(128, 32, 8, 2)),
    ("half", 512): (Tile(16, 64, 4, 2), Tile(32, 64, 4, 2), Tile(64, 64, 8, 2)),
    ("quantised", 128): (Tile(16, 128, 4, 3), Tile(32, 64, 4, 3), Tile(64, 64, 4, 3), Tile(128, 64, 8, 3)),
    # Converted keys pass through registers; 64 rows of a latent leave no room for them.
    ("quantised", 512): (Tile(16, 32, 4, 3), Tile(32, 32, 8, 2)),
    # Without matrix units.
    ("float32", 128): (Tile(16, 32, 8, 2), Tile(32, 32, 8, 2)),
    ("float32", 256): (Tile(16, 16, 8, 2), Tile(32, 16, 8, 2)),
    ("float32", 512): (Tile(16, 16, 8, 2),),
}
"""The committed table: among the rows of the narrowest class that holds the head dim, the first with enough rows, else the last."""


def padded(n: int) -> int:
    """The next power of two, at least 16: what a matrix product takes."""
    return max(16, 1 << (n - 1).bit_length())


def tiles_of(s: Shape) -> tuple[Tile, ...]:
    """The table's row for a shape. Raises ValueError for a head dim that it does not hold."""
    quantised = s.stored < s.itemsize
    for kind in ("float32",) if s.itemsize == 4 else ("quantised", "half") if quantised else ("half",):
        # The classes of a kind do not reach as far as those of the next: 64 and 256 quantised are as half.
        fits = [dim for of, dim in TABLE if of == kind and padded(s.head_dim) <= dim and (kind != "quantised" or padded(s.head_dim) == dim)]
        if fits:
            return TABLE[kind, min(fits)]
    raise ValueError(f"head_dim: got {s.head_dim}, want <= {max(dim for _, dim in TABLE)}")


def pick(s: Shape, rows: int, memory: int) -> Tile:
    """The tile for `rows` rows, within `memory` bytes of shared memory a program."""
    table = tuple(t for t in tiles_of(s) if t.rows <= 128 or s.warpgroups)
    tile = next((t for t in table if t.rows >= rows), table[-1])
    while shared_bytes(tile, s) > memory:
        smaller = [t for t in table if t.rows < tile.rows]
        if tile.stages > 2:
            tile = tile._replace(stages=tile.stages - 1)
        elif tile.keys > 16:
            tile = tile._replace(keys=tile.keys // 2)
        elif smaller:
            tile = smaller[-1]
        else:
            break
    return tile


def shared_bytes(tile: Tile, s: Shape) -> int:
    """An upper bound of a program's shared memory: the query's rows, the weights, and the keys of every load in flight."""
    in_flight = max(1, tile.stages - 1) + (tile.rows >= 64 and s.head_dim <= 256)
    # Narrower keys lie there as they are stored; those of a latent, which are also the values, are converted first.
    stored = s.itemsize if s.head_dim > 256 else s.stored
    return (tile.rows * s.q_width + tile.rows * tile.keys) * s.itemsize + in_flight * tile.keys * s.width * stored + 2048


def launches(s: Shape, deterministic: bool, sms: int, memory: int, choice: Choice | None = None) -> tuple[Launch, ...]:
    """What serves a call, in order. Tokens of no request belong to the last. choice: of every launch, where it is not the rules'."""
    deep = s.queries > DECODE_QUERIES
    if deep and (deterministic or (s.queries > PREFILL_QUERIES and s.requests > 1)):
        return (
            _launch(s._replace(queries=DECODE_QUERIES), deterministic, sms, memory, choice, most=DECODE_QUERIES, padding=False),
            _launch(s, False, sms, memory, choice, fewest=DECODE_QUERIES + 1, split=False),
        )
    return (_launch(s, deterministic, sms, memory, choice),)


def _launch(
    s: Shape,
    deterministic: bool,
    sms: int,
    memory: int,
    choice: Choice | None,
    fewest: int = 0,
    most: int = UNBOUNDED,
    split: bool = True,
    padding: bool = True,
) -> Launch:
    # Under a deterministic policy the tile follows from the model alone.
    rows = UNBOUNDED if not split else s.group if deterministic else s.group * s.queries
    if s.masked:
        rows = min(rows, MASKED_ROWS)
    tile = choice.tile if choice else pick(s, rows, memory)
    if s.masked and tile.rows >= MASKED_ROWS:
        tile = tile._replace(warps=8)
    heads = min(s.group, tile.rows)
    block_q = tile.rows // heads
    each = max(1, -(-s.queries // block_q))
    direct, packed = s.requests * each, s.tokens // block_q + s.requests + 1
    across = s.kv_heads * -(-s.group // heads)
    keys = s.capacity if s.left < 0 else min(s.capacity, s.left + s.queries + tile.keys)
    splits, split_keys = 1, 0
    if deterministic:
        split_keys = SPLIT_KEYS // 2 if s.head_dim > 256 and s.group <= 32 else SPLIT_KEYS
        splits = max(1, -(-keys // split_keys))
    elif split:
        room = sms * max(1, min(BLOCKS_PER_SM, memory // shared_bytes(tile, s)))
        least = LEAST_LATENTS if s.head_dim > 256 else LEAST_KEYS
        splits = choice.splits if choice and choice.splits else _splits(direct * across, keys // least, room)
    # Tiles laid out for the longest request are mostly empty in a ragged batch; then each tile looks for its request.
    ragged = direct > 2 * packed and splits == 1 and not deterministic
    pads = max(1, min(64, s.tokens // 64)) if padding and not ragged else 0
    tiles = packed if ragged else direct + pads
    blocks = across * ((tiles - pads) * splits + pads)
    at_once = MANY_SPLITS if deterministic or splits > FEW_SPLITS else FEW_SPLITS
    overlap = choice is None or choice.overlap
    return Launch(tile, blocks, tiles, pads, each, ragged, splits, split_keys, s.queries, fewest, most, at_once, overlap)


def _splits(blocks: int, most: int, room: int) -> int:
    """How many splits serve a device that has room for `room` programs at once best, when each of `blocks` is split alike, `most` times."""
    if blocks == 0:
        return 1
    if blocks <= room // 2:
        return max(1, min(room // blocks, most))

    # Few more programs than there is room for would take twice as long as one round; of shorter ones the last round is shorter.
    def cost(n: int) -> float:
        return -(-blocks * n // room) / n + MERGE_COST * (n > 1)

    return min(range(1, max(1, min(MOST_ROUNDS, most // 4)) + 1), key=cost)
