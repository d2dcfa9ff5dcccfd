"""The suite `latent` at toy size: a layer that is wrong has no time."""

import pytest

pytest.importorskip("transformers", reason="transformers' layer judges ours")

from attnops.bench import Setup, latent
from tests.measuring import by_way
from tests.test_bench import TOY


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    monkeypatch.setattr(Setup, "compiled", lambda setup, function, **options: function)


def step(name="4 heads, 2x24"):
    return by_way(latent.cases(TOY)[name]())


def test_a_layer_is_beside_transformers():
    rows = step()
    assert set(rows) == {"layer", "kernel", "projections", "hf_eager", "hf_compiled"}
    for way, row in rows.items():
        assert (
            row["error"] <= row["budget"]
            and row["median_us"] > 0
            and ("of_hf_eager" in row or way == "hf_eager")
        )
    assert rows["layer"]["error"] > 0 and -1 < rows["layer"]["glue_share"] < 1


def test_only_the_last_requests_are_compared_where_all_are_too_large(monkeypatch):
    """As many as hold MOST_EXACT keys; an error in the last one is seen."""
    monkeypatch.setattr(latent, "MOST_EXACT", 24)
    right = latent.filled

    def wrong(*args, **kwargs):
        pages, batch = right(*args, **kwargs)
        batch.seq_lens[-1] -= 9
        return pages, batch

    assert "median_us" in step()["layer"]
    monkeypatch.setattr(latent, "filled", wrong)
    assert step()["layer"]["wrong"].startswith("wrong: off by")


def test_a_layer_that_is_wrong_has_no_time(monkeypatch):
    right = latent.ours

    def wrong(*args, **kwargs):
        made = right(*args, **kwargs)
        made.scale = made.scale * 1.5
        return made

    monkeypatch.setattr(latent, "ours", wrong)
    rows = step()
    assert rows["layer"]["wrong"].startswith("wrong: off by") and "glue_share" not in rows["layer"]
    assert all(rows[way]["median_us"] > 0 for way in ("kernel", "projections", "hf_eager"))


def test_an_op_that_is_wrong_has_no_time(monkeypatch):
    right = latent.mla_attention
    monkeypatch.setattr(latent, "mla_attention", lambda **given: right(**given | {"scale": 0.2}))
    rows = step()
    assert rows["kernel"]["wrong"].startswith("wrong: off by") and rows["layer"]["median_us"] > 0


def test_both_forms_and_the_one_that_is_taken():
    rows = step("4 heads, 2x20, 4 of them new")
    assert list(rows) == ["absorbed", "expanded", "automatic"]
    assert all(0 < row["error"] <= row["budget"] and row["median_us"] > 0 for row in rows.values())
    assert rows["automatic"]["error"] == rows["absorbed"]["error"], "few tokens over a prefix"
