"""`make lint`: proselint over the pages, without their code, and over docstrings. Prints what it
finds; exit code 1 if it finds any."""

import ast
import inspect
import itertools
import re
import sys
from pathlib import Path

from proselint.checks import __register__
from proselint.config import DEFAULT
from proselint.registry import CheckRegistry
from proselint.tools import LintFile

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("*.md", "docs/**/*.md", "examples/*.md")
# Marks are those of code (straight quotes, x between sizes); multiples of eight are no decade, and
# a token a.m. is a model "am".
OFF = {"dates_times": False, "typography": False}
# Fenced and indented code, tables, HTML, code within a line, the addresses of links, and the ends
# of headings.
CODE = re.compile(
    r"^ *(```|~~~).*?^ *\1[^\n]*$|^(?: "
    r"{4}|\t|\|)[^\n]*$|<!--.*?-->|<[^>\n]+>|`[^`]*`|\]\([^)]*\)|(?<=\w)$(?=\n\n)",
    re.S | re.M,
)


def prose(text):
    """The text with a word of its own for each piece of code, so that no word is said twice. Lines
    keep their numbers."""
    number = itertools.count()
    return CODE.sub(lambda code: re.sub(r"[^\n]+|^$", lambda _: f" C{next(number)}", code[0]), text)


def docstrings(source):
    """The docstrings of a module, each in its own lines, and all else blank."""
    lines = [""] * (source.count("\n") + 2)
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            text = inspect.cleandoc(node.value.value).split("\n")
            lines[node.lineno - 1 : node.lineno - 1 + len(text)] = text
    return "\n".join(lines)


CheckRegistry().register_many(__register__)
texts = {page: page.read_text("utf-8") for pattern in PAGES for page in ROOT.glob(pattern)}
texts |= {
    code: docstrings(code.read_text("utf-8"))
    for room in ("attnops", "lowering", "graphs")
    for code in ROOT.glob(f"{room}/**/*.py")
}
config = {**DEFAULT, "checks": DEFAULT["checks"] | OFF}
found = [
    f"{path.relative_to(ROOT)}:{at}: {r.message}"
    for path, text in texts.items()
    for r, (at, _) in LintFile(str(path), prose(text)).lint(config)
]
print(*found, sep="\n", end="\n" * bool(found))
sys.exit(bool(found))
