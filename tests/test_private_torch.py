"""Private names of torch stand in two files. Each is there in this torch, and what takes its place
where torch lacks it gives the same answer, or the one that is written beside it."""

import ast
import importlib
import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from attnops.core import private_torch
from attnops.lowering import inductor
from tests.helpers import sources

FILES = {"attnops.core.private_torch": private_torch, "attnops.lowering.inductor": inductor}
LATE = [(module, name) for module in FILES.values() for name in module._LATE]
IDS = [name for _, name in LATE]

PUBLIC = re.compile(
    r"torch\._check\w*|torch\.utils\._pytree|from torch\.utils import _pytree[^\n]*"
)
PRIVATE = re.compile(
    r"\btorch(\.\w+)*\._[a-zA-Z]\w*|from torch[.\w]* import (?:[\w, ]*\b)?_[a-zA-Z]"
)

# Of names that `import torch` loads: without these a module of ours is not imported.
NEEDED = {
    "attnops.core.private_torch": """
        torch._C._are_functorch_transforms_active torch._C._functorch
        torch._C._AutoDispatchBelowAutograd torch._C._autograd torch._C.DispatchKey
        torch._C._dispatch_tls_local_include_set torch._C._dispatch_tls_local_exclude_set
        torch._C._ForceDispatchKeyGuard torch._C._set_grad_enabled torch._guards.TracingContext
        torch._guards.tracing
        torch._subclasses.fake_tensor.DataDependentOutputException
        torch._subclasses.fake_tensor.DynamicOutputShapeException
        torch._subclasses.fake_tensor.FakeTensor torch._subclasses.fake_tensor.FakeTensorMode
        torch._subclasses.fake_tensor.unset_fake_temporarily torch._ops.HigherOrderOperator
        torch._functorch.utils.enable_single_level_autograd_function
        torch.autograd.function._SingleLevelFunction
        torch.nn.modules.module._global_forward_hooks
        torch.nn.modules.module._global_forward_pre_hooks
        torch.overrides._get_current_function_mode_stack
        torch.utils._python_dispatch.TorchDispatchMode
        torch.utils._python_dispatch._disable_current_modes
        torch.utils._python_dispatch._get_current_dispatch_mode_stack
    """,
    "attnops.lowering.inductor": """
        torch._dispatch.python.enable_python_dispatcher
        torch._guards.Guard torch._guards.detect_fake_mode
        torch.amp.autocast_mode._enter_autocast
    """,
}

# Without these another way is taken. Those of CUDA are in a torch that is built for it.
REPLACED = [
    "torch._C._is_any_autocast_enabled",
    "torch._C._DisableAutocast",
    "torch._C._is_tracing",
    "torch._C._functorch.is_legacy_batchedtensor",
    "torch.autograd._profiler_enabled",
    "torch._C._get_deterministic_algorithms",
    "torch._C._get_deterministic_algorithms_warn_only",
    "torch._C._len_torch_dispatch_stack",
    "torch._C._len_torch_function_stack",
    "torch._C._dynamo.guards.TensorGuards",
    "torch._C.parse_schema",
    "torch._foreach_copy_",
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "torch._C._construct_storage_from_data_pointer",
    "torch.cuda._sleep",
    "torch.nested._internal.nested_tensor.NestedTensor",
    "torch._vendor.packaging.version.Version",
    "torch._higher_order_ops.auto_functionalize.try_use_slice",
]
OF_CUDA = [
    "torch._C._tensors_data_ptrs_at_indices_equal",
    "torch._C._cuda_getDevice",
    "torch._C._cuda_getCurrentRawStream",
    "torch._C._cuda_clearCublasWorkspaces",
    "torch._C._cuda_releasePool",
    "torch._C._cuda_endAllocateToPool",
]


def home_of(path):
    """(the module or object that has a name, the name)."""
    home, _, name = path.rpartition(".")
    first, *rest = home.split(".")
    found = importlib.import_module(first)
    for at, part in enumerate(rest):
        if not hasattr(found, part):
            importlib.import_module(".".join([first, *rest[: at + 1]]))
        found = getattr(found, part)
    return found, name


def copy_of(module):
    """A module, loaded once more beside itself."""
    spec = spec_from_file_location(f"{module.__name__}_again", module.__file__)
    made = module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture
def without(monkeypatch):
    """Loads a copy of private_torch while torch lacks a name."""

    def load(path, module=private_torch):
        with monkeypatch.context() as gone:
            gone.delattr(*home_of(path), raising=False)
            return copy_of(module)

    return load


def test_two_files_have_private_names():
    found = {m for m, path in sources().items() if PRIVATE.search(PUBLIC.sub("", path.read_text()))}
    assert found == FILES.keys()


def test_each_name_has_a_user_and_no_user_asks_for_another():
    asked = {name: set() for name in FILES}
    for path in sources().values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                for name in FILES:
                    last = name.rpartition(".")[2]
                    if node.module in (name, last, f"core.{last}"):
                        asked[name] |= {alias.name for alias in node.names}
    for name, module in FILES.items():
        assert all(hasattr(module, each) for each in asked[name])
        assert module._LATE.keys() <= asked[name]


@pytest.mark.parametrize(("module", "name"), LATE, ids=IDS)
def test_a_late_name_is_there(module, name):
    home = importlib.import_module(module._LATE[name])
    assert getattr(copy_of(module), name) is getattr(home, name)


@pytest.mark.parametrize("path", [*REPLACED, *" ".join(NEEDED.values()).split()])
def test_a_name_of_torch_is_there(path):
    assert hasattr(*home_of(path))


@pytest.mark.parametrize("path", OF_CUDA)
def test_a_name_for_gpus_is_there(path):
    if torch.version.cuda is None:
        pytest.skip("this torch is built without CUDA")
    assert hasattr(*home_of(path))


# What torch lacks ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "path"), [(m, path) for m, paths in NEEDED.items() for path in paths.split()]
)
def test_a_name_without_another_way_is_missed_by_its_name(module, path, without):
    with pytest.raises((ImportError, AttributeError), match=path.rpartition(".")[2]):
        without(path, FILES[module])


@pytest.mark.parametrize(("module", "name"), LATE, ids=IDS)
def test_a_late_name_is_missed_by_its_name(module, name, monkeypatch):
    copy = copy_of(module)
    monkeypatch.delattr(importlib.import_module(module._LATE[name]), name)
    if name in getattr(module, "_HINTS", ()):
        assert getattr(copy, name)(torch.ones(2), [0]) is None, "a hint, which nobody hears"
        return
    with pytest.raises(AttributeError, match=rf"torch 2\.\S+ has no \S+\.{name}"):
        getattr(copy, name)
    with pytest.raises(AttributeError, match="'nonsense'"):
        copy.nonsense  # noqa: B018


def test_autocast(without):
    copy = without("torch._C._is_any_autocast_enabled")
    assert copy.autocasting() is private_torch.autocasting() is False
    with torch.autocast("cpu"):
        assert copy.autocasting() is private_torch.autocasting() is True
        for module in (without("torch._C._DisableAutocast"), private_torch):
            with module.uncast():
                assert not torch.is_autocast_enabled("cpu")
            assert torch.is_autocast_enabled("cpu")


def test_tools_that_look_on(without):
    batch = without("torch._C._functorch.is_legacy_batchedtensor")
    assert batch.of_a_batch(torch.ones(1)) is private_torch.of_a_batch(torch.ones(1)) is False
    with torch.profiler.profile():
        assert private_torch.profiling()
        assert not without("torch.autograd._profiler_enabled").profiling()
    copy, seen = without("torch._C._is_tracing"), []

    def step(x):
        seen.append((bool(copy.tracing()), bool(private_torch.tracing())))
        return x + 1

    step(torch.ones(1))
    torch.jit.trace(step, torch.ones(1), check_trace=False)
    assert seen == [(False, False), (True, True)]


@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize("warns", [False, True])
def test_determinism(without, on, warns):
    asks = without("torch._C._get_deterministic_algorithms")
    only = without("torch._C._get_deterministic_algorithms_warn_only")
    torch.use_deterministic_algorithms(on, warn_only=warns)
    try:
        assert asks.must_repeat() is private_torch.must_repeat() is on
        assert only.only_warns() is private_torch.only_warns() is warns
    finally:
        torch.use_deterministic_algorithms(False)


def test_modes_are_counted(without):
    class Seen(private_torch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    class Called(TorchFunctionMode):
        pass

    below = without("torch._C._len_torch_dispatch_stack")
    above = without("torch._C._len_torch_function_stack")
    for want in (0, 1):
        assert below.count_dispatch_modes() == private_torch.count_dispatch_modes() == want
        assert above.count_function_modes() == private_torch.count_function_modes() == want
        if not want:
            entered = [Seen(), Called()]
            for mode in entered:
                mode.__enter__()
    with private_torch.without_modes():
        assert not private_torch.count_dispatch_modes()
    for mode in reversed(entered):
        mode.__exit__(None, None, None)


@pytest.mark.parametrize("name", [*private_torch._FLAGS, "_get_fp32_precision_getter"])
def test_a_flag_that_torch_lacks_is_left_out(name, without):
    copy = without(f"torch._C.{name}")
    own = getattr(torch._C, name, None)
    left = [get for get in private_torch.FLAGS if own not in (get, getattr(get, "func", None))]
    assert (
        len(copy.FLAGS)
        == len(left)
        == len(copy_of(private_torch).FLAGS)
        - (
            0
            if own is None
            else len(private_torch._PRECISIONS)
            if "precision_getter" in name
            else 1
        )
    )


def test_tensor_guards(without):
    """What takes their place, eager_cache.Likeness, has its tests in tests/ops/test_eager.py."""
    assert without("torch._C._dynamo.guards.TensorGuards").TensorGuards is None


def test_ragged_tensors_have_a_public_class(monkeypatch):
    name = "torch.nested._internal.nested_tensor"
    own = importlib.import_module(name)
    importlib.import_module("torch.nested._internal.ops")
    moved = ModuleType(name)
    vars(moved).update({k: v for k, v in vars(own).items() if k != "NestedTensor"})
    monkeypatch.setitem(sys.modules, name, moved)
    assert copy_of(private_torch).NestedTensor is own.NestedTensor


def test_the_types_of_ops():
    assert private_torch.OpOverload is torch._ops.OpOverload
    assert private_torch.OpOverloadPacket is torch._ops.OpOverloadPacket
    assert torch.nn.functional.gelu.__module__ in private_torch.FUNCTIONAL
    assert torch.nn.functional.relu.__module__ in private_torch.FUNCTIONAL


def test_an_assertion_of_a_device(monkeypatch):
    monkeypatch.setattr(torch.ops.aten, "_assert_async", None)
    for check in (copy_of(private_torch).assert_async, private_torch.assert_async):
        check(torch.tensor(True), "fits")
        with pytest.raises(RuntimeError, match="too long"):
            check(torch.tensor(False), "too long")


def test_schemas(without):
    copy = without("torch._C.parse_schema")
    for parse in (copy.parse_schema, private_torch.parse_schema) * 2:
        parse("attnops::schema_of_a_test(Tensor x, int n=1) -> Tensor")
        with pytest.raises(RuntimeError):
            parse("attnops::schema_of_a_test(Tensor x, int n=) -> Tensor")


def test_lists_of_tensors(without):
    theirs = [torch.ones(2), torch.arange(3)]
    for module in (without("torch._foreach_copy_"), private_torch):
        ours = [torch.zeros(2), torch.zeros(3, dtype=torch.int64)]
        module.copy_all(ours, theirs)
        assert [t.tolist() for t in ours] == [t.tolist() for t in theirs]
    addresses = [t.data_ptr() for t in theirs]
    for module in (without("torch._C._tensors_data_ptrs_at_indices_equal"), private_torch):
        assert module.same_addresses(theirs, addresses, [0, 1])
        assert not module.same_addresses(theirs, addresses[::-1], [0, 1])


def test_checkpoints_are_not_seen(without):
    copy = without("torch._C._autograd._top_saved_tensors_default_hooks")
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert copy.saved_tensors_hooks(True) is None
        assert private_torch.saved_tensors_hooks(True) is not None
    assert private_torch.saved_tensors_hooks(True) is None


def test_gpus(without, monkeypatch):
    assert without("torch._C._cuda_getDevice").current_device is torch.cuda.current_device
    copy = without("torch._C._cuda_getCurrentRawStream")
    stream = {3: SimpleNamespace(cuda_stream=7)}
    monkeypatch.setattr(torch.cuda, "current_stream", stream.__getitem__)
    assert copy.current_stream(3) == 7


def test_memory_of_gpus(monkeypatch):
    """Functions that are looked up when they are called, because a torch without CUDA has none."""
    told = []
    for name in ("_cuda_clearCublasWorkspaces", "_cuda_releasePool", "_cuda_endAllocateToPool"):
        monkeypatch.setattr(
            torch._C, name, lambda *given, name=name: told.append((name, *given)), raising=False
        )
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: told.append(cycles))
    device = torch.device("cuda", 1)
    private_torch.clear_workspaces()
    private_torch.release_pool(device, (0, 5))
    private_torch.end_pool(device, (0, 5))
    private_torch.spin(9)
    assert told == [
        ("_cuda_clearCublasWorkspaces",),
        ("_cuda_releasePool", 1, (0, 5)),
        ("_cuda_endAllocateToPool", 1, (0, 5)),
        9,
    ]
    monkeypatch.delattr(torch._C, "_construct_storage_from_data_pointer")
    assert private_torch.storage_at(0, device, 8) is None


def test_the_compiler():
    def mine(x):
        return x

    def theirs(x):
        return x

    assert vars(private_torch.assume_constant(mine)) == vars(
        torch.compiler.assume_constant_result(theirs)
    )
    assert inductor.dynamo_is_loaded()
    with (
        private_torch.dynamo_config().patch(
            recompile_limit=9,
            accumulated_recompile_limit=9,
            fail_on_recompile_limit_hit=True,
            capture_scalar_outputs=True,
            capture_dynamic_output_shape_ops=True,
            automatic_dynamic_shapes=False,
        ),
        private_torch.shapes_config().patch(use_duck_shape=False, backed_size_oblivious=True),
        private_torch.inductor_config().patch(coordinate_descent_tuning=True, compile_threads=1),
    ):
        assert torch._dynamo.config.recompile_limit == 9


def test_compile_workers_start_when_they_are_needed(monkeypatch):
    compiles, told = importlib.import_module("torch._inductor.async_compile"), []
    monkeypatch.setattr(compiles, "maybe_warm_pool", lambda: told.append("started"))
    private_torch.start_compile_workers()
    monkeypatch.delattr(compiles, "maybe_warm_pool")
    private_torch.start_compile_workers()
    assert told == ["started"]


def test_versions(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._vendor.packaging.version", None)
    copy = copy_of(private_torch)
    assert copy.Version is not private_torch.Version
    for module in (copy, private_torch):
        assert module.Version("2.11") < module.Version("2.13.0rc1") < module.Version("2.13")
        with pytest.raises(module.InvalidVersion):
            module.Version("none")
