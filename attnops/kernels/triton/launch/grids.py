"""The tiles, splits and grids of attention. They follow from shapes alone, so that a captured graph
replays for other lengths.

Plain Python: no triton, no device.
"""

from __future__ import annotations

from typing import NamedTuple

from attnops.kernels.shared.sizes import padded, power

DECODE_QUERIES = 8
"""Where two launches serve a batch, the first serves requests of up to this many queries."""

SPLIT_KEYS = 512
"""Keys a split under a deterministic policy, so that every batch cuts a request's sum at the same
keys. Latents of few heads have half as many, because they have one tile of queries a request and
one key head.
"""

PREFILL_QUERIES = 64
"""Two launches serve a batch of several requests of more queries than this, because its short
requests may decode long contexts."""

BLOCKS_PER_SM = 4
"""Programs a multiprocessor, where its shared memory has room for as many."""

LEAST_KEYS, LEAST_LATENTS = 256, 128
"""A split of fewer keys costs more in the merge than it saves."""

MANY_SPLITS, FEW_SPLITS = 64, 16
"""Parts that stage two reads at once. A deterministic policy always has MANY_SPLITS, because the
number sets the order of summation."""

MOST_ROUNDS, MERGE_COST = 4, 0.1
"""Where the device is full without splits: the most splits, and the share of a round that they must
save."""

MASKED_ROWS = 64
"""The most rows that leave registers for a tile of the mask, in eight warps."""

ODD_ROWS = 64
"""The most rows that leave registers for keys that are loaded through them."""

UNBOUNDED = 2**31 - 1


class Tile(NamedTuple):
    """Rows (queries times heads of a group) and keys of a program's step, its warps, and its loads
    in flight.

    registers: the most a thread may have; 0 leaves them to the compiler.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int = 0


class Choice(NamedTuple):
    """A configuration to launch in place of the table's and the rules', for measurements. splits: 0
    leaves them to the rules.

    overlap: launch stage two, or a decode step of one launch, while the kernel before it runs,
    where the device can.
    """

    tile: Tile
    splits: int = 0
    overlap: bool = True


class Shape(NamedTuple):
    """The facts of a call that its launches depend on.

    queries: an upper bound of one request's. capacity: keys that the page table has room for.
    q_width, width: padded numbers of one query, and of one key and its value, in shared memory.
    itemsize, stored: bytes of a number in a product, and in the pages. masked: is there a mask?
    left: keys before its own that a query may see, -1 for all.
    warpgroups: do warpgroups multiply, as on SM90? Elsewhere the widest tiles run out of registers.
    wide: are more than 256 numbers of a key and of its value loaded, each for itself? A latent is
    both.
    odd: are keys or values no whole multiples of 16 bytes? Their loads take registers, which the
    tallest tiles have not.
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
    wide: bool = False
    odd: bool = False


class Launch(NamedTuple):
    """One launch of stage one, and one of stage two where it leaves parts, for requests of
    fewest..most queries.

    blocks: programs of stage one. tiles, pads, each, ragged: as `attend` takes them. split_keys: 0
    for an even share.
    overlap: as in Choice.
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
    overlap: bool

    @property
    def parts(self) -> bool:
        """Does stage one leave parts? With a fixed split it always does, so that one part and many
        reach the output the same way."""
        return self.splits > 1 or self.split_keys > 0

    @property
    def at_once(self) -> int:
        """Parts that a program of stage two reads at once: as many in every batch with a fixed
        split."""
        many = self.split_keys > 0 or self.splits > FEW_SPLITS
        return MANY_SPLITS if many else FEW_SPLITS


LEAST_DECODED = 128
"""Keys of a split in a decode step of one launch, whose merge costs no launch of its own."""

DECODE_BLOCKS = 2
"""Programs a multiprocessor that such a step has splits for, where these have LONG_SPLIT keys at
least; else one."""

LONG_SPLIT = 1024
"""Keys from which a second program a multiprocessor pays."""

MERGED = 8192
"""Numbers that the last program of such a step merges at once: 64 registers a thread of four
warps."""

DECODE: dict[tuple[int, int], Tile] = {
    (2, 64): Tile(16, 128, 4, 3),
    (2, 128): Tile(16, 64, 4, 3),
    (2, 256): Tile(16, 32, 4, 4),
    (4, 128): Tile(16, 32, 8, 2),
    (4, 256): Tile(16, 16, 8, 2),
}
"""Tiles of such a step: (bytes of a number, widest padded head dim). All heads of a group, at most
16, are rows of one product."""


def decode(
    groups: int,
    dims: int,
    itemsize: int,
    capacity: int,
    left: int,
    sms: int,
    memory: int,
    fixed: bool = False,
) -> Choice:
    """The tile and the splits of a decode step in one launch, of `groups` pairs of a request and a
    key head.

    capacity: keys that the page table has room for. left: keys before its own that a query may see,
    -1 for all.
    memory: bytes of shared memory a program. fixed: splits of SPLIT_KEYS, in every batch.
    """
    tile = DECODE[min(key for key in DECODE if key[0] == itemsize and padded(dims) <= key[1])]
    row = padded(dims) * itemsize
    # Beside the query's rows, one tile of keys and values for each load in flight.
    in_flight = (memory - 2048 - tile.rows * row) // (2 * tile.keys * row)
    tile = tile._replace(stages=min(tile.stages, in_flight + 1))
    keys = capacity if left < 0 else min(capacity, left + tile.keys)
    if fixed:
        return Choice(tile, max(1, -(-keys // SPLIT_KEYS)))
    one, more = (
        min(sms * blocks // groups, keys // LEAST_DECODED) for blocks in (1, DECODE_BLOCKS)
    )
    return Choice(tile, max(1, more if more * LONG_SPLIT <= keys else one))


def part_of(launch: Launch, requests: int, last: bool) -> Launch:
    """`launch`, which is not ragged, for `requests` of its requests. The last ones bring the
    padding rows."""
    across = launch.blocks // ((launch.tiles - launch.pads) * launch.splits + launch.pads)
    direct, pads = requests * launch.each, launch.pads if last else 0
    return launch._replace(
        blocks=across * (direct * launch.splits + pads), tiles=direct + pads, pads=pads
    )


# (kind of numbers, widest padded head dim) -> tiles by rows. Head dims above 256 are latents (512 +
# 64). `stages` - 1 tiles of keys are in flight. Eight warps on 64 rows compute the same scores
# twice, so they are for tiles that leave four warps no registers.
TABLE: dict[tuple[str, int], tuple[Tile, ...]] = {
    ("half", 64): (Tile(16, 64, 4, 3), Tile(32, 64, 4, 3), Tile(64, 64, 4, 3), Tile(128, 64, 8, 3)),
    ("half", 128): (
        Tile(16, 32, 4, 3),
        Tile(32, 32, 4, 3),
        Tile(64, 64, 4, 3),
        Tile(128, 64, 8, 3),
        Tile(256, 64, 16, 3),
    ),
    ("half", 256): (
        Tile(16, 32, 4, 3),
        Tile(32, 32, 4, 3),
        Tile(64, 32, 4, 2),
        Tile(128, 32, 8, 2),
    ),
    ("half", 512): (Tile(16, 64, 4, 2), Tile(32, 64, 4, 2), Tile(64, 64, 8, 2)),
    ("quantised", 128): (
        Tile(16, 128, 4, 3),
        Tile(32, 64, 4, 3),
        Tile(64, 64, 4, 3),
        Tile(128, 64, 8, 3),
    ),
    # Conversion takes keys through registers, and 64 rows of a latent leave no room for them.
    ("quantised", 512): (Tile(16, 32, 4, 3), Tile(32, 32, 8, 2)),
    # Without matrix units.
    ("float32", 128): (Tile(16, 32, 8, 2), Tile(32, 32, 8, 2)),
    ("float32", 256): (Tile(16, 16, 8, 2), Tile(32, 16, 8, 2)),
    ("float32", 512): (Tile(16, 16, 8, 2),),
}
"""The committed table. A call has the narrowest class that holds its head dim, and in it the first
tile with enough rows, else the last."""

WIDE: dict[str, tuple[Tile, ...]] = {
    "half": (Tile(16, 32, 4, 2), Tile(32, 32, 4, 2), Tile(64, 32, 8, 2)),
    "quantised": (Tile(16, 32, 4, 2), Tile(32, 32, 8, 2)),
}
"""Of ordinary keys above 256 numbers, whose values take as much room again. Not measured: as many
registers as latents have."""


def first_part(dims: int) -> int:
    """Numbers of a query and key that one product takes: all, or the largest power of two of more
    than 256. Another takes the rest."""
    return dims if dims <= 256 else power(dims + 1) // 2


def tiles_of(s: Shape) -> tuple[Tile, ...]:
    """The table's row for a shape. Raises ValueError for a head dim beyond the table."""
    kind, width = _kind(s), padded(s.head_dim)
    if s.wide and s.itemsize == 2:
        return WIDE[kind]
    # The table has no quantised class of 64 or 256: those of half serve.
    if kind == "quantised" and (kind, width) not in TABLE:
        kind = "half"
    fits = [dim for of, dim in TABLE if of == kind and width <= dim]
    if not fits:
        raise ValueError(f"head_dim: got {s.head_dim}, want <= {max(dim for _, dim in TABLE)}")
    return TABLE[kind, min(fits)]


def _kind(s: Shape) -> str:
    if s.itemsize == 4:
        return "float32"
    return "quantised" if s.stored < s.itemsize else "half"


def pick(s: Shape, rows: int, memory: int) -> Tile:
    """The tile for `rows` rows, within `memory` bytes of shared memory a program."""
    most = ODD_ROWS if s.odd else UNBOUNDED if s.warpgroups else 128
    table = tuple(t for t in tiles_of(s) if t.rows <= most)
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
    """An upper bound of a program's shared memory: the query's rows, the weights, and the keys of
    all loads in flight."""
    in_flight = max(1, tile.stages - 1) + (tile.rows >= 64 and (s.wide or s.head_dim <= 256))
    # Keys keep their stored dtype in shared memory. Latents, which are also the values, are
    # converted first.
    stored = s.itemsize if s.head_dim > 256 else s.stored
    return (
        (tile.rows * s.q_width + tile.rows * tile.keys) * s.itemsize
        + in_flight * tile.keys * s.width * stored
        + 2048
    )


def launches(
    s: Shape, deterministic: bool, sms: int, memory: int, choice: Choice | None = None
) -> tuple[Launch, ...]:
    """The launches of a call, in order. The last one serves the padding rows. choice: of every
    launch, in place of the rules'."""
    deep = s.queries > DECODE_QUERIES
    if deep and (deterministic or (s.queries > PREFILL_QUERIES and s.requests > 1)):
        return (
            _launch(
                s._replace(queries=DECODE_QUERIES),
                deterministic,
                sms,
                memory,
                choice,
                most=DECODE_QUERIES,
            ),
            _launch(s, False, sms, memory, choice, fewest=DECODE_QUERIES + 1),
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
) -> Launch:
    # Of two launches, the first splits keys, and the second serves the padding rows.
    split, padding = fewest == 0, most == UNBOUNDED
    tile = _tile(s, _rows(s, deterministic, split), memory, choice)
    heads = min(s.group, tile.rows)
    block_q = tile.rows // heads
    each = max(1, -(-s.queries // block_q))
    direct = s.requests * each
    searched = s.tokens // block_q + s.requests + 1
    across = s.kv_heads * -(-s.group // heads)
    keys = s.capacity if s.left < 0 else min(s.capacity, s.left + s.queries + tile.keys)
    splits, split_keys = 1, 0
    if deterministic:
        split_keys = _fixed_split(s)
        splits = max(1, -(-keys // split_keys))
    elif split:
        room = sms * max(1, min(BLOCKS_PER_SM, memory // shared_bytes(tile, s)))
        splits = (choice and choice.splits) or _splits(s, keys, direct * across, room)
    # A grid for the longest request is mostly empty in a ragged batch. Then each tile searches for
    # its request.
    ragged = direct > 2 * searched and splits == 1 and not deterministic
    pads = max(1, min(64, s.tokens // 64)) if padding and not ragged else 0
    tiles = searched if ragged else direct + pads
    blocks = across * ((tiles - pads) * splits + pads)
    overlap = choice is None or choice.overlap
    return Launch(
        tile,
        blocks,
        tiles,
        pads,
        each,
        ragged,
        splits,
        split_keys,
        s.queries,
        fewest,
        most,
        overlap,
    )


def _rows(s: Shape, deterministic: bool, split: bool) -> int:
    if not split:
        return UNBOUNDED
    # Under a deterministic policy the tile follows from the model alone.
    return s.group if deterministic else s.group * s.queries


def _tile(s: Shape, rows: int, memory: int, choice: Choice | None) -> Tile:
    if s.masked:
        rows = min(rows, MASKED_ROWS)
    tile = choice.tile if choice else pick(s, rows, memory)
    return tile._replace(warps=8) if s.masked and tile.rows >= MASKED_ROWS else tile


def _fixed_split(s: Shape) -> int:
    return SPLIT_KEYS // 2 if s.head_dim > 256 and s.group <= 32 else SPLIT_KEYS


def _splits(s: Shape, keys: int, blocks: int, room: int) -> int:
    """The best number of splits of so many keys, in each of `blocks` programs, on a device with
    room for `room` programs at once."""
    if blocks == 0:
        return 1
    most = keys // (LEAST_LATENTS if s.head_dim > 256 else LEAST_KEYS)
    if blocks <= room // 2:
        return max(1, min(room // blocks, most))
    # Slightly more programs than there is room for take two rounds. Shorter programs make the last
    # round shorter.
    rounds = range(1, max(1, min(MOST_ROUNDS, most // 4)) + 1)
    return min(rounds, key=lambda n: -(-blocks * n // room) / n + MERGE_COST * (n > 1))
