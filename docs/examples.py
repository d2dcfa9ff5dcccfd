"""Writes examples/README.md: every example with its first sentence, its first command, and what
that prints.

    python docs/examples.py            run all of them, a minute of one core, and write the page
    python docs/examples.py vit lora   run these

The tests run each example once and compare what it prints with the page, but for numbers.
"""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "examples" / "README.md"
ORDER = (
    "generate",
    "chat",
    "speculate",
    "serve",
    "train_packed",
    "lora",
    "embeddings",
    "vit",
    "diffusion",
    "deepseek_decode",
    "aoti_export",
)

HEAD = """# Examples

Each is one short script. It runs on a CPU with a tiny model of random weights, and on a GPU where there is one; most take a model of
yours with `--model`. The [tutorials](../docs/tutorials) explain step by step, these are to copy.
"""  # noqa: E501
PACKAGE = """## own_kernel_package

[A package](own_kernel_package) with a kernel, an entry point and a test. Installed, its kernel is there in every process that imports
attnops:

```text
$ pip install ./examples/own_kernel_package
$ python -c "import attnops.core.kernel as k; print(k.kernels_of('attention')['plain'].about)"
two einsums
```
"""  # noqa: E501


def docstring(name: str) -> str:
    return ast.get_docstring(ast.parse((ROOT / "examples" / f"{name}.py").read_text())) or ""


def summary(name: str) -> str:
    """The first paragraph of an example's docstring, on one line."""
    first = docstring(name).split("\n\n")[0]
    return " ".join(first.split())


def command(name: str) -> str:
    """The first command in the docstring of an example."""
    [line, *_] = re.findall(r"^python examples/.*", docstring(name), re.M)
    return line.split("   ")[0]


def arguments(name: str) -> list[str]:
    return shlex.split(command(name))[2:]


def run(name: str) -> str:
    call = [sys.executable, f"examples/{name}.py", *arguments(name)]
    return subprocess.run(
        call, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    ).stdout.rstrip()


def page(printed: dict[str, str]) -> str:
    """The page, given what each example prints."""
    rows = [f"| [{name}.py]({name}.py) | {summary(name)} |" for name in ORDER]
    rows.append(
        "| [own_kernel_package](own_kernel_package) | A kernel in a package that pip installs, "
        "with its test. |"
    )
    parts = [
        f"## {name}.py\n\n```text\n$ {command(name)}\n{printed[name]}\n```\n" for name in ORDER
    ]
    return "\n".join(
        [
            HEAD,
            "\n".join(["| example | what it shows |", "| --- | --- |", *rows]) + "\n",
            *parts,
            PACKAGE,
        ]
    )


def shown(text: str) -> dict[str, str]:
    """What each example prints according to the text of the page."""
    return dict(re.findall(r"## (\w+)\.py\n\n```text\n\$ [^\n]*\n(.*?)\n```", text, re.S))


def comparable(printed: str) -> list[str]:
    """Lines without numbers but for counts (8 of 8). Answers of random weights, with pictures of
    control characters, are left out."""
    lines = [
        line for line in printed.strip().splitlines() if not re.search("[\u2400-\u247f]", line)
    ]
    return [
        re.sub(r"(\d+ of \d+)|\d[\d.e+-]*", lambda number: number[1] or "#", line) for line in lines
    ]


if __name__ == "__main__":
    PAGE.write_text(
        page(shown(PAGE.read_text()) | {name: run(name) for name in sys.argv[1:] or ORDER})
    )
