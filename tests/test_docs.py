"""What the documents say is so: code blocks run, generated parts are fresh, shown output is what is
printed, links lead somewhere."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from typing import Any

import pytest

from tests.helpers import ROOT, ready_process, sources

PAGES = sorted(
    [*ROOT.glob("*.md"), *(p for p in (ROOT / "docs").rglob("*.md") if "gallery" not in p.parts)]
)
README = (ROOT / "README.md").read_text()
FENCE = re.compile(r"^```(\w*|{[\w-]+}.*)\n(.*?)^```$", re.M | re.S)
PRINTED = re.compile(r"^```python\n(?:(?!^```).)*^```\n\n```text\n(.*?)^```$", re.M | re.S)
"""The text right below a block of Python."""
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.py"))
MOST_README_LINES, FIRST_SCREEN = 120, 50


def blocks(text, language="python"):
    return [body for kind, body in FENCE.findall(text) if kind == language]


def part(text, name):
    """What stands between a generated part's markers, without the fence."""
    [body] = re.findall(rf"<!-- {name}:begin -->\n(.*?)<!-- {name}:end -->", text, re.S)
    return "\n".join(line for line in body.splitlines() if not line.startswith("```"))


OPTIONAL = {
    "diffusers",
    "peft",
    "sentence_transformers",
    "timm",
    "torchtitan",
    "torchvision",
    "transformers",
}


def skip_unless_installed(code):
    """Skip where a package that the code imports is missing."""
    for package in sorted(OPTIONAL & {*re.findall(r"^(?:from|import) (\w+)", code, re.M)}):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


def place(page):
    return str(page.relative_to(ROOT))


def links(page):
    """The paths that a page links to, relative to it."""
    text = FENCE.sub("", page.read_text())
    return [t for t in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text) if "://" not in t]


def script(path, *arguments):
    code = f"import runpy; runpy.run_path({str(path)!r}, run_name='__main__')"
    return ready_process(
        code, *arguments, env={"CUDA_VISIBLE_DEVICES": ""}
    )  # pages show what a CPU prints


@pytest.mark.slow
def test_generated_parts_are_fresh():
    assert script("docs/generate.py", "--check") == ""


def loaded(name):
    """A script of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec and spec.loader
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_stale_part_is_found(tmp_path, monkeypatch):
    generate, page = loaded("generate"), tmp_path / "page.md"
    above, below = "above\n<!-- part:begin -->\n", "\n<!-- part:end -->\nbelow\n"
    page.write_text(f"{above}old{below}")
    made = ["old"]
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    monkeypatch.setattr(generate, "PARTS", {"page.md": {"part": lambda: made[-1]}})
    assert generate.main(["--check"]) == 0
    made.append("new")
    assert generate.main(["--check"]) == 1 and "old" in page.read_text()
    assert generate.main([]) == 0 and page.read_text() == f"{above}new{below}"
    page.write_text("no markers")
    with pytest.raises(ValueError, match="part:begin"):
        generate.main(["--check"])


# The blocks of a page are one script. These lines print what its models compiled to.
GRAPH = """
from attnops.cli.demo import kernel_lines
print("compiled to")
for line, count in kernel_lines().items():
    print(line + (f"  x{count}" if count > 1 else ""))
"""


@pytest.mark.sweep(5)
@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p.read_text())], ids=place)
def test_blocks_run_and_print_the_text_below_them(page):
    text = page.read_text()
    skip_unless_installed("\n".join(blocks(text)))
    compiled = "<!-- graph:begin -->" in text
    printed, _, lines = ready_process("\n".join([*blocks(text), GRAPH * compiled])).partition(
        "compiled to\n"
    )
    assert [below for below in PRINTED.findall(text) if below not in printed] == []
    assert not compiled or lines.strip() == part(text, "graph").strip()


@pytest.mark.parametrize("page", PAGES, ids=place)
def test_links_lead_somewhere(page):
    assert not [t for t in links(page) if not (page.parent / t).exists()]


def test_readme_is_short():
    lines = README.splitlines()
    assert len(lines) <= MOST_README_LINES and lines.index("<!-- explain:end -->") < FIRST_SCREEN
    [code] = blocks(README)
    assert len(code.split("\n")) <= 7


def test_architecture_maps_every_folder():
    folders = {path.parent for path in sources().values() if path.name == "__init__.py"}
    rooms = [
        folder.relative_to(ROOT) for folder in folders if folder.parent in (ROOT, ROOT / "attnops")
    ]
    text = (ROOT / "docs" / "architecture.md").read_text()
    assert len(rooms) > 10 and not [
        room for room in rooms if room.name != "attnops" and f"`{room}/`" not in text
    ]


def test_links_lead_from_the_index_to_every_page():
    reached = [ROOT / "docs" / "index.md"]
    for page in reached:
        there = [
            (page.parent / target).resolve() for target in links(page) if target.endswith(".md")
        ]
        reached += [found for found in dict.fromkeys(there) if found not in reached]
    own = [
        p
        for p in PAGES
        if p.is_relative_to(ROOT / "docs") and not p.read_text().startswith("```{include}")
    ]
    assert not {*own} - {*reached}


EXAMPLES = loaded("examples")
GALLERY = EXAMPLES.PAGE.read_text()
SHOWN = EXAMPLES.shown(GALLERY)


def test_the_gallery_has_every_example():
    assert EXAMPLES.page(SHOWN) == GALLERY, "python docs/examples.py writes it"
    found = {
        path.stem
        for path in EXAMPLES.PAGE.parent.iterdir()
        if path.suffix == ".py" or path.is_dir()
    } - {"__pycache__"}
    assert found == {*EXAMPLES.ORDER, "own_kernel_package"}


@pytest.mark.sweep(9)
@pytest.mark.slow
@pytest.mark.parametrize(
    "example", [name for name in EXAMPLES.ORDER if name != "aoti_export"]
)  # tests/lowering/test_modes.py runs it
def test_example_prints_what_the_gallery_shows(example):
    path = ROOT / "examples" / f"{example}.py"
    skip_unless_installed(path.read_text())
    printed = script(path, *EXAMPLES.arguments(example))
    assert EXAMPLES.comparable(printed) == EXAMPLES.comparable(SHOWN[example])


# tests/test_plugins.py loads kernels by the same entry points, and test_select.py one in files of
# its own
@pytest.mark.full
@pytest.mark.slow
def test_a_kernel_in_a_package_is_found_and_keeps_its_contract(tmp_path):
    source, site = tmp_path / "source", tmp_path / "site"
    shutil.copytree(
        ROOT / "examples" / "own_kernel_package", source
    )  # pip builds beside the sources
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--target",
        site,
        source,
    ]
    subprocess.run(pip, check=True, timeout=120)
    env = {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT), os.environ.get("PYTHONPATH", "")])}
    test = str(source / "test_attnops_plain.py")
    printed = ready_process(
        f"import pytest; raise SystemExit(pytest.main(['-q', '-p', 'no:cacheprovider', {test!r}]))",
        env=env,
    )
    assert " passed" in printed


@pytest.mark.sweep(6)
@pytest.mark.slow
@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda p: p.stem)
def test_tutorial_runs(tutorial):
    """Each asserts what it promises."""
    skip_unless_installed(tutorial.read_text())
    assert script(tutorial)


def test_ops_that_nothing_imports_are_said_to_have_no_caller():
    _, _, after = (
        (ROOT / "docs" / "ops.md").read_text().partition("Nothing in attnops calls these ops yet")
    )
    said = {*re.findall(r"`(\w+)`", after.partition("\n\n")[0])}
    rooms = tuple(
        f"attnops.{room}." for room in ("nn", "cache", "hf", "adapters", "lowering", "graphs")
    )
    code = "\n".join(
        path.read_text() for module, path in sources().items() if module.startswith(rooms)
    )
    assert said and not [op for op in said if re.search(rf"import.*\b{op}\b", code)]
