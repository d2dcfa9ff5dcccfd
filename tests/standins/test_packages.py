"""The packages of foreign kernels, by what they say where they are absent."""

import pytest
import torch

from attnops.core.kernel import kernels_of
from attnops.core.problem import Target
from attnops.kernels.flashinfer import modules
from attnops.kernels.sgl import sources, wheel


def test_what_is_absent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = Target("cuda", 90, assume=())
    kernel = kernels_of("mla_attention")["flashmla"]
    either = f"{wheel.hint(torch.__version__, '0.4.3')}, or {sources.hint(torch.__version__)}"
    said = f"package=sgl_kernel missing, flash_mla missing (wants {either})"
    assert [str(r) for r in kernel.absences(nowhere)] == [said]
    fa3 = f"package=sgl_kernel missing (wants {wheel.hint(torch.__version__, '0.4.2')})"
    assert [str(r) for r in kernels_of("mla_attention")["fa3"].absences(nowhere)] == [fa3]
    package = modules.PACKAGE
    assert package.has("0.7.2.post1") and not package.has("0.6.13") and package.versions() == ">= 0.7.2"
    monkeypatch.setattr(modules, "find_spec", lambda name: None)
    assert str(modules.missing(Target("cuda", 90))) == "package=tvm_ffi missing (wants pip install apache-tvm-ffi)"
    assert modules.missing(Target("cuda", 90, assume=("flashinfer",))) is None


def test_each_gpu_has_its_build():
    assert wheel.common_ops(Target("cuda", 90)) == "sm90/common_ops.*"
    assert {wheel.common_ops(Target("cuda", a)) for a in (80, 89, 100, 120)} == {"sm100/common_ops.*"}
