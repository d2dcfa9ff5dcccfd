"""transformers knows "attnops" after `import attnops` alone, in either order of the imports.

The hook delegates: what loads the module, its errors and other hooks are as without attnops.
"""

import sys
import textwrap
from types import SimpleNamespace

import pytest

from attnops import announce
from attnops.on_import import Finder
from tests.helpers import torch_process

TABLES = "(AttentionInterface, AttentionMaskInterface)"
FOUND = f'print(*("attnops" in table._global_mapping for table in {TABLES}))'
# A transformers of two modules, which loads in no time.
MODELING = """
class Interface:
    _global_mapping = {"paged|sdpa": None}
class AttentionInterface(Interface): pass
"""
MASKING = "class AttentionMaskInterface:\n    _global_mapping = {}\n"


@pytest.fixture
def toy(tmp_path):
    """Runs code in a new process beside a toy transformers, given by version and modules."""

    def run(code, version="5.17.0", **modules):
        folder = tmp_path / "transformers"
        folder.mkdir()
        (folder / "__init__.py").write_text(f"__version__ = {version!r}\n")
        for name, text in {"modeling_utils": MODELING, "masking_utils": MASKING, **modules}.items():
            (folder / f"{name}.py").write_text(text)
        path = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n"
        prelude = "from importlib import import_module, reload\nimport attnops\n"
        hooks = (
            'hooks = lambda: [f for f in sys.meta_path if getattr(f, "name", "") == '
            '"transformers.modeling_utils"]\n'
        )
        return torch_process(path + prelude + hooks + textwrap.dedent(code))

    return run


SIZES = "vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1"
MODEL = f"""
from transformers import AutoModelForCausalLM, LlamaConfig
config = LlamaConfig({SIZES}, num_attention_heads=2)
model = AutoModelForCausalLM.from_config(config, attn_implementation="attnops").eval()
ids, mask = torch.arange(12).view(2, 6), torch.ones(2, 6, dtype=torch.int64)
"""


def test_a_model_by_name():
    """With padding, which a name without a mask function would lose."""
    code = f"""
import sys, attnops, torch
from transformers import AttentionInterface, AttentionMaskInterface
{FOUND}
print("attnops.hf" in sys.modules, [f for f in sys.meta_path if getattr(f, "name", "") == "transformers.modeling_utils"])
{MODEL}
mask[0, :3] = 0
ours = model(ids, attention_mask=mask).logits[mask.bool()]
own = AttentionInterface._global_mapping["attnops"]
model.set_attn_implementation("eager")
torch.testing.assert_close(model(ids, attention_mask=mask).logits[mask.bool()], ours)
print(hasattr(own, "attnops_late"), "attnops.hf" in sys.modules)
"""  # noqa: E501
    told = torch_process(code).splitlines()
    assert told[-3:] == ["True True", "False []", "False True"]


@pytest.mark.full
def test_a_model_that_is_compiled_first_and_a_transformers_that_was_there():
    """The functions behind the names load in the trace, and what they load is not put in their
    place there: the trace is guarded by them."""
    code = f"""
import torch, transformers.modeling_utils, attnops
from transformers import AttentionInterface
{MODEL}
graphs = []
def backend(graph, _):
    graphs.append(graph.code)
    return graph
compiled = torch.compile(model, fullgraph=True, backend=backend)
with torch.no_grad():
    first, again = (compiled(ids, use_cache=False).logits for _ in range(2))
    print(len(graphs), "attnops.attention" in graphs[0])
    torch.testing.assert_close(model(ids).logits, again)
print(hasattr(AttentionInterface._global_mapping["attnops"], "attnops_late"))
"""
    assert torch_process(code).splitlines()[-2:] == ["1 True", "False"]


def test_the_module_is_loaded_as_without_the_hook(toy):
    """Its errors included, after which a second try is met."""
    code = """
    from importlib.util import find_spec
    import builtins, inspect, traceback
    assert len(hooks()) == 1
    attnops.announce.announce()
    reload(attnops.announce).announce()
    assert len(hooks()) == 1
    spec = find_spec("transformers.modeling_utils")
    assert spec.origin.endswith("modeling_utils.py") and spec.loader.get_source(spec.name)
    assert len(hooks()) == 1 and find_spec("transformers.absent") is None
    try:
        import_module("transformers.modeling_utils")
    except ZeroDivisionError as error:
        assert "modeling_utils.py" in traceback.extract_tb(error.__traceback__)[-1].filename
    assert "transformers.modeling_utils" not in sys.modules and len(hooks()) == 1
    builtins.well = True
    module = import_module("transformers.modeling_utils")
    assert not hooks() and "attnops" in module.AttentionInterface._global_mapping
    assert "paged|attnops" in module.AttentionInterface._global_mapping
    kinds = type(module.__loader__), type(module.__spec__.loader)
    assert kinds == (type(import_module("transformers.masking_utils").__loader__),) * 2
    assert "class Interface" in inspect.getsource(module)
    again = reload(module)
    assert again is module and "attnops" not in module.AttentionInterface._global_mapping
    print("attnops.hf" in sys.modules)
    """
    broken = "import builtins\nif not hasattr(builtins, 'well'): 1 / 0\n" + MODELING
    assert toy(code, modeling_utils=broken) == "False\n"


def test_other_hooks_go_on(toy):
    """One before and one behind, each of which wraps the loader it finds; and threads at once."""
    code = """
    import threading
    from importlib.util import find_spec
    seen = []

    class Loader:
        def __init__(self, loader): self.loader = loader
        def create_module(self, spec): return self.loader.create_module(spec)
        def exec_module(self, module):
            self.loader.exec_module(module)
            seen.append(type(self.loader).__name__)

    class Other:
        busy = threading.local()
        def find_spec(self, name, path=None, target=None):
            if name != "transformers.modeling_utils" or getattr(self.busy, "on", False):
                return None
            self.busy.on = True
            try:
                spec = find_spec(name)  # asks all finders again
            finally:
                self.busy.on = False
            spec.loader = Loader(spec.loader)
            return spec

    sys.meta_path.insert(0, Other())
    sys.meta_path.insert(2, Other())
    found = []
    def load():
        module = import_module("transformers.modeling_utils")
        found.append("attnops" in module.AttentionInterface._global_mapping)
    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    print(found == [True] * 8, len(hooks()), len(seen))
    """
    assert toy(code).startswith("True 0 ")


def test_a_transformers_that_is_too_old_gets_no_name(toy):
    code = """
    import warnings
    warnings.simplefilter("error")
    found = import_module("transformers.modeling_utils").AttentionInterface
    print("attnops" in found._global_mapping, hooks())
    """
    assert toy(code, "5.3.0") == "False []\n"


@pytest.mark.full
def test_names_that_cannot_be_registered_are_a_warning(toy):
    code = """
    import warnings
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        import_module("transformers.modeling_utils")
    print([str(w.message) for w in told], hooks())
    """
    said = toy(code, masking_utils="raise ImportError('no masks today')")
    assert "import attnops.hf" in said and "no masks today" in said and said.endswith("[]\n")


def test_without_transformers_nothing_happens():
    code = """
import sys, attnops
from importlib.util import find_spec
assert find_spec("transformers") is None
try:
    import transformers.modeling_utils
except ModuleNotFoundError as error:
    print(error.name)
try:
    attnops.hf
except ImportError as error:
    print(error.name)
"""
    assert torch_process(code, block=["transformers"]).splitlines() == ["transformers"] * 2


def test_a_name_that_is_taken_stays(monkeypatch):
    """As of a caller who has wrapped our function."""
    names, masks = {"attnops": 1}, {"attnops": 2}
    table, of_masks = SimpleNamespace(_global_mapping=names), SimpleNamespace(_global_mapping=masks)
    modules = {
        "transformers": SimpleNamespace(__version__="5.17"),
        "transformers.modeling_utils": SimpleNamespace(AttentionInterface=table),
        "transformers.masking_utils": SimpleNamespace(AttentionMaskInterface=of_masks),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    announce.announce()
    assert (names, masks) == ({"attnops": 1}, {"attnops": 2})


def test_the_hook_that_is_left_over_finds_nothing():
    """A list of finders may be restored by a test's cleanup, or hold no hook of ours any more."""
    left_over = Finder(announce.WHERE, lambda module: None)
    assert left_over.find_spec(announce.WHERE, None) is None
    assert left_over.find_spec("json") is None
