"""The truth about foreign schemas: what the wheels' libraries hold, that the stand-ins have it, and
which versions have which op."""

import re

import pytest
import torch

from attnops.core.kernel import all_kernels, kernels_of
from attnops.core.problem import Target
from attnops.kernels.flashinfer import libraries, modules
from attnops.kernels.sgl import sources, wheel
from tests.helpers import ROOT
from tests.standins.schemas import BY_NAME

VERSIONS = (
    "0.3.18",
    "0.3.19",
    "0.3.20",
    "0.3.21",
    "0.4.0",
    "0.4.1",
    "0.4.1.post1",
    "0.4.2",
    "0.4.2.post1",
    "0.4.2.post2",
    "0.4.3",
    "0.4.4",
    "0.4.5",
    "0.4.6",
    "0.4.6.post1",
    "0.4.7",
    "0.4.8",
    "0.4.9",
    "0.4.10",
)
KERNELS = ROOT / "attnops" / "kernels"
CALLED = re.compile(r"torch\.ops\.sgl_kernel\.(\w+)|\b(?:load|wheel\.op|sources\.op)\(\s*\"(\w+)\"")
HELPERS = re.compile(r"from attnops\.kernels\.(\w+)(?:\.(\w+))? import ([\w, ]+)")


def called_in(module: str) -> set[str]:
    """The foreign ops that a module of attnops.kernels, `backend.file`, calls, its helpers'
    included."""
    path = KERNELS / f"{module.replace('.', '/')}.py"
    if not path.is_file():
        return set()  # of our own device functions
    source = path.read_text()
    own = {a or b for a, b in CALLED.findall(source)}
    helpers = {
        f"{folder}.{n}"
        for folder, file, names in HELPERS.findall(source)
        for n in ([file] if file else re.findall(r"\w+", names))
    }
    return own.union(*(called_in(helper) for helper in helpers - {module}))


def present(name: str, version: str) -> bool:
    op, at = BY_NAME[name], VERSIONS.index
    return at(version) >= at(op.since) and (not op.dropped or at(version) < at(op.dropped))


WRAPPED = [k for k in all_kernels() if any(p.module == "sgl_kernel" for p in k.packages)]


def test_what_the_schemas_lie_about():
    def written(name: str) -> set[str]:
        arguments = torch._C.parse_schema(f"sgl_kernel::{BY_NAME[name].schema}").arguments
        return {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}

    # The query is only read; key and value are written where new ones come along; the metadata's
    # semaphore is.
    assert written("varlen_fwd_sparse") == written("fwd_sparse") == {"q", "out"}
    assert written("fwd") == {"out"}
    names = [
        a.name
        for a in torch._C.parse_schema(
            f"sgl_kernel::{BY_NAME['convert_vertical_slash_indexes'].schema}"
        ).arguments
    ]
    assert names.count("q_seqlens") == 2


@pytest.mark.parametrize(
    "module", sorted(f"{f.parent.name}.{f.stem}" for f in KERNELS.glob("*/*.py"))
)
def test_every_foreign_op_that_is_called_is_pinned(module):
    assert called_in(module) <= set(BY_NAME), (
        f"not in tests/standins/schemas.py: {called_in(module) - set(BY_NAME)}"
    )


@pytest.mark.parametrize("kernel", WRAPPED, ids=lambda k: f"{k.op}-{k.name}")
def test_a_kernel_asks_for_versions_that_have_its_ops(kernel):
    names = called_in(kernel.run.__module__.removeprefix("attnops.kernels."))
    [package] = [p for p in kernel.packages if p.module == "sgl_kernel"]
    assert names and package.dists == ("sglang-kernel", "sgl-kernel")
    accepted = [v for v in VERSIONS if package.has(v)]
    assert accepted
    assert not [(n, v) for n in names for v in accepted if not present(n, v)]
    if all(BY_NAME[n].dropped for n in names):
        assert accepted == [v for v in VERSIONS if all(present(n, v) for n in names)], (
            "leaves out versions that have it"
        )


def test_both_names_of_the_wheel_are_known(monkeypatch):
    from attnops.core import needs

    for dist in wheel.DISTS:
        monkeypatch.setattr(needs, "_version", {dist: "0.3.21"}.get)
        monkeypatch.setattr(needs, "_installed", lambda module: True)
        assert wheel.package().version() == "0.3.21"
        refusal = wheel.package("0.4.3", holds="dense_decode_fwd").missing(needs.Target())
        assert str(refusal) == "package=sgl_kernel 0.3.21 (wants >= 0.4.3 (holds dense_decode_fwd))"


def test_what_is_absent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = Target("cuda", 90, assume=())
    kernel = kernels_of("mla_attention")["flashmla"]
    either = f"{wheel.hint(torch.__version__, '0.4.3')}, or {sources.hint(torch.__version__)}"
    said = f"package=sgl_kernel missing, flash_mla missing (wants {either})"
    assert [str(r) for r in kernel.absences(nowhere)] == [said]
    fa3 = f"package=sgl_kernel missing (wants {wheel.hint(torch.__version__, '0.4.2')})"
    assert [str(r) for r in kernels_of("mla_attention")["fa3"].absences(nowhere)] == [fa3]
    package = libraries.PACKAGE
    assert (
        package.has("0.7.2.post1")
        and not package.has("0.6.13")
        and package.versions() == ">= 0.7.2"
    )
    monkeypatch.setattr(modules, "find_spec", lambda name: None)
    assert (
        str(modules.missing(Target("cuda", 90)))
        == "package=tvm_ffi missing (wants pip install apache-tvm-ffi)"
    )
    assert modules.missing(Target("cuda", 90, assume=("flashinfer",))) is None


def test_each_gpu_has_its_build():
    assert wheel.common_ops(Target("cuda", 90)) == "sm90/common_ops.*"
    assert {wheel.common_ops(Target("cuda", a)) for a in (80, 89, 100, 120)} == {
        "sm100/common_ops.*"
    }
