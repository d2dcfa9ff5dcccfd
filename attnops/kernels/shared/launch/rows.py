"""Launches that clear rows, and that write lists of slots. Importing this module imports triton."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attnops.core.adapt import on_device_of
from attnops.kernels.shared.device import rows as device
from attnops.kernels.shared.launch.gpu import launch
from attnops.kernels.shared.sizes import power

COLUMNS = 1024
"""The most columns of a table that a program writes. A table's width does not change from step to
step."""
CLEARED, CLEARED_COLUMNS = 64, 256
"""Rows that a program of `clear_rows` covers, and columns of one store. Most programs read the last
length only, and return."""


def _columns(width: int) -> int:
    return max(64, min(COLUMNS, power(width)))


def make_lists(
    indices: Tensor,
    lengths: Tensor | None,
    slots: int,
    out: Tensor,
    page: int = 1,
    apart: int = 1,
) -> None:
    """Write `[T, width]` lists of slots below `slots`, and -1 elsewhere, from `[T, topk]` lists,
    each within its length.

    page: slots of a page. apart: slots from one page's start to the next one's in what is written.
    """
    if out.numel() == 0:
        return
    (tokens, width), block = out.shape, _columns(out.shape[1])
    strides = (*indices.stride(), 0 if lengths is None else lengths.stride(0))
    args = (indices, lengths, out, indices.shape[1], width, slots, page, apart, *strides)
    constants = {"LENGTHS": lengths is not None, "APART": apart != page, "BLOCK": block}
    launch(device.lists, (tokens, -(-width // block)), constants, args)


def clear_rows(parts: tuple[tuple[Tensor, Tensor, float], ...]) -> None:
    """For each of up to three (starts, contiguous rows, fill): set the rows from `starts[-1]` on to
    `fill`."""
    most = max(rows.shape[0] for _, rows, _ in parts)
    if most == 0:
        return
    args: list[Any] = []
    constants = {"BLOCK_R": CLEARED, "BLOCK": CLEARED_COLUMNS}
    for name, (starts, rows, fill) in zip(
        "ABC", (*parts, *[parts[0]] * (3 - len(parts))), strict=True
    ):
        args += [starts, starts.stride(0) * (starts.shape[0] - 1), rows, rows.shape[0], fill]
        constants[f"{name}_COLUMNS"] = rows[0].numel() if rows.shape[0] else 1
    with on_device_of(parts[0][1]):  # torch's own kernels call this, too
        launch(device.clear, (-(-most // CLEARED), len(parts)), constants, tuple(args))
