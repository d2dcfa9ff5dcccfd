"""`attnops doctor`: what this machine has, and which kernels can run on it."""

from __future__ import annotations

import importlib.metadata
import platform
from importlib.util import find_spec
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from attnops.cli.features import ops_of_kernels, why_not
from attnops.cli.tables import SIMPLE, refusal
from attnops.kernel import broken_kernels, kernels_of
from attnops.problem import Target
from attnops.select import active_policy
from attnops.version import VERSION

LOOKED_FOR = ("triton", "transformers")


def examine() -> dict[str, Any]:
    """The report as plain data. Asks the driver for its devices; imports no kernel package.

    machine: versions and devices, None for what is absent. kernels: op, name, usable, reasons, packages, about.
    broken: third-party modules that could not be loaded, and why. policy: the policy in force, "" for none.
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
    return {"machine": machine(), "target": str(target), "policy": active_policy(), "kernels": kernels, "broken": dict(broken_kernels())}


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
    console.print(facts)
    console.print(f"\n[bold]kernels on {report['target']}[/]")
    table = Table(box=SIMPLE, show_edge=False, pad_edge=False)
    for column in ("op", "kernel", "", "why not, and what is wanted"):
        table.add_column(column, overflow="fold", no_wrap=column in ("op", "kernel"))
    last = ""
    for k in report["kernels"]:
        reasons = "\n".join(f"{r['field']}: {r['got']}; wants {r['want']}" for r in k["reasons"])
        verdict = "[green]usable[/]" if k["usable"] else "[yellow]not here[/]"
        table.add_row(k["op"] if k["op"] != last else "", k["kernel"], verdict, reasons or f"[dim]{k['about']}[/]")
        last = k["op"]
    console.print(table)
    for source, reason in report["broken"].items():
        console.print(f"[red]could not be loaded[/]: {source}: {reason}", highlight=False)


def _devices(devices: list[dict[str, Any]]) -> str:
    return "\n".join(f"{d['name']} ({d['arch']}, {d['memory_bytes'] / 2**30:.0f} GiB)" for d in devices) or "no CUDA device"
