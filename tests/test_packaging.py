"""The sdist holds the repository and the wheel the package, both under the tag's version, and the
index page's links lead somewhere."""

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.parser import Parser
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.helpers import ROOT, sources
from tests.test_docs import FENCE

for module in ["build", "setuptools_scm", "twine"]:
    pytest.importorskip(
        module, reason=f"the extra dev brings {module}, which makes or checks the distributions"
    )

ENV = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("GIT_", "SETUPTOOLS_SCM_"))
}
ENV |= {
    "PYTHONWARNINGS": "ignore",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_SYSTEM": os.devnull,
}
GIT = (
    "git",
    "-c",
    "user.name=test",
    "-c",
    "user.email=test@localhost",
    "-c",
    "commit.gpgsign=false",
)
STATES = {
    "no git": [],
    "no tag": [("init", "-q"), ("add", "-A"), ("commit", "-q", "-m", "all")],
    "tag": [("tag", "v0.2.0")],
}
"""Of a folder of sources, one after the other."""


def run(*command, cwd):
    done = subprocess.run(command, cwd=cwd, env=ENV, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    return done.stdout.strip()


class Made(NamedTuple):
    tree: Path
    files: set[str]
    versions: dict[str, str]
    names: list[Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A repository of its own with today's files, what it calls itself, and its distributions under
    the tag v0.2.0."""
    if not (ROOT / ".git").exists():
        pytest.skip("the sources are not a git checkout, which lists the files")
    tree, dist = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    listed = run(
        "git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT
    ).splitlines()
    files = {name for name in listed if os.path.lexists(ROOT / name)}
    for name in files:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name, follow_symlinks=False)
    versions = {}
    for state, commands in STATES.items():
        for command in commands:
            run(*GIT, *command, cwd=tree)
        versions[state] = run(sys.executable, "-m", "setuptools_scm", cwd=tree)
    # The wheel is made from the sdist, where neither git nor a link is.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), cwd=tree)
    return Made(tree, files, versions, sorted(dist.iterdir()))


def packaged(module, filename):
    """The name a module's file has in a wheel; `attnops.lowering` lies in a folder of another name
    in the tree."""
    return module.replace(".", "/") + ("/__init__.py" if filename == "__init__.py" else ".py")


@pytest.mark.slow
def test_versions_come_from_tags(made):
    assert made.versions.pop("tag") == "0.2.0" and made.versions.pop("no git") == "0.0"
    assert re.fullmatch(r"0\.1\.dev1\+g[0-9a-f]{7,}", made.versions["no tag"])
    assert [path.name for path in made.names] == [
        "attnops-0.2.0-py3-none-any.whl",
        "attnops-0.2.0.tar.gz",
    ]


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_no_more(made):
    with zipfile.ZipFile(made.names[0]) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    data = {
        name
        for name in made.files
        if name.startswith("attnops/") and name.endswith((".json", "py.typed"))
    }
    assert {"attnops/py.typed", "attnops/tables/h200.json"} < data
    assert names == data | {packaged(module, path.name) for module, path in sources().items()}


@pytest.mark.slow
def test_the_sdist_holds_the_repository(made):
    with tarfile.open(made.names[1]) as archive:
        names = {
            member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()
        }
    links = {name for name in made.files if (ROOT / name).is_symlink()}
    assert links == {"attnops/graphs", "attnops/lowering"}
    followed = {
        f"attnops/{name}" for name in made.files if name.startswith(("graphs/", "lowering/"))
    }
    assert made.files - links | followed <= names, sorted(made.files - links - names)


@pytest.mark.slow
def test_the_index_page(made):
    """Its links are absolute and lead into the repository; code is as in README; twine finds no
    fault."""
    run(sys.executable, "-m", "twine", "check", "--strict", *map(str, made.names), cwd=made.tree)
    with zipfile.ZipFile(made.names[0]) as archive:
        metadata = Parser().parsestr(archive.read("attnops-0.2.0.dist-info/METADATA").decode())
    page = metadata.get_payload()
    home = dict(line.split(", ") for line in metadata.get_all("Project-URL"))["Homepage"]
    targets = re.findall(r"""(?:\]\(|src(?:set)?="|href=")([^)"\s]+)""", FENCE.sub("", page))
    assert len(targets) > 5 and all(
        target.startswith(("https://", "http://", "#")) for target in targets
    ), targets
    ours = [
        re.fullmatch(r"(?:blob|raw)/HEAD/([^#?]+).*", t.removeprefix(f"{home}/"))
        for t in targets
        if t.startswith(f"{home}/")
    ]
    assert not [match[1] for match in ours if match and not (ROOT / match[1]).exists()]
    assert FENCE.findall(page) == FENCE.findall((ROOT / "README.md").read_text())


# Types --------------------------------------------------------------------------------------------

TRANSFORMERS = """
from typing import Any
from torch import nn
class PreTrainedModel(nn.Module): ...
AutoModelForCausalLM: Any
LlamaConfig: Any
"""
"""What a checker reads in place of transformers, which takes pyright half a minute."""
HANDLES = """
from typing import Any
import attnops
from torch import Tensor, nn

def use(module: nn.Module, unknown: Any, tokens: Tensor) -> None:
    for handle in (attnops.patch(module), attnops.patch(unknown)):
        print(handle.took, handle.graphs, handle.plain_steps)
        cache = handle.new_cache(1, 8)
        print(handle.capture(cache), handle.step(tokens, cache))
        handle.release()
        print(handle.no_such_name)
"""


EDITABLE = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"
"""What `pip install -e .` asks for: a wheel that leads to the checkout."""


def environment(folder, wheel):
    """The Python of a new environment with attnops, for type checkers: it has torch's files."""
    venv.create(folder)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    for name in ("torch", "typing_extensions"):
        there = Path(inspect.getfile(import_module(name)))
        there = there.parent if there.name == "__init__.py" else there
        (site / there.name).symlink_to(there)
    (site / "transformers").mkdir()
    (site / "transformers" / "__init__.pyi").write_text(TRANSFORMERS)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return str(folder / "bin" / "python")


@pytest.mark.slow
@pytest.mark.parametrize("install", ["editable", "wheel"])
def test_type_checkers_find_the_package_and_the_names_of_handles(install, made, tmp_path):
    pytest.importorskip("pyright", reason="the extra dev brings pyright")
    wheel = made.names[0]
    if install == "editable":
        run(sys.executable, "-c", EDITABLE, str(tmp_path), cwd=made.tree)
        [wheel] = tmp_path.glob("*.whl")
    python = environment(tmp_path / "env", wheel)
    files = tmp_path / "files"
    files.mkdir()
    shutil.copy(ROOT / "docs" / "tutorials" / "quickstart.py", files)
    (files / "handles.py").write_text(HANDLES)
    checker = (sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", python)
    # Python's own path would lead to the sources of these tests.
    env = {name: value for name, value in ENV.items() if name != "PYTHONPATH"}
    done = subprocess.run(checker, cwd=files, env=env, capture_output=True, text=True, timeout=240)
    found = [each["message"] for each in json.loads(done.stdout)["generalDiagnostics"]]
    assert len(found) == 1 and "no_such_name" in found[0], found


def test_sources_that_are_not_installed_have_a_version():
    code = "import runpy, sys; print(runpy.run_path(sys.argv[1])['VERSION'])"
    assert (
        run(sys.executable, "-I", "-S", "-c", code, str(ROOT / "attnops" / "version.py"), cwd=ROOT)
        == "0+unknown"
    )


def test_the_address_is_one():
    [home] = re.findall(
        r'^URL = "https://github\.com/([^"]+)"', (ROOT / "setup.py").read_text(), re.MULTILINE
    )
    pages = [
        *ROOT.glob("*.md"),
        *ROOT.glob("*.cff"),
        *ROOT.glob("docs/*.*"),
        *(ROOT / ".github").rglob("*.*"),
    ]
    texts = {
        page: page.read_text() for page in pages if page.suffix in (".md", ".cff", ".py", ".yml")
    }
    others = {
        page.name: set(re.findall(r"github\.com/([\w-]+/attnops)\b", text)) - {home}
        for page, text in texts.items()
    }
    assert not {name: found for name, found in others.items() if found}
