"""The circumstances of a choice, for the compile caches: a graph chosen under other circumstances must never be found in them."""

import functools
import hashlib
import os
from pathlib import Path
from typing import Any

import torch

from .. import measured, problem
from ..kernel import CONTRACT, all_kernels
from ..problem import pretended
from ..version import VERSION


def code_files() -> list[Path]:
    """attnops' own sources, lowering and graphs among them; in a checkout these are links, which a plain rglob would not follow."""
    root = Path(problem.__file__).parent
    folders = sorted(folder for folder, _, _ in os.walk(root, followlinks=True))
    return [file for folder in folders for file in sorted(Path(folder).glob("*.py"))]


@functools.cache
def code_digest() -> str:
    """A digest of `code_files()`: another cost function or reference is another circumstance."""
    digest = hashlib.sha256()
    for file in code_files():
        digest.update(file.read_bytes())
    return digest.hexdigest()


def circumstances() -> tuple[str, ...]:
    """Everything outside the graph that a choice depends on: code, kernels with their packages' versions, machine, pretended target,
    tables of measured times.

    Policies are not here: they are arguments of the ops, so the graph itself differs.
    """
    kernels = tuple(f"{k.op}.{k.name}:{k.run.__module__}:{','.join(k.versions())}:{k.absences_key()}" for k in all_kernels())
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return ("attnops", VERSION, str(CONTRACT), code_digest(), device, repr(pretended()), *measured.digests(), *kernels)


def install() -> None:
    """Have Inductor hash `circumstances()` into the keys of the FX-graph and AOTAutograd caches.

    Inductor hashes the uuid of every entry of this dict, whatever its device; one for a device that does not exist never runs and
    leaves every slot a user may want free.
    """
    from torch._inductor.codegen.common import custom_backend_passes, init_backend_registration
    from torch._inductor.custom_graph_pass import CustomGraphModulePass

    class Circumstances(CustomGraphModulePass):
        def __call__(self, gm: torch.fx.GraphModule) -> None:
            raise RuntimeError("the device 'attnops' does not exist")

        def uuid(self) -> Any:
            return circumstances()

    init_backend_registration()
    custom_backend_passes["attnops"] = Circumstances()
