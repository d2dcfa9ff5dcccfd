"""The pictures of docs and README: each proves its title, from made-up figures and from those that are committed."""

import json
from importlib import import_module
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.helpers import ROOT

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def docs(monkeypatch) -> Any:
    """The modules docs/pictures.py and docs/performance.py."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    return import_module("pictures"), import_module("performance")


@pytest.fixture
def write(tmp_path) -> Any:
    """Writes a results file of the machine `toy`."""
    folder = tmp_path / "benchmarks" / "results" / "toy"
    folder.mkdir(parents=True)
    head = {"device": "Toy GPU", "date": "2026-01-01", "commit": "c0ffee"}
    return lambda suite, rows: (folder / f"{suite}.json").write_text(json.dumps({**head, "suite": suite, "rows": rows}))


def words_of(svg):
    root = ElementTree.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    return ["".join(node.itertext()) for node in root.iter(f"{SVG}text")]


def rows_of(case, ways, **more):
    return [{"case": case, "way": way, "median_us": 1000 * ms, "spread_us": 100.0, **more} for way, ms in ways.items()]


def test_committed_pictures_are_small_and_say_what_they_prove(docs):
    pictures, page = docs
    drawn = {path.name: (machine, svg) for machine, path, svg in page.pictures(ROOT)}
    assert "h200-tokens.svg" in drawn and len(drawn) <= len(pictures.PICTURES) * len({machine for machine, _ in drawn.values()})
    for machine, svg in drawn.values():
        assert machine != "cpu" and len(svg) < 20_000 and "prefers-color-scheme:dark" in svg
        text = " ".join(words_of(svg))
        assert page.title(svg) in text and " is better" in text, "text is text"


def test_titles_are_of_the_figures(docs):
    pictures, page = docs
    nothing = [{"case": "a 1x1", "way": "attnops", "wrong": "wrong"}, *rows_of("b 1x1", {"attnops": 1.0})]
    assert not any(draw({suite: {"rows": nothing} for suite in ("decode", "kernels")}) for draw in pictures.PICTURES.values())
    us = {"us_matmul": 1000.0, "us_attention": 500.0, "us_glue": 400.0, "us_gaps": 100.0}
    ways = {"hf_compiled": 10.0, "attnops_piecewise": 4.0, "attnops_breakable": 1.0}
    rows = [{**rows_of("m 8x1k", {way: 2.0}, **us, layers=2)[0], "first_s": s} for way, s in ways.items()]
    rows[1]["us_glue"] = 0.0
    report = {"decode": {"device": "toy", "rows": rows}}
    assert "takes 60% of the time" in page.title(pictures.parts(report)) and "0.6 of 1.6 ms" in words_of(pictures.parts(report))
    words = words_of(pictures.first_steps(report))
    assert "after 1 s, those" in page.title(pictures.first_steps(report)) and {"10.0 s", "m, 2 layers, 8 requests of 1k tokens"} <= set(
        words
    )
    assert "Steps are 1.00 times as fast" in page.title(pictures.speeds(report))
    times = {"fa3": 2.0, "triton": 4.0, "automatic": 3.0, "direct.fa3": 1.5}
    rows = rows_of("c", times) + rows_of("d", {**times, "automatic": 1.5}) + rows_of("e", {"fa3": 1.0, "automatic": 9.0})
    assert page.title(pictures.choice({"kernels": {"rows": rows}})).endswith("takes 1.00 to 2.00 times as long as the fastest of all")


def test_ticks_are_round(docs):
    ticks = import_module("plots").ticks
    assert ticks(37.9) == [0, 10, 20, 30] and ticks(3.06) == [0, 0.5, 1, 1.5, 2, 2.5, 3]
    assert all(3 <= len(ticks(0.1 * n)) <= 8 for n in range(1, 400))


def test_the_picture_of_readme_follows_generate(docs, write, tmp_path):
    _, page = docs
    decode = {"hf_eager": 8.0, "hf_compiled": 5.0, "attnops_eager": 3.0, "attnops_piecewise": 4.0, "attnops_breakable": 1.0}
    write("decode", rows_of("m 1x1k", decode) + rows_of("n 1x1k", {**decode, "attnops_hf": 0.1}))
    list(page.stale_plots(tmp_path, False))
    before, svg = page.picture(tmp_path), (tmp_path / "docs" / "plots" / "toy-tokens.svg").read_text()
    assert "80% of the time" in before and "toy/decode.json" in before and "Not in that run: vLLM, SGLang." in before
    assert {"8.0 ms", "5.0 ms", "4.0 ms", "m, 1 request of 1k tokens"} <= set(words_of(svg)) and "vLLM" not in svg and "n, 1" not in svg
    generate = {"hf": 12.0, "hf_static": 6.0, "attnops": 4.0, "attnops_paged": 9.0, "vllm": 5.0, "sglang": 5.5}
    first = [row | {"first_s": 1.5} for row in rows_of("m 1x1k, first call", {"hf": 0.001, "vllm": 0.001})]
    rows = [*rows_of("m 1x1k", generate), *rows_of("m 8x1k", {**generate, "attnops": 2.0}), *first]
    for row in rows:
        row |= {"vllm": {"version": "0.1", "how": "its steps"}, "sglang": {"version": "0.2", "how": "its runner"}}.get(row["way"], {})
    write("generate", rows)
    assert list(page.stale_plots(tmp_path, False)) == ["docs/plots/toy-tokens.svg"]
    after, svg = page.picture(tmp_path), (tmp_path / "docs" / "plots" / "toy-tokens.svg").read_text()
    assert "40 to 80% of the time" in after and "toy/generate.json" in after and "Not in" not in after and "Toy GPU, 2026-01-01" in after
    assert "| transformers | 12.0 | 12.0 | 1.5 |\n" in after and "| attnops | 4.0 | 2.0 | - |" in after
    assert "| vLLM 0.1 | 5.0 | 5.0 | - |" in after, "an engine's first call is another measurement"
    words = words_of(svg)
    assert "vLLM 0.1: its steps. SGLang 0.2: its runner." in after and "generate() or an engine, the prompt included" in " ".join(words)
    shown = ["transformers", "transformers, compiled", "vLLM 0.1", "SGLang 0.2", "attnops"]
    assert [word for word in words if word in shown] == 2 * shown and {"12.0 ms", "6.0 ms", "5.5 ms", "2.0 ms"} <= set(words)
    assert "9.0 ms" not in words and "first call" not in svg
    assert "`attnops bench generate --engine vllm=PYTHON --engine sglang=PYTHON --out results`" in page.performance_full(tmp_path)
    table = page.performance_short(tmp_path)
    assert "| machine | what | transformers, ms | transformers, compiled, ms | vLLM, ms | SGLang, ms | attnops, ms |" in table
    assert (
        "| toy | generate m 8x1k | 12.00 ± 0.10 | 6.00 ± 0.10 | 5.00 ± 0.10 (0.1) | 5.50 ± 0.10 (0.2) | 2.00 ± 0.10 (`attnops`) | 2.50x |"
        in table
    )
