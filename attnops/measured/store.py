"""The user's settings and files: the two environment variables, which no other file reads, the
table in force, and the places of tables.

The user's own table, `<cache folder>/tables/<gpu>.json`, comes before the one shipped for the same
GPU. The one shipped for the nearest sibling of its architecture, whose times are scaled, serves
kernels and shapes that have no time there, or all of them. A named target ("sm90" on a laptop) has
no GPU: it gets a shipped table of its arch as it is. A file that cannot be read, or that was made
on another GPU, is ignored; `doctor` says so.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from attnops.core.errors import BadTable, InvalidInput
from attnops.core.foreign import is_foreign
from attnops.core.kernel import kernels_of, renew
from attnops.core.problem import Target, pretended
from attnops.measured.table import Table, from_json, nearness, scaled

SHIPPED = Path(__file__).resolve().parent.parent / "tables"
HARDWARE = Path(__file__).resolve().parent / "hardware.json"
"""The GPUs on which kernels have run their tests, from the committed results. Other kernels were
tested against a stand-in alone."""
LARGEST_BYTES = 10_000_000
READ = os.O_RDONLY | (os.O_NONBLOCK | os.O_CLOEXEC if os.name == "posix" else 0)


@dataclass(frozen=True)
class InForce:
    """The table for a target, and its file; None without a table. ignored: files at a table's place
    that are not used, and why."""

    table: Table | None = None
    path: Path | None = None
    ignored: tuple[tuple[Path, str], ...] = ()

    @property
    def shipped(self) -> bool:
        """Did it come with attnops?"""
        return self.path is not None and self.path.parent == SHIPPED


@functools.cache
def in_force(target: Target) -> InForce:
    """The table for `target`. Read once a process, whatever packages targets assume; `forget` has
    it read again."""
    gpu = cpu_name() if target.device == "cpu" and target.assume is None else target.gpu
    return _in_force(target.device, gpu, str(target))


def _paths(device: str, gpu: str) -> list[Path]:
    own = [path_for(gpu)] if gpu else []
    # The tables that ship are of GPUs.
    return [*own, *sorted(SHIPPED.glob("*.json"))] if device == "cuda" else own


@functools.cache
def _in_force(device: str, gpu: str, target: str) -> InForce:
    ignored: list[tuple[Path, str]] = []
    own: list[tuple[Table, Path]] = []
    siblings: list[tuple[Table, Path]] = []
    for path in _paths(device, gpu):
        try:
            table = from_json(read_text(path))
        except FileNotFoundError:
            continue
        except (BadTable, OSError, UnicodeError) as error:
            ignored.append((path, str(error)))
            continue
        if table.gpu == gpu:
            own.append((table, path))
        elif path.parent != SHIPPED:
            ignored.append((path, str(BadTable("gpu", repr(table.gpu), repr(gpu)))))
        elif table.target == target:
            siblings.append((table, path))
    found: list[tuple[Table, Path]] = own[:1]
    if siblings:
        table, path = min(siblings, key=lambda one: nearness(gpu, one[0].gpu))
        found.append((scaled(table, gpu) if gpu else table, path))
    if not found:
        return InForce(ignored=tuple(ignored))
    (table, path), *others = found
    return InForce(table.beside(others[0][0]) if others else table, path, tuple(ignored))


def read_text(path: Path) -> str:
    """The text of a regular file of at most LARGEST_BYTES. Raises BadTable, OSError or
    UnicodeDecodeError."""
    # O_NONBLOCK, since opening a pipe waits for its writer. A file may grow after a look at its
    # size, so the read has a limit.
    with open(os.open(path, READ), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise BadTable("file", "no regular file", "a regular file")
        text = file.read(LARGEST_BYTES + 1)
    if len(text) > LARGEST_BYTES:
        raise BadTable("file", f"more than {LARGEST_BYTES} bytes", f"<= {LARGEST_BYTES}")
    return text.decode("utf-8")


def forget() -> None:
    """Read tables, and where kernels ran, again at the next selection, and forget selections by the
    old ones."""
    ran_on.cache_clear()
    in_force.cache_clear()
    _in_force.cache_clear()
    renew()


def digests() -> tuple[str, ...]:
    """The digests of every table that a choice on this machine may depend on, and where kernels
    ran, for cache keys."""
    devices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    targets = [Target(), pretended(), *(Target.of(torch.device("cuda", i)) for i in devices)]
    tables = (in_force(t).table for t in targets if t is not None)
    return json.dumps(ran_on()), *(table.digest if table else "none" for table in tables)


@functools.cache
def ran_on() -> dict[str, list[str]]:
    """By `op.kernel` the targets, such as sm90, on which its numerics were compared with the
    reference."""
    return dict(json.loads(HARDWARE.read_text("utf-8")))


NOWHERE = "never run on hardware"


def never_run(op: str, kernel: str, target: Target) -> str:
    """NOWHERE, or `never run on sm100`; "" on a CPU, where it has run, and for kernels of other
    packages."""
    found = ran_on().get(f"{op}.{kernel}", ())
    if not target.on_gpu or str(target) in found:
        return ""
    if found:
        return f"never run on {target}"
    known = kernels_of(op).get(kernel)
    return "" if known is None or is_foreign(known) else NOWHERE


def cpu_name() -> str:
    """The name of this machine's CPU in tables."""
    return f"cpu {platform.machine()}"


def path_for(gpu: str) -> Path:
    """The path of the user's table of a device: `tables/nvidia_h200.json` in the cache folder."""
    return cache_dir() / "tables" / (re.sub(r"[^a-z0-9]+", "_", gpu.lower()).strip("_") + ".json")


def check_place(path: Path) -> None:
    """Raise InvalidInput where `path` names a device, a pipe or a folder: a new file would take its
    place."""
    if path.exists() and not path.is_file():
        raise InvalidInput("file", path, "a regular file, or the name of a new one")


def save(table: Table, path: Path) -> None:
    """Write `table` to `path` as `write_text` does, and let selection read it."""
    write_text(path, table.to_json())
    forget()


def write_text(path: Path, text: str) -> None:
    """Write the whole file or leave it as it was. Makes its parent folders. Raises OSError or
    InvalidInput."""
    check_place(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


# Environment variables ----------------------------------------------------------------------------


def default_policy_key() -> str:
    """`ATTNOPS_POLICY`: the policy in force outside every `attnops.use(...)`, as `Policy.key`
    writes it."""
    return os.environ.get("ATTNOPS_POLICY", "")


def cache_dir() -> Path:
    """`ATTNOPS_CACHE_DIR`: where tuning tables are kept. Default `~/.cache/attnops`. The folder is
    not created here."""
    return Path(os.environ.get("ATTNOPS_CACHE_DIR") or Path.home() / ".cache" / "attnops")


def foreign_variable(name: str) -> str | None:
    """A variable by which another package says where it keeps its files, for which GPUs, or how
    many processes share a machine."""
    return os.environ.get(name)
