"""Configs and inputs of transformers' own tests, from a folder with them.

The folder is a checkout of transformers, or holds its `tests` and `utils`: the files
`tests/models/FAMILY/test_modeling_*.py`, whose classes of tests make small configs and inputs, and
what they import. The installed transformers runs; another version of the tests may not fit it.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import random
import re
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

PACKAGE = "transformers_tests"
"""The name under which the folder's `tests` are imported, for a project may have a package `tests`."""

SOURCE = "transformers' tests"
_COMMON = ("test_modeling_common", "causal_lm_tester", "vlm_tester", "alm_tester")
_SPREAD = ("initializer_range", "init_std")
_NO_INPUTS = ("labels", "return_loss", "use_cache", "output_attentions", "output_hidden_states")


@dataclass(frozen=True)
class Made:
    """What a class of tests makes. config: of transformers. inputs: those of its common tests, or none.

    classes: of models, those of the tests. prepare: the inputs for one of them.
    """

    config: Any
    classes: tuple[type, ...]
    test: Any
    inputs: dict[str, Any] | None

    def inputs_for(self, cls: type) -> dict[str, Any] | None:
        """The inputs of a model of this class, without labels."""
        if self.inputs is None:
            return None
        found = self.test._prepare_for_class(self.inputs, cls)
        return {n: x for n, x in found.items() if x is not None and n not in _NO_INPUTS}


@dataclass(frozen=True)
class Part:
    """A config below that of a whole model that tests make.

    classes: none, for the tests have no class of models for it.
    """

    config: Any
    whole: Made
    classes: tuple[type, ...] = ()

    def inputs_for(self, cls: type) -> dict[str, Any] | None:
        """What a whole model hands to its first part of this class."""
        for whole in self.wholes:
            try:
                found = _handed(whole, self.whole, lambda module: type(module) is cls)[1]
            except Exception:  # of the tests' own code, and of models that they skip
                continue
            if found:
                return found
        return None

    @property
    def wholes(self) -> tuple[type, ...]:
        """Classes of whole models to look into."""
        return self.whole.classes[:MOST_WHOLES]

    def within(self, whole: type) -> tuple[str, dict[str, Any]]:
        """The path of the part in a model of class `whole`, and what this hands to it.

        Raises ValueError: there is none.
        """
        stem = type(self.config).__name__.removesuffix("Config")

        def is_it(module: Any) -> bool:
            return type(getattr(module, "config", None)) is type(self.config) or type(module).__name__ == stem

        path, inputs = _handed(whole, self.whole, is_it)
        if not path:
            raise ValueError(f"no module of {whole.__name__} has its config")
        return path, inputs


MOST_WHOLES = 4


def _handed(whole: Any, made: Made, wanted: Callable[[Any], bool]) -> tuple[str, dict[str, Any]]:
    """The path and the inputs of the first module of this kind in a model of class `whole`; "", {}: there is none."""
    model = whole._from_config(spread(made.config), attn_implementation="eager", dtype=torch.float32)
    paths = [path for path, module in model.eval().named_modules() if path and wanted(module)]
    seen: list[dict[str, Any]] = []

    def keep(module: Any, args: Any, kwargs: Any) -> None:
        bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
        named = {n: x for n, x in bound.items() if n not in ("self", "kwargs")}
        named |= bound.get("kwargs", {})
        seen.append({n: _seeing(copy.deepcopy(x)) for n, x in named.items() if _is_input(n, x)})

    for path in paths[:1]:
        model.get_submodule(path).register_forward_pre_hook(keep, with_kwargs=True)
        with torch.no_grad():
            model(**(made.inputs_for(whole) or {}))
    return (paths[0] if paths else ""), (seen[0] if seen else {})


def _is_input(name: str, value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and all(_is_input(name, x) for x in value)
    return name not in _NO_INPUTS and isinstance(value, (torch.Tensor, bool, int, float))


def _seeing(value: Any) -> Any:
    """A float mask whose rows that see no key see all: what such a row gives is not specified, see `attnops.attention`."""
    if not (isinstance(value, torch.Tensor) and value.dim() == 4 and value.is_floating_point()):
        return value
    hidden = (value <= torch.finfo(value.dtype).min).all(-1, keepdim=True)
    return value.masked_fill(hidden, 0.0)


def open_folder(folder: Path) -> str:
    """Make the tests in the folder importable. Returns the version that they are of, or ""."""
    tests = folder.resolve() / "tests"
    if not (tests / "models").is_dir():
        raise FileNotFoundError(f"tests: got {folder}, want a folder with tests/models of transformers")
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
        module = importlib.import_module(f"{PACKAGE}.models.{family}.{path.stem}")
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
    """A copy of the config with wide random weights: else outputs would hardly depend on attention."""
    config = copy.deepcopy(config)
    for part in _parts(config):
        for name in _SPREAD:
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.2)
    return config


def _parts(config: Any) -> Iterator[Any]:
    from transformers import PreTrainedConfig

    yield config
    for below in vars(config).values():
        if isinstance(below, PreTrainedConfig):
            yield from _parts(below)


def of_type(family: str, cls: type) -> Iterator[Made | Part]:
    """Those whose config is of exactly this class, whole models first."""
    within: list[Part] = []
    for one in made(family):
        if type(one.config) is cls:
            yield one
        within += [Part(part, one) for part in _parts(one.config) if type(part) is cls]
    yield from within
