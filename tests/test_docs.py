"""What the documents say is so: code blocks run, generated parts are fresh, shown output is what is printed, links lead somewhere."""

import importlib.util
import re
from typing import Any

import pytest

from tests.helpers import ROOT, ready_process

PAGES = sorted([*ROOT.glob("*.md"), *(p for p in (ROOT / "docs").rglob("*.md") if "gallery" not in p.parts)])
README = (ROOT / "README.md").read_text()
FENCE = re.compile(r"^```(\w*|{[\w-]+}.*)\n(.*?)^```$", re.M | re.S)
PRINTED = re.compile(r"^```python\n(?:(?!^```).)*^```\n\n```text\n(.*?)^```$", re.M | re.S)
"""The text right below a block of Python."""
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.py"))
MOST_KERNEL_LINES = 25


def blocks(text, language="python"):
    return [body for kind, body in FENCE.findall(text) if kind == language]


def part(text, name):
    """What stands between a generated part's markers, without the fence."""
    [body] = re.findall(rf"<!-- {name}:begin -->\n(.*?)<!-- {name}:end -->", text, re.S)
    return "\n".join(line for line in body.splitlines() if not line.startswith("```"))


def place(page):
    return str(page.relative_to(ROOT))


def links(page):
    """The paths that a page links to, relative to it."""
    text = FENCE.sub("", page.read_text())
    return [t for t in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text) if "://" not in t]


def script(path, *arguments):
    return ready_process(f"import runpy; runpy.run_path({str(path)!r}, run_name='__main__')", *arguments)


@pytest.mark.slow
def test_generated_parts_are_fresh():
    assert script("docs/generate.py", "--check") == ""


def test_a_stale_part_is_found(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec and spec.loader
    generate: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    page = tmp_path / "page.md"
    page.write_text("above\n<!-- part:begin -->\nold\n<!-- part:end -->\nbelow\n")
    made = ["old"]
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    monkeypatch.setattr(generate, "PARTS", {"page.md": {"part": lambda: made[-1]}})
    assert generate.main(["--check"]) == 0
    made.append("new")
    assert generate.main(["--check"]) == 1 and "old" in page.read_text()
    assert generate.main([]) == 0
    assert page.read_text() == "above\n<!-- part:begin -->\nnew\n<!-- part:end -->\nbelow\n"
    page.write_text("no markers")
    with pytest.raises(ValueError, match="part:begin"):
        generate.main(["--check"])


# README's blocks are one script, and so are those of every other page. The last lines compare what the first block compiled to.
GRAPH = """
from attnops.cli.demo import kernel_lines
print("compiled to")
for line, count in kernel_lines(set()).items():
    print(line + (f"  x{count}" if count > 1 else ""))
"""


@pytest.mark.slow
def test_readme_blocks_run_and_compile_to_the_lines_shown():
    printed = ready_process("\n".join(blocks(README)) + GRAPH)
    assert "not plain: causal=True (wants False)" in printed
    assert printed.split("compiled to\n")[1].strip() == part(README, "graph").strip()


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p.read_text()) and p.name != "README.md"], ids=place)
def test_blocks_run_and_print_the_text_below_them(page):
    printed = ready_process("\n".join(blocks(page.read_text())))
    assert [text for text in PRINTED.findall(page.read_text()) if text not in printed] == []


@pytest.mark.slow
def test_readme_shows_what_explain_prints():
    command, _, shown = part(README, "explain").partition("\n")
    assert command.startswith("$ attnops explain ")
    printed = ready_process("import runpy; runpy.run_module('attnops.cli', run_name='__main__')", *command.split()[2:])
    assert [line.rstrip() for line in printed.strip().splitlines()] == shown.strip().splitlines()


@pytest.mark.parametrize("page", PAGES, ids=place)
def test_links_lead_somewhere(page):
    assert not [t for t in links(page) if not (page.parent / t).exists()]


def test_readme_order():
    order = [
        "attnops.patch(model)",
        "<!-- explain:begin -->",
        "<!-- graph:begin -->",
        "<!-- kernels:begin -->",
        "## Add a kernel",
        "## The folders",
    ]
    places = [README.index(mark) for mark in order]
    assert places == sorted(places)


def test_readme_kernel_is_short():
    [kernel] = [body for body in blocks(README) if "register(Kernel(" in body]
    assert len(kernel.splitlines()) <= MOST_KERNEL_LINES


def test_readme_maps_every_folder():
    folders = [p for p in ROOT.iterdir() if p.is_dir() and not p.name.startswith((".", "_")) and any(p.glob("*.py"))]
    folders += [p for p in (ROOT / "attnops").iterdir() if (p / "__init__.py").exists() and not p.is_symlink()]
    missing = [str(p.relative_to(ROOT)) for p in folders if f"({p.relative_to(ROOT)})" not in README]
    assert not missing


def test_links_lead_from_the_index_to_every_page():
    reached, waiting = set(), [ROOT / "docs" / "index.md"]
    while waiting:
        page = waiting.pop().resolve()
        if page not in reached and page.suffix == ".md":
            reached.add(page)
            waiting += [page.parent / target for target in links(page)]
    assert not [place(p) for p in PAGES if p.is_relative_to(ROOT / "docs") and p not in reached]


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.stem)
def test_example_runs(example):
    printed = script(example)
    assert printed and "NOT" not in printed


@pytest.mark.slow
@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda p: p.stem)
def test_tutorial_runs(tutorial):
    """Each asserts what it promises."""
    assert script(tutorial)
