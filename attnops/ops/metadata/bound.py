"""What of the metadata of a step is compared with the reference: integers, which are exact."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attnops.core.rounding import Compared
from attnops.ops.metadata.reference import decode_rows, rows_schedule_words


def _rows(call: Any, results: dict[str, Tensor]) -> Compared:
    """Only FlashMLA reads the first words."""
    start = rows_schedule_words(call.num_tokens, call.q_heads, call.float8)
    ((name, got),) = results.items()
    return {name: (got[start:], decode_rows(call)[start:], 0.0)}


COMPARED = {"decode_rows": _rows}
