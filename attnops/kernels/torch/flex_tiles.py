"""The tiles of `flex` on CUDA. They follow from head dims, the GPU and whether there is a mask."""

from __future__ import annotations

from typing import NamedTuple

from attnops.kernels.shared.sizes import padded

BLOCK = 128
"""Queries, and keys, of a block of torch's BlockMask."""
WARP_GROUPS = (90, 100, 103, 110)


class Tile(NamedTuple):
    """Torch's kernel options: queries and keys of a program's step, loads in flight, warps."""

    BLOCK_M: int
    BLOCK_N: int
    num_stages: int
    num_warps: int


# By the widest head dim: up to 64, 128, 256, and above.
HALF_TILES = (Tile(128, 128, 3, 4), Tile(128, 64, 3, 8), Tile(64, 32, 3, 4), Tile(64, 32, 3, 8))
# Of half numbers under a mask up to 128, by times of an H200
MASK_TILES = (Tile(64, 64, 3, 4), Tile(64, 128, 2, 4))
SINGLE_TILES = (Tile(128, 32, 3, 4), Tile(64, 32, 3, 4), Tile(32, 32, 3, 4), Tile(32, 16, 3, 4))


def shared_bytes(
    tile: Tile, head_dim: int, v_head_dim: int, itemsize: int, arch: int, masked: bool
) -> int:
    """An upper bound of a program's shared memory: queries, weights, and the keys, values and mask
    of every load in flight.

    Read off the code that Triton 3.6 and 3.7 make of torch's template. Products of warp groups hold
    one load more than others.
    """
    queries, keys, stages, _ = tile
    width, v_width = padded(head_dim), padded(v_head_dim)
    if stages == 1:
        held, mask = keys * max(width, v_width), 0
    else:
        flight = stages if itemsize == 2 and arch in WARP_GROUPS else stages - 1
        held, mask = flight * keys * (width + v_width), 4 * queries * keys * (stages - 1) * masked
    return (queries * width + held + queries * keys) * itemsize + mask + 2048


def tile(
    head_dim: int,
    v_head_dim: int,
    itemsize: int,
    arch: int,
    masked: bool = False,
    keys: int = BLOCK,
) -> Tile:
    """The tile of a call on `arch`, made smaller until its shared memory fits. No tile has more
    than `keys` keys, rounded up.

    Torch's defaults fit neither every mask nor every head dim. Where no tile fits, the smallest is
    returned; `fitting` refuses the call.
    """
    widest, limit = max(padded(head_dim), padded(v_head_dim)), shared_limit(arch)
    tiles = SINGLE_TILES if itemsize != 2 else MASK_TILES + HALF_TILES[2:] if masked else HALF_TILES
    found = tiles[(widest > 64) + (widest > 128) + (widest > 256)]
    if found.BLOCK_N == 128 and arch not in WARP_GROUPS:
        found = found._replace(BLOCK_N=64)
    found = found._replace(BLOCK_N=min(found.BLOCK_N, padded(keys)))
    while shared_bytes(found, head_dim, v_head_dim, itemsize, arch, masked) > limit and found[
        :3
    ] != (16, 16, 1):
        if found.num_stages > 2:
            found = found._replace(num_stages=2)
        elif found.BLOCK_N > 16:
            found = found._replace(BLOCK_N=found.BLOCK_N // 2)
        elif found.BLOCK_M > 16:
            found = found._replace(BLOCK_M=found.BLOCK_M // 2)
        else:
            found = found._replace(num_stages=1)
    return found


def shared_limit(arch: int) -> int:
    """Bytes of shared memory that a program may have on a GPU of compute capability `arch` (CUDA
    C++ programming guide)."""
    if arch < 80:
        return 64 * 1024
    return (227 if arch in WARP_GROUPS else 163 if arch in (80, 87) else 99) * 1024
