"""Versions of transformers: what is too old is named at import, before anything of it is imported; pages want a newer one."""

import re
import subprocess
import sys

import pytest

import attnops
from attnops import tried
from attnops.errors import PatchError, UnsupportedVersion
from attnops.hf import supported, tiny
from tests.helpers import ROOT


def pretend(monkeypatch, version):
    monkeypatch.setattr(tried, "version", lambda name: version)


@pytest.mark.parametrize("version", ["4.57.1", "5.0.0", "5.3.2", "5.3.0rc1"])
def test_older_than_the_oldest(version, monkeypatch):
    pretend(monkeypatch, version)
    with pytest.raises(UnsupportedVersion, match=re.escape(f"transformers: got version {version}, want >=5.4")) as caught:
        supported.check()
    assert isinstance(caught.value, ImportError)
    assert (caught.value.package, caught.value.got, caught.value.want) == ("transformers", version, ">=5.4")


@pytest.mark.parametrize("version", ["5.4.0", "5.10.1", "5.17.0", "5.23.0.dev0", "6.0", "of a fork"])
def test_new_enough(version, monkeypatch):
    pretend(monkeypatch, version)
    supported.check()


def test_pages_want_a_newer_one(monkeypatch):
    model = tiny.model("llama")
    pretend(monkeypatch, "5.14.1")
    with pytest.raises(PatchError, match=r'cache="paged" got transformers 5\.14\.1, want >=5\.15'):
        attnops.patch(model, cache="paged")
    attnops.patch(model).unpatch()
    pretend(monkeypatch, "5.15.0")
    attnops.patch(model, cache="paged").unpatch()


def test_the_import_says_so_and_imports_nothing_of_it(tmp_path):
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "transformers-5.3.0.dist-info").mkdir()
    (tmp_path / "transformers-5.3.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 5.3.0\n")
    code = f"import sys; sys.path.insert(0, r'{tmp_path}'); import attnops; attnops.hf"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "UnsupportedVersion: transformers: got version 5.3.0, want >=5.4" in done.stderr, done.stderr


def test_the_extra_says_the_same():
    assert f'hf = ["transformers>={supported.OLDEST}"]' in (ROOT / "pyproject.toml").read_text()
