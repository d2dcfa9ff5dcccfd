"""The site of these pages: `make docs` builds it with Sphinx into build/docs, without network.
Warnings are errors."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.errors import PycodeError
from sphinx.pycode import ModuleAnalyzer
from sphinx.transforms import SphinxTransform
from sphinx_gallery.sorting import ExplicitOrder

import attnops
import attnops.hf  # here: on no tutorial's page is then what packages print at their import

ROOT = Path(__file__).resolve().parent.parent

project = "attnops"
author = "the attnops authors"
project_copyright = author
version = release = attnops.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
]
# The tutorials are scripts: sphinx-gallery runs them and writes their pages into docs/gallery.
exclude_patterns = ["gallery/index.rst"]
nitpicky = True
# Types of arguments and results that users neither make nor look into.
nitpick_ignore = {
    ("py:class", "Kept"),
    ("py:class", "Mode"),
    ("py:class", "Speculate"),
    ("py:class", "os.PathLike"),
    ("py:class", "Shared"),
    ("py:class", "Inner"),
    ("py:class", "fx.GraphModule"),
    ("py:class", "attnops.core.record.Call"),
    ("py:class", "attnops.cache.paged.Pages"),
    ("py:class", "attnops.core.record.Spec"),
    ("py:class", "attnops.graphs.as_it_runs.AsItRuns"),
    ("py:class", "attnops.graphs.options.Ahead"),
    ("py:class", "attnops.graphs.graph_breaks.Break"),
    ("py:class", "attnops.graphs.eager_capture.R"),
    ("py:class", "attnops.measured.cost.Work"),
}
default_role = "py:obj"

myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_default_options = {"members": True}
napoleon_numpy_docstring = False
python_maximum_signature_line_length = 100
toc_object_entries_show_parents = "hide"

# Hand-written inventories of the names that our docstrings use, so that a build needs no network.
intersphinx_mapping = {
    "python": ("https://docs.python.org/3/", "inventories/python.inv"),
    "torch": ("https://docs.pytorch.org/docs/stable/", "inventories/torch.inv"),
    "transformers": (
        "https://huggingface.co/docs/transformers/main/en/",
        "inventories/transformers.inv",
    ),
}

# Other names under which annotations and pages speak of what has an entry.
ALIASES = {
    "attnops.graphs.breakable": "attnops.graphs.Graphed",
    "GraphReport": "attnops.graphs.Report",
    "Tensor": "torch.Tensor",
    "F.scaled_dot_product_attention": "torch.nn.functional.scaled_dot_product_attention",
    "nn.Module": "torch.nn.Module",
    "torch.fx.graph.Graph": "torch.fx.Graph",
    "torch.fx.graph_module.GraphModule": "torch.fx.GraphModule",
    "torch.nn.modules.activation.MultiheadAttention": "torch.nn.MultiheadAttention",
    "torch.nn.modules.linear.Linear": "torch.nn.Linear",
    "torch.nn.modules.module.Module": "torch.nn.Module",
    "torch.nn.modules.sparse.Embedding": "torch.nn.Embedding",
    "transformers.cache_utils.Cache": "transformers.Cache",
}

sphinx_gallery_conf = {
    "examples_dirs": "tutorials",
    "gallery_dirs": "gallery",
    "filename_pattern": r"\.py$",
    # Run in one process: the kernel that the last one registers would be in the tables of the
    # others.
    "within_subsection_order": ExplicitOrder(["*", "own_kernel.py"]),
    "download_all_examples": False,
    "image_scrapers": (),
    "reset_modules": (),
    "show_signature": False,
    "write_computation_times": False,
    "min_reported_time": 1_000_000,
}

html_theme = "pydata_sphinx_theme"
html_title = "attnops"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
# Pages without pages below them have no navigation on the left.
html_sidebars = {
    page: []
    for page in (
        "index",
        "start",
        "examples",
        "migration",
        "faq",
        "contributing",
        "release",
        "changelog",
    )
}
html_theme_options: dict[str, Any] = {
    "header_links_before_dropdown": 7,
    "navigation_with_keys": False,
    "navbar_align": "left",
    "navbar_persistent": ["search-button"],
    "show_toc_level": 2,
    "footer_start": ["copyright"],
    "footer_end": [],
}


def project_url() -> str:
    """The address of the repository, which setup.py holds; empty where it has none."""
    found = re.search(r'^URL = "(.+)"$', (ROOT / "setup.py").read_text(), re.M)
    return found[1] if found else ""


if project_url():
    html_theme_options["icon_links"] = [
        {"name": "Repository", "url": project_url(), "icon": "fa-brands fa-github"}
    ]


# Files of the repository that a page of the site includes.
INCLUDED = {
    "changelog": "CHANGELOG.md",
    "contributing": "CONTRIBUTING.md",
    "examples": "examples/README.md",
}


def place(path: str, url: str) -> str:
    """Where a path of the repository is found on the site: the name of a page, an address, or
    neither (empty).

    Args:
        path: relative to the root of the repository.
        url: of the repository, or empty.
    """
    if page := re.fullmatch(r"docs/(.+)\.md", path):
        return page[1]
    if path == "docs/tutorials":
        return "tutorials/README"
    if tutorial := re.fullmatch(r"docs/tutorials/(\w+)\.py", path):
        return f"gallery/{tutorial[1]}"
    if path in INCLUDED.values():
        return next(page for page, file in INCLUDED.items() if file == path)
    return f"{url}/{'tree' if (ROOT / path).is_dir() else 'blob'}/HEAD/{path}" if url else ""


class Links(SphinxTransform):
    """Links of Markdown pages work on a git host and on the site: a link to a file that is no page
    leads to the repository.

    A name in code, such as `attnops.patch` or `torch.compile`, becomes a link to its entry if it
    has one.
    """

    default_priority = 5

    def apply(self, **kwargs: Any) -> None:
        for node in list(
            self.document.findall(
                lambda n: isinstance(n, addnodes.pending_xref | addnodes.download_reference)
            )
        ):
            if node.get("reftype") == "myst" and not (
                node.get("refdomain") == "doc" and node["reftarget"] in self.env.found_docs
            ):
                self.follow(node)
        for literal in list(self.document.findall(nodes.literal)):
            name = literal.astext().removesuffix("()")
            linked = isinstance(literal.parent, nodes.reference | addnodes.pending_xref)
            if not linked and re.fullmatch(r"(attnops|torch|transformers|F)(\.\w+)+", name):
                link = addnodes.pending_xref(
                    "",
                    refdomain="py",
                    reftype="obj",
                    reftarget=ALIASES.get(name, name),
                    refexplicit=True,
                )
                link["refdoc"] = self.env.docname
                literal.replace_self(link)
                link += literal

    def follow(self, node: nodes.Element) -> None:
        """Turns a link to a file or folder into one to its place. In a page that includes a file,
        links lead on from that file."""
        target, _, anchor = node["reftarget"].partition("#")
        page = self.env.docname
        folder = (
            ROOT / INCLUDED[page] if page in INCLUDED else Path(self.env.doc2path(page))
        ).parent
        # MyST makes the name of a page of a path that ends with `.md`.
        path = (
            Path(self.env.srcdir, target + ".md")
            if node.get("refdomain") == "doc"
            else folder / target
        )
        if not target or not path.exists():
            return
        to = place(os.path.relpath(path, ROOT), project_url())
        if to in self.env.found_docs:
            given = {
                "refdoc": self.env.docname,
                "reftype": "myst",
                "refdomain": "doc",
                "reftargetid": anchor or node.get("reftargetid"),
            }
            link: nodes.Element = addnodes.pending_xref("", refexplicit=True, reftarget=to, **given)
        else:
            link = nodes.reference("", "", refuri=to) if to else nodes.inline()
        link += node.children
        node.replace_self(link)


def public(
    app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, text: nodes.Element
) -> nodes.Element | None:
    """The entry of a class under its public name. Intersphinx looks for those of other projects,
    under the name set here."""
    target = node.get("reftarget")
    alias = node["reftarget"] = ALIASES.get(target, target)
    if alias == target or not alias.startswith("attnops."):
        return None
    python = env.get_domain("py")
    return python.resolve_xref(env, node["refdoc"], app.builder, node["reftype"], alias, node, text)


def plain(
    app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, text: nodes.Element
) -> nodes.Element | None:
    """Code in single backquotes that names no entry of the API is code."""
    return text if node.get("reftype") == "obj" else None


def fields_as_arguments(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Sentences `field: meaning` in the docstring of a dataclass become the list of its
    arguments."""
    if not dataclasses.is_dataclass(obj) or not isinstance(obj, type) or "Args:" in lines:
        return
    known = "|".join(field.name for field in dataclasses.fields(obj))
    section = next(
        (n for n, line in enumerate(lines) if re.fullmatch(r"(Raises|Returns):", line)), len(lines)
    )
    field = rf"(?:^|(?<=[.;?\"\])] ))((?:{known})(?:, (?:{known}))*): "
    text: list[str] = []
    items: list[str] = []
    for paragraph in "\n".join(lines[:section]).split("\n\n"):
        first, *found = re.split(field, " ".join(map(str.strip, paragraph.splitlines())))
        text += [*(paragraph.splitlines() if not found else [first.strip()]), ""]
        items += [
            f"    {name}: {meaning.strip()}"
            for name, meaning in zip(found[::2], found[1::2], strict=True)
        ]
    if items:
        lines[:section] = [*text, "Args:", *items, ""]


def indented_code(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Indented paragraphs of a docstring, above its sections, are code, as they are in Markdown."""
    end = next(
        (n for n, line in enumerate(lines) if re.fullmatch(r"(Args|Returns|Raises):", line)),
        len(lines),
    )
    for n in reversed(range(2, end)):
        if lines[n].startswith("    ") and not lines[n - 1] and not lines[n - 2].startswith("    "):
            lines[n:n] = [".. code-block:: python", ""]


def one_signature(app: Sphinx, what: str, name: str, obj: Any, *rest: Any) -> None:
    """A function with overloads shows the signature that has all arguments, once."""
    if inspect.isfunction(obj):
        analyzer = ModuleAnalyzer.for_module(obj.__module__)
        with suppress(PycodeError):  # as autodoc does
            analyzer.analyze()
            analyzer.overloads.clear()


def setup(app: Sphinx) -> None:
    app.add_transform(Links)
    app.connect("missing-reference", public, priority=400)
    app.connect("missing-reference", plain, priority=900)
    app.connect("autodoc-process-signature", one_signature)
    app.connect("autodoc-process-docstring", fields_as_arguments, priority=400)
    app.connect("autodoc-process-docstring", indented_code, priority=400)
