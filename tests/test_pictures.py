"""The pictures of docs and README: each proves its title, from made-up figures and from those that
are committed."""

from typing import Any
from xml.etree import ElementTree

import pytest

from tests.helpers import ROOT
from tests.measuring import results_file

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def pictures(docs) -> Any:
    return docs("pictures")


@pytest.fixture
def page(docs) -> Any:
    return docs("performance")


@pytest.fixture
def write(tmp_path) -> Any:
    """Writes a results file of the machine `toy`."""
    return lambda suite, rows: results_file(tmp_path, "toy", suite, {"suite": suite, "rows": rows})


def words_of(svg):
    root = ElementTree.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    return ["".join(node.itertext()) for node in root.iter(f"{SVG}text")]


def rows_of(case, ways, **more):
    return [
        {"case": case, "way": way, "median_us": 1000 * ms, "spread_us": 100.0, **more}
        for way, ms in ways.items()
    ]


def test_committed_pictures_are_small_and_say_what_they_prove(pictures, page):
    drawn = {path.name: (machine, svg) for machine, path, svg in page.pictures(ROOT)}
    assert "h200-tokens.svg" in drawn and len(drawn) <= len(pictures.PICTURES) * len(
        {machine for machine, _ in drawn.values()}
    )
    for machine, svg in drawn.values():
        assert machine != "cpu" and len(svg) < 20_000 and "prefers-color-scheme:dark" in svg
        text = " ".join(words_of(svg))
        assert page.title(svg) in text and " is better" in text, "text is text"


def test_titles_are_of_the_figures(pictures, page):
    nothing = [
        {"case": "a 1x1", "way": "attnops", "wrong": "wrong"},
        *rows_of("b 1x1", {"attnops": 1.0}),
    ]
    assert not any(
        draw({suite: {"rows": nothing} for suite in ("decode", "kernels")})
        for draw in pictures.PICTURES.values()
    )
    us = {"us_matmul": 1000.0, "us_attention": 500.0, "us_glue": 400.0, "us_gaps": 100.0}
    first_s = {"hf_compiled": 10.0, "attnops_piecewise": 4.0, "attnops_breakable": 1.0}
    rows = [
        row | {"first_s": first_s[row["way"]]}
        for row in rows_of("m 8x1k", dict.fromkeys(first_s, 2.0), **us, layers=2)
    ]
    rows[1]["us_glue"] = 0.0
    report = {"decode": {"device": "toy", "rows": rows}}
    parts, first = pictures.parts(report), pictures.first_steps(report)
    assert "takes 60% of the time" in page.title(parts) and "0.6 of 1.6 ms" in words_of(parts)
    assert "after 1 s, those" in page.title(first)
    assert {"10.0 s", "m, 2 layers, 8 requests of 1k tokens"} <= {*words_of(first)}
    assert "Steps are 1.00 times as fast" in page.title(pictures.speeds(report))
    times = {"fa3": 2.0, "triton": 4.0, "automatic": 3.0, "direct.fa3": 1.5}
    rows = (
        rows_of("c", times)
        + rows_of("d", {**times, "automatic": 1.5})
        + rows_of("e", {"fa3": 1.0, "automatic": 9.0})
    )
    choice = page.title(pictures.choice({"kernels": {"rows": rows}}))
    assert choice.endswith("takes 1.00 to 2.00 times as long as the fastest of all")


def test_the_picture_of_readme_follows_generate(page, write, tmp_path):
    def drawn():
        """What stands above and below the picture, and its words."""
        list(page.stale_plots(tmp_path, False))
        return page.picture(tmp_path), words_of(
            (tmp_path / "docs" / "plots" / "toy-tokens.svg").read_text()
        )

    decode = {
        "hf_eager": 8.0,
        "hf_compiled": 5.0,
        "attnops_eager": 3.0,
        "attnops_piecewise": 4.0,
        "attnops_breakable": 1.0,
    }
    write("decode", rows_of("m 1x1k", decode) + rows_of("n 1x1k", {**decode, "attnops_hf": 0.1}))
    before, words = drawn()
    assert (
        "80% of the time" in before
        and "toy/decode.json" in before
        and "Not in that run: vLLM, SGLang." in before
    )
    assert {"8.0 ms", "5.0 ms", "4.0 ms", "m, 1 request of 1k tokens"} <= {
        *words
    } and "n, 1 request of 1k tokens" not in words
    ways = {"hf": 12.0, "hf_static": 6.0, "attnops": 4.0, "attnops_paged": 9.0, "vllm": 5.0}
    facts = {"vllm": {"version": "0.1", "how": "its steps"}}
    first = rows_of("m 1x1k, first call", {"hf": 0.001, "vllm": 0.001}, first_s=1.5)
    rows = [*rows_of("m 1x1k", ways), *rows_of("m 8x1k", {**ways, "attnops": 2.0}), *first]
    write("generate", [row | facts.get(row["way"], {}) for row in rows])
    after, words = drawn()
    assert (
        "40 to 80% of the time" in after
        and "toy/generate.json" in after
        and "vLLM 0.1: its steps." in after
    )
    assert (
        "| transformers | 12.0 | 12.0 | 1.5 |\n" in after and "| attnops | 4.0 | 2.0 | - |" in after
    )
    assert "| vLLM 0.1 | 5.0 | 5.0 | - |" in after, "an engine's first call is another measurement"
    shown = ["transformers", "transformers, compiled", "vLLM 0.1", "attnops"]
    assert [word for word in words if word in shown] == 2 * shown
    assert {"12.0 ms", "6.0 ms", "2.0 ms"} <= {*words} and "9.0 ms" not in words
    row = (
        "| toy | generate m 8x1k | 12.00 ± 0.10 | 6.00 ± 0.10 | 5.00 ± 0.10 (0.1) | 2.00 ± "
        "0.10 (`attnops`) | 2.50x |"
    )
    assert row in page.performance_short(tmp_path)
