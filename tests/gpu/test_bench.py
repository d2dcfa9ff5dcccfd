"""`attnops bench decode --model llama-3-8b-shape --quick` on a CUDA device, of one layer."""

import pytest
import torch

pytest.importorskip("transformers", reason="the suite measures transformers models")

from attnops.bench import Point, Setup, decode, ways


def test_a_quick_run() -> None:
    setup = Setup(
        torch.device("cuda", 0),
        quick=True,
        model="llama-3-8b-shape",
        layers=1,
        points=(Point(2, 128),),
    )
    [case] = decode.cases(setup).values()
    rows = {row["way"]: row for row in case()}
    assert rows.keys() == {
        name for name, how in ways.here(setup, "decode").items() if not (how.asked or how.packed)
    }
    assert {way: row for way, row in rows.items() if not row.get("median_us")} == {}
