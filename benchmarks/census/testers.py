"""Configs and inputs of transformers' own tests, from a folder with them.

The folder is a checkout of transformers, or holds its `tests` and `utils`: the files
`tests/models/FAMILY/test_modeling_*.py`, whose classes of tests make small configs and inputs, and
what they import. The installed transformers runs; another version of the tests may not fit it.
"""

from __future__ import annotations

import copy
import importlib
import random
import re
import sys
import types
import unittest
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.census.inputs import Inputs, parts

PACKAGE = "transformers_tests"
"""The name under which the folder's `tests` are imported, for a project may have a package
`tests`."""

SOURCE = "transformers' tests"
_COMMON = ("test_modeling_common", "causal_lm_tester", "vlm_tester", "alm_tester")
_SPREAD = ("initializer_range", "init_std")
NO_INPUTS = ("labels", "return_loss", "use_cache", "output_attentions", "output_hidden_states")


@dataclass(frozen=True)
class Made:
    """What a class of tests makes. config: of transformers. inputs: those of its common tests, or
    none.

    classes: of models, those of the tests. prepare: the inputs for one of them.
    """

    config: Any
    classes: tuple[type, ...]
    test: Any
    inputs: Inputs | None

    def inputs_for(self, cls: type) -> Inputs | None:
        """The inputs of a model of this class, without labels."""
        if self.inputs is None:
            return None
        found = self.test._prepare_for_class(self.inputs, cls)
        return {n: x for n, x in found.items() if x is not None and n not in NO_INPUTS}

    def tries(self, model: Any) -> Iterable[Inputs]:
        """The inputs of this model."""
        return [self.inputs_for(type(model)) or {}]


def open_folder(folder: Path) -> str:
    """Make the tests in the folder importable. Returns the version that they are of, or ""."""
    tests = folder.resolve() / "tests"
    if not (tests / "models").is_dir():
        raise FileNotFoundError(
            f"tests: got {folder}, want a folder with tests/models of transformers"
        )
    package = types.ModuleType(PACKAGE)
    package.__path__ = [str(tests)]
    sys.modules[PACKAGE] = package
    # Some files name the package, and not its parts relative to themselves.
    sys.modules.setdefault("tests", package)
    for name in _COMMON:
        if (tests / f"{name}.py").exists():
            importlib.import_module(f"{PACKAGE}.{name}")
    front = folder / "src" / "transformers" / "__init__.py"
    found = re.search(r'^__version__ = "(.+)"', front.read_text(), re.M) if front.exists() else None
    return found.group(1) if found else ""


def family_of(config: Any) -> str:
    """The folder of a config class, within transformers.models."""
    parts = config.__module__.split(".")
    return parts[parts.index("models") + 1] if "models" in parts else ""


def made(family: str) -> Iterator[Made]:
    """What the tests of a family make. Those that raise, or need the network, are left out."""
    for path in _files(family):
        try:
            module = importlib.import_module(f"{PACKAGE}.models.{family}.{path.stem}")
        except ImportError:  # of a package that is not installed
            continue
        for cls in vars(module).values():
            own = isinstance(cls, type) and cls.__module__ == module.__name__
            if own and issubclass(cls, unittest.TestCase) and (found := _made(cls)) is not None:
                yield found


def _files(family: str) -> list[Path]:
    [root] = sys.modules[PACKAGE].__path__
    found = sorted((Path(root) / "models" / family).glob("test_modeling_*.py"))
    return [path for path in found if not re.match("test_modeling_(tf|flax)_", path.name)]


def _made(cls: Any) -> Made | None:
    _seed()
    try:
        test = cls()
        test.setUp()
        tester = test.model_tester
    except BaseException:  # unittest's skips, and what a stranger's set-up needs
        return None
    inputs = None
    try:
        config, inputs = tester.prepare_config_and_inputs_for_common()
    except Exception:
        try:
            config = tester.get_config()
        except Exception:
            return None
    classes = getattr(test, "all_model_classes", None) or ()
    return Made(config, tuple(c for c in classes if isinstance(c, type)), test, inputs)


def _seed() -> None:
    """Let the tests draw the same numbers in each process."""
    random.seed(0)
    torch.manual_seed(0)
    common = sys.modules.get(f"{PACKAGE}.test_modeling_common")
    if isinstance(draws := getattr(common, "global_rng", None), random.Random):
        draws.seed(0)


def spread(config: Any) -> Any:
    """A copy of the config with wide random weights: else outputs would hardly depend on attention.

    Those of deep convolutions before attention multiply: logits beyond a million are hidden keys to
    attnops.
    """
    config = copy.deepcopy(config)
    width = 0.2 if getattr(config, "backbone_config", None) is None else 0.1
    for part in parts(config):
        for name in _SPREAD:
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, width)
    return config
