"""`attnops doctor`: the packages and GPUs of this machine, and the kernels that can run on it."""

from __future__ import annotations

import importlib.metadata
import platform
from importlib.util import find_spec
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attnops.cli.features import ops_of_kernels, why_not
from attnops.cli.tables import SIMPLE, refusal
from attnops.kernel import broken_kernels, kernels_of
from attnops.measured import in_force, version_of
from attnops.problem import Target
from attnops.select import active_policy
from attnops.version import VERSION

LOOKED_FOR = ("triton", "transformers")


def examine() -> dict[str, Any]:
    """The report as plain data. Asks the driver for its devices; imports no kernel package.

    machine: versions and devices, None for absent packages. kernels: op, name, usable, reasons, packages, about.
    broken: third-party modules that could not be loaded, and why. policy: the policy in force, "" for none.
    table: the measured times in force, see `measured_times`.
    """
    target = Target.of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    kernels = []
    for op in ops_of_kernels():
        for kernel in kernels_of(op).values():
            reasons = why_not(kernel, target)
            kernels.append(
                {
                    "op": op,
                    "kernel": kernel.name,
                    "usable": not reasons,
                    "reasons": [refusal(r) for r in reasons],
                    "packages": list(kernel.versions()),
                    "about": kernel.about,
                }
            )
    return {
        "machine": machine(),
        "target": str(target),
        "policy": active_policy(),
        "table": measured_times(target),
        "kernels": kernels,
        "broken": dict(broken_kernels()),
    }


def measured_times(target: Target) -> dict[str, Any]:
    """The table in force for `target`. path: None without a table. other_versions: kernels whose version has changed since.

    unmeasured: usable kernels of its ops without times. ignored: unused files, and why.
    """
    found = in_force(target)
    table = found.table
    out: dict[str, Any] = {
        "path": None if found.path is None else str(found.path),
        "shipped": found.shipped,
        "ignored": [{"path": str(path), "reason": reason} for path, reason in found.ignored],
    }
    if table is None:
        return out
    ops = {g.shape.op for g in table.grids}
    usable = [k for op in sorted(ops) for k in kernels_of(op).values() if not k.fused and not why_not(k, target)]
    timed = {f"{k.op}.{k.name}": k for k in usable if f"{k.op}.{k.name}" in table.versions}
    changed = {n: {"timed": table.versions[n], "here": version_of(k)} for n, k in timed.items() if not table.speaks_for(k, target)}
    return out | {
        "gpu": table.gpu,
        "scaled_from": table.source,
        "made": dict(table.made),
        "digest": table.digest[:12],
        "ops": sorted(ops),
        "sizes": sum(len(g.points()) for g in table.grids),
        "other_versions": changed,
        "unmeasured": [f"{k.op}.{k.name}" for k in usable if f"{k.op}.{k.name}" not in timed],
    }


def machine() -> dict[str, Any]:
    """Versions, and every CUDA device with its name, `smNN` and memory in bytes."""
    devices = []
    for index in range(torch.cuda.device_count()):
        seen = torch.cuda.get_device_properties(index)
        devices.append({"name": seen.name, "arch": f"sm{seen.major * 10 + seen.minor}", "memory_bytes": seen.total_memory})
    return {
        "attnops": VERSION,
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "devices": devices,
        **{name: _version(name) for name in LOOKED_FOR},
    }


def _version(package: str) -> str | None:
    """Its version when it can be imported, "unknown" without metadata, None when it is absent."""
    if find_spec(package) is None:
        return None
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def show(report: dict[str, Any], console: Console) -> None:
    """Print the report of `examine` as tables."""
    facts = Table(box=SIMPLE, show_edge=False, pad_edge=False, show_header=False)
    for name, value in report["machine"].items():
        facts.add_row(name, _devices(value) if name == "devices" else str(value or "absent"))
    facts.add_row("policy", report["policy"] or "default")
    facts.add_row("measured times", _times(report["table"]))
    console.print(facts)
    for ignored in report["table"]["ignored"]:
        console.print(f"[yellow]ignored[/]: {escape(ignored['path'])}: {escape(ignored['reason'])}", soft_wrap=True)
    console.print(f"\n[bold]kernels on {report['target']}[/]")
    table = Table(box=SIMPLE, show_edge=False, pad_edge=False)
    for column in ("op", "kernel", "", "reason, and requirement"):
        table.add_column(column, overflow="fold", no_wrap=column in ("op", "kernel"))
    last = ""
    for k in report["kernels"]:
        reasons = escape("\n".join(f"{r['field']}: {r['got']}; wants {r['want']}" for r in k["reasons"]))
        verdict = "[green]usable[/]" if k["usable"] else "[yellow]not here[/]"
        table.add_row(k["op"] if k["op"] != last else "", k["kernel"], verdict, reasons or f"[dim]{escape(k['about'])}[/]")
        last = k["op"]
    console.print(table)
    for source, reason in report["broken"].items():
        console.print(f"[red]could not be loaded[/]: {escape(source)}: {escape(reason)}", highlight=False)


def _times(table: dict[str, Any]) -> str:
    if table["path"] is None:
        return "none: kernels are ranked by estimates; `attnops tune` measures them"
    where = "shipped" if table["shipped"] else table["path"]
    gpu = table["gpu"] + (f", scaled from {table['scaled_from']}" if table["scaled_from"] else "")
    lines = [f"{gpu}, {table['sizes']} sizes of {', '.join(table['ops'])}, {table['made'].get('date', 'no date')} ({where})"]
    lines += [f"{name} was timed as {v['timed']}, here is {v['here']}" for name, v in table["other_versions"].items()]
    lines += [f"without times: {', '.join(table['unmeasured'])}"] * bool(table["unmeasured"])
    return escape("\n".join(lines + ["`attnops tune` measures this machine"] * (len(lines) > 1)))


def _devices(devices: list[dict[str, Any]]) -> str:
    return "\n".join(f"{d['name']} ({d['arch']}, {d['memory_bytes'] / 2**30:.0f} GiB)" for d in devices) or "no CUDA device"
