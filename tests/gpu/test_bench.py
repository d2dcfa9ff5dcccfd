"""`attnops bench decode --model llama-8b-shape --quick` on a CUDA device, of one layer."""

import pytest
import torch

pytest.importorskip("transformers", reason="the suite measures transformers models")

from attnops.bench import Point, Setup, decode

WAYS = {"hf_eager", "hf_compiled", "attnops_eager", "attnops_hf", "attnops_paged", "attnops_piecewise", "attnops_breakable"}


def test_a_quick_run() -> None:
    setup = Setup(torch.device("cuda", 0), quick=True, model="llama-8b-shape", layers=1, points=(Point(2, 128),))
    [case] = decode.cases(setup).values()
    rows = {row.way: row for row in case()}
    assert rows.keys() == WAYS
    assert {way: row.wrong for way, row in rows.items() if row.wrong or not row.median_us} == {}
