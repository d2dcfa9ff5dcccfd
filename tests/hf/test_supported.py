"""Versions of transformers: what is too old is named at import, before anything of it is
imported."""

import re
import sys
import warnings
from pathlib import Path

import pytest
import torch

import attnops
from attnops import tried
from attnops.core.errors import UnsupportedVersion, UntriedVersion
from attnops.core.needs import parse
from attnops.core.private_torch import Version
from attnops.hf import supported, tiny
from tests.helpers import ROOT, torch_process


def pretend(monkeypatch, version):
    monkeypatch.setattr(
        tried, "version", lambda name: version if name == "transformers" else tried.OLDEST[name]
    )


@pytest.mark.parametrize("version", ["4.57.1", "5.0.0", "5.3.2", "5.14.1", "5.14.0rc1"])
def test_older_than_the_oldest(version, monkeypatch):
    pretend(monkeypatch, version)
    with pytest.raises(
        UnsupportedVersion, match=re.escape(f"transformers: got version {version}, want >=5.15")
    ) as caught:
        supported.check()
    assert isinstance(caught.value, ImportError)
    assert (caught.value.package, caught.value.got, caught.value.want) == (
        "transformers",
        version,
        ">=5.15",
    )


@pytest.mark.parametrize("version", ["5.15.0", "5.17.0", "5.23.0.dev0", "6.0", "of a fork"])
def test_new_enough(version, monkeypatch):
    pretend(monkeypatch, version)
    supported.check()


def test_the_import_says_so_and_imports_nothing_of_it(tmp_path):
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "transformers-5.3.0.dist-info").mkdir()
    (tmp_path / "transformers-5.3.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: transformers\nVersion: 5.3.0\n"
    )
    code = f"import sys; sys.path.insert(0, r'{tmp_path}'); import attnops; attnops.hf"
    told = (
        r"ended with 1\n(.|\n)*UnsupportedVersion: transformers: got version 5\.3\.0, want >=5\.15"
    )
    with pytest.raises(AssertionError, match=told):
        torch_process(code)


@pytest.mark.parametrize("package", tried.NEWEST)
@pytest.mark.parametrize(("later", "newer"), [(0, False), (1, True), (1.0, True), (-1, False)])
def test_newer_than_the_newest_that_was_tried(package, later, newer, monkeypatch):
    """It warns once, at patch(). Patch releases of the newest are no newer; pre-releases (a float
    here) of the next one are."""
    major, minor = tried.NEWEST[package].split(".")
    given = (
        f"{major}.{int(minor) + int(later)}.{'0.dev20261126' if isinstance(later, float) else 3}"
    )
    monkeypatch.setattr(
        tried, "version", lambda name: given if name == package else tried.NEWEST[name] + ".0"
    )
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            attnops.patch(tiny.model("llama")).unpatch()
        # A model of another library rests on torch alone.
        attnops.core.errors._WARNED.clear()
        attnops.patch(torch.nn.TransformerEncoderLayer(8, 2).eval()).unpatch()
    told = [w for w in found if w.category is UntriedVersion]
    assert len(told) == (0 if not newer else 2 if package == "torch" else 1)
    for each in told:
        assert f"got {package} {given}" in str(each.message) and tried.NEWEST[package] in str(
            each.message
        )
        assert each.filename == __file__


def bounds(text, package):
    """The versions that a file of the project names for a package."""
    return [Version(found) for found in re.findall(rf"(?<![\w-]){package}[=>]=([\d.]+\d)", text)]


def test_all_say_the_same_of_versions():
    """pyproject.toml, constraints.txt, the workflows and the documents."""
    assert tried.OLDEST.keys() == tried.NEWEST.keys()
    pyproject, constraints = (
        (ROOT / name).read_text() for name in ("pyproject.toml", "constraints.txt")
    )
    flows = [path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")]
    release, models = (
        (ROOT / "docs" / name).read_text() for name in ("release.md", "huggingface.md")
    )
    for package, newest in tried.NEWEST.items():
        oldest = tried.OLDEST[package]
        assert bounds(pyproject, package) == [Version(oldest)]
        assert len(bounds(constraints, package)) == 1 and any(
            bounds(flow, package) for flow in flows
        )
        for bound in (bound for text in (constraints, *flows) for bound in bounds(text, package)):
            assert Version(oldest).release <= bound.release[:2] <= Version(newest).release
        [row] = re.findall(rf"^\| {package} \| (.+)$", release, re.MULTILINE)
        assert row.startswith(oldest) and f"{newest} was tried last" in row
    assert f" and {tried.NEWEST['transformers']}.0." in models


@pytest.mark.parametrize("package", tried.NEWEST)
def test_the_newest_release_is_the_newest_that_was_tried(package):
    """Else raise it in attnops/tried.py, once all tests pass, and in the documents that the test
    above reads."""
    if Path(sys.prefix).name != ".venv-newest":
        pytest.skip(
            "this is not the environment of `make test-newest`, which has the newest releases"
        )
    assert (
        parse(installed := tried.installed(package)).release[:2]
        == Version(tried.NEWEST[package]).release
    ), installed
