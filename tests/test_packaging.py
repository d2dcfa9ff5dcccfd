"""The wheel holds the linked folders, though they lie outside the package's own."""

import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.helpers import ROOT, sources

pytest.importorskip("build", reason="the package `build` (extra dev) makes the wheel")


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory):
    # A copy, because a build writes build/ and *.egg-info beside the sources, where other tests read.
    tree, out = tmp_path_factory.mktemp("tree") / "attnops", tmp_path_factory.mktemp("dist")
    tree.mkdir()
    for folder in ["attnops", "lowering", "graphs"]:
        shutil.copytree(ROOT / folder, tree / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for path in [ROOT / "pyproject.toml", ROOT / "LICENSE", *ROOT.glob("README.md")]:
        shutil.copy(path, tree)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    [wheel] = out.glob("attnops-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def packaged(module, filename):
    """The name a module's file has in a wheel; `attnops.lowering` lies in a folder of another name in the tree."""
    return module.replace(".", "/") + ("/__init__.py" if filename == "__init__.py" else ".py")


@pytest.mark.slow
def test_every_module_is_inside(wheel_names):
    wanted = {packaged(module, path.name) for module, path in sources().items()}
    assert wanted <= wheel_names, sorted(wanted - wheel_names)


@pytest.mark.slow
def test_the_marker_of_types_is_inside(wheel_names):
    assert "attnops/py.typed" in wheel_names


@pytest.mark.slow
def test_nothing_stands_outside_the_package(wheel_names):
    tops = {name.partition("/")[0] for name in wheel_names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"attnops"}
