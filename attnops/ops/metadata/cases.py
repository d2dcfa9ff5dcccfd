"""The cases of the ops that make the metadata of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch

from attnops.ops.case_data import I32, I64, Given, Grid, Rows, Scene

Named = dict[str, dict[str, Any]]
LENGTHS, INTS = {"ragged": (3, 0, 5, 1), "one": (4,), "zeros": (0, 0), "none": ()}, (I32, I64)
BEGINS = {
    "one_row": ((3, 5, 1),),
    "rows": ((4,), (1, 3)),
    "one": ((6,),),
    "each_token": ((1,) * 4,),
    "as_many_as_keys": ((1, 1, 2),),
    "no_tokens": ((), ()),
}
HOLES: dict[str, tuple[int, ...]] = {
    "none": (),
    "first": (0,),
    "second": (1, 4),
    "most": (0, 1, 2, 3),
    "all": (0, 1, 2, 3, 4),
}
WAYS: Named = {
    "squeeze": {},
    "window": {"squeeze": False, "window_left": 3},
    "in_place": {"squeeze": False},
}
HEADS: Named = {
    "rows": {},
    "heads_16": {"q_heads": 16},
    "heads_128": {"q_heads": 128},
    "float8": {"q_heads": 16, "float8": True},
}
QUERIES: dict[str, tuple[int, ...]] = {
    "ragged": (3, 0, 5, 1),
    "decode": (1, 1, 1),
    "no_requests": (),
}
MAPPED = {
    "positions": (0, 4, -1, 7, 2, 99, 5),
    "rows": (0, 1, 0, -1, 2, 1, 2),
    "page_table": ((5, 2, -1), (0, 7, 3), (1, -1, 6)),
}


def _points(*axes: Mapping[str, Any] | Sequence[Any]) -> Rows:
    """Every point of the axes, which hold the values of a row by label; a dict is values by
    name."""
    labelled = [
        axis if isinstance(axis, Mapping) else {str(v).removeprefix("torch."): v for v in axis}
        for axis in axes
    ]
    points = [zip(*point, strict=True) for point in product(*(axis.items() for axis in labelled))]
    return {"-".join(names): values for names, values in points}


def _begins(scene: Scene, requests: Sequence[Sequence[int]]) -> Given:
    """requests: how long each request of a row is."""
    flags = [int(place == 0) for row in requests for length in row for place in range(length)]
    return {
        "begins": scene.source.ints(flags, torch.bool).reshape(
            len(requests), len(flags) // len(requests)
        )
    }


def _table(scene: Scene) -> Given:
    count = len(scene.k_lens or ())
    return {"page_table": scene.source.ints(scene.source.permutation(count * 5)).reshape(count, 5)}


def _by_token(scene: Scene, width: int) -> Given:
    source, q_lens = scene.source, scene.q_lens or ()
    table = source.ints(n - 1 for n in source.permutation(len(q_lens) * width)).reshape(
        len(q_lens), width
    )
    return {
        "page_table": table,
        "seq_lens": source.ints(n + 2 * (i % 2) for i, n in enumerate(q_lens)),
    }


def _named(scene: Scene, holes: Sequence[int]) -> Given:
    """holes: the columns that name no page."""
    source, q_lens, page, width = scene.source, scene.q_lens or (), 4, 5
    total = len(q_lens) * width
    ids = [
        n - 1 if i % width not in holes else (-1, total, -7)[i % 3]
        for i, n in enumerate(source.permutation(total))
    ]
    lengths = source.ints(n and n + 7 + 3 * (i % 2) for i, n in enumerate(q_lens))
    return {
        "page_table": source.ints(ids).reshape(len(q_lens), width),
        "seq_lens": lengths,
        "num_pages": total,
        "page_size": page,
    }


SLOTS: Rows = {n: (*row, MAPPED) for n, row in _points((1, 3, 16), INTS).items()}
CASES = {
    "cu_seqlens": Grid("lengths index", _points(LENGTHS, INTS)),
    "request_starts": Grid("requests", _points(BEGINS), _begins),
    "token_rows": Grid("q_lens padding", _points(LENGTHS, (0, 3))),
    "slot_mapping": Grid("page_size index", SLOTS),
    "kv_indices": Grid("k_lens page_size index", _points(LENGTHS, (1, 3), INTS), _table),
    "decode_rows": Grid(
        "q_lens padding width causal",
        _points(LENGTHS, (0, 3), (3, 0), (True, False), HEADS),
        _by_token,
    ),
    "named_pages": Grid("holes q_lens", _points(HOLES, QUERIES, WAYS), _named),
}
