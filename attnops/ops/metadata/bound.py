"""What of the metadata of a step is compared with the reference: integers, which are exact."""

from __future__ import annotations

from typing import Any

from attnops.core.rounding import Compared, Results
from attnops.ops.metadata.reference import decode_rows, rows_schedule_words


def _rows(call: Any, results: Results) -> Compared:
    """Only FlashMLA reads the first words."""
    start = rows_schedule_words(call.num_tokens, call.q_heads, call.float8)
    ((name, got),) = results.items()
    return {name: (got[start:], decode_rows(call)[start:], 0.0)}


COMPARED = {"decode_rows": _rows}
