"""One class per failure. Every message names the field, the value given and what is allowed.

torch.compile wraps an error that a compiler meets, so `except AttnopsError` around a compiled call
catches those of the run alone:

    try:
        compiled(x)
    except Exception as error:
        if (ours := attnops.core.errors.find(error)) is None:
            raise
        print(ours)

All errors may be pickled and copied, so that they cross processes. A value that cannot be pickled
arrives as its text.
"""

from __future__ import annotations

import pickle
import sys
import warnings
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from attnops.core.private_torch import assume_constant, tracing_context

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from attnops.core.problem import Refusal
    from attnops.core.select import Decision


_HEAD, _TAIL = 240, 40


def shown(value: object, text: Callable[[Any], str] = str) -> str:
    """The text of a value within an error. A long one loses its middle, for callers give numbers of
    400 digits and whole files."""
    try:
        whole = text(value)
    except (
        Exception
    ):  # Python refuses the text of an int of over 4,300 digits, and a stranger's class may raise
        return f"a value of type {type(value).__name__} that has no text"
    return (
        whole
        if len(whole) <= _HEAD + _TAIL
        else f"{whole[:_HEAD]}...{whole[-_TAIL:]} ({len(whole)} characters)"
    )


def one_line(error: BaseException) -> str:
    """The type of an error and the first line of its text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


class AttnopsError(Exception):
    """Base of every error attnops raises on purpose. Under torch.compile it may come wrapped: see
    `find`."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception's own would call the class with its text, and each class takes other arguments.
        return _again, (
            type(self),
            self.args,
            {name: portable(value) for name, value in vars(self).items()},
        )


def _again(
    kind: type[AttnopsError], args: tuple[Any, ...], attributes: dict[str, Any]
) -> AttnopsError:
    error = kind.__new__(kind, *args)
    vars(error).update(attributes)
    return error


def portable(value: object) -> object:
    """`value` if another process can be handed it, else its text. A tensor is its text, for its
    memory is not to be shared."""
    if isinstance(value, torch.Tensor):
        return f"a tensor {tuple(value.shape)} of {value.dtype}"
    try:
        pickle.loads(pickle.dumps(value))
    except Exception:  # whatever a stranger's class makes of it
        return shown(value)
    return value


def find(error: BaseException | None) -> AttnopsError | None:
    """`error` itself or the AttnopsError that it wraps, as errors of torch.compile do; None where
    there is neither."""
    # The compiler raises some of its errors `from None`: their cause is then their context.
    waiting, seen = [error], set[int]()
    while waiting:
        e = waiting.pop()
        if isinstance(e, AttnopsError):
            return e
        if isinstance(e, BaseException) and id(e) not in seen:
            seen.add(id(e))
            waiting += [e.__context__, getattr(e, "inner_exception", None), e.__cause__]
    return None


@assume_constant
def fail(kind: type[AttnopsError], *args: Any) -> NoReturn:
    """Raise `kind(*args)` in code that Dynamo traces, which cannot construct such an error: the
    graph breaks, or, under `fullgraph=True`, the compiler wraps the error as it wraps all
    others."""
    if tracing_context() is None:
        # A local name would make a cycle of the error and its traceback, which holds the locals of
        # every caller.
        raise kind(*args)
    from attnops.core.private_torch import Unsupported

    error = kind(*args)
    raise Unsupported(str(error)) from error


class InvalidInput(AttnopsError, ValueError):
    """An argument breaks the op's contract. `field` got `got`, the contract wants `want`."""

    def __init__(self, field: str, got: object, want: str) -> None:
        super().__init__(f"{field}: got {shown(got)}, want {want}")
        self.field, self.got, self.want = field, got, want


class BadTable(InvalidInput):
    """A file is no table of measured times that this version reads, or one of another GPU. It is
    ignored, and `doctor --all` names it."""


class UnsupportedVersion(AttnopsError, ImportError):
    """A package that is installed is of a version that attnops does not support."""

    def __init__(self, package: str, got: str, want: str) -> None:
        super().__init__(
            f"{package}: got version {shown(got)}, want {want}; `pip install '{package}{want}'`"
        )
        self.package, self.got, self.want = package, got, want


class MissingExtra(AttnopsError, ImportError):
    """Packages are not installed. `packages` are absent; `extra` is the extra of attnops that
    installs them."""

    def __init__(self, packages: tuple[str, ...], extra: str) -> None:
        super().__init__(
            f"packages: got no {', '.join(packages)}, want them installed: pip install "
            f"'attnops[{extra}]'"
        )
        self.packages, self.extra = packages, extra


class UnknownKernel(AttnopsError, ValueError):
    """No registered kernel has the name that was given."""

    def __init__(self, name: str, op: str, known: tuple[str, ...]) -> None:
        super().__init__(
            f"kernel: got {shown(name, repr)}, want one of "
            f"{', '.join(known) or 'none registered'} (op {op})"
        )
        self.name, self.op, self.known = name, op, known


class NoKernel(AttnopsError, RuntimeError):
    """No kernel may run the problem, or the one asked for may not. The text is the whole Decision,
    every reason included."""

    def __init__(self, headline: str, decision: Decision) -> None:
        super().__init__(f"{headline}\n{decision}")
        self.decision = decision


class NotCompiled(AttnopsError, RuntimeError):
    """A kernel that compiles at its first call of each kind met a new kind while a CUDA graph was
    captured."""

    def __init__(self, kernel: str, got: str) -> None:
        super().__init__(
            f"{kernel}: got a kind of call not yet compiled ({shown(got)}) while a CUDA graph is "
            "captured, want one such call before"
        )
        self.kernel, self.got = kernel, got


class NotLoaded(AttnopsError, RuntimeError):
    """A library of an installed package cannot be loaded."""

    def __init__(self, package: str, got: str, want: str) -> None:
        super().__init__(f"{package}: got {shown(got)}, want {want}")
        self.package, self.got, self.want = package, got, want


class NoGradient(AttnopsError, RuntimeError):
    """An input requires grad where the op has no gradient, or has a forward-mode tangent, which no
    op supports (`forward`)."""

    def __init__(self, op: str, fields: tuple[str, ...], forward: bool = False) -> None:
        got, want = "requires_grad=True", "no gradient (this op has none)"
        do = (
            "Call it under torch.no_grad() or detach its inputs; attention() and "
            "varlen_attention() are differentiable."
        )
        if forward:
            got, want = "a forward-mode tangent", "none (no op has derivatives in forward mode)"
            do = (
                "Differentiate in reverse: torch.func.vjp, grad or jacrev in place of jvp or "
                "jacfwd."
            )
        super().__init__(f"{op}: got {got} on {', '.join(fields)}, want {want}. {do}")
        self.op, self.fields, self.forward = op, fields, forward


NOT_SCRIPTED = "torch.export, or torch.jit.trace: it compiles no code that calls attnops"


class NotRecordable(AttnopsError, RuntimeError):
    """A tool that records a model, or maps it over a batch, meets what it cannot have.

    what: the op or module. tool: the tool, with what it met. want: what to do.
    """

    def __init__(self, what: str, tool: str, want: str) -> None:
        super().__init__(f"{what}: got {tool}, want {want}; see docs/export.md")
        self.what, self.tool, self.want = what, tool, want


class RegistrationError(AttnopsError, ValueError):
    """A kernel declaration is wrong: duplicate name, unknown op, bad name."""


class ContractMismatch(RegistrationError):
    """A kernel was written for another version of the kernel contract."""

    def __init__(self, kernel: str, got: int, want: int) -> None:
        super().__init__(
            f"kernel {kernel}: contract got {shown(got)}, want {want}; see docs/add-a-kernel.md "
            "for what changed"
        )
        self.kernel, self.got, self.want = kernel, got, want


class WrongResult(AttnopsError, RuntimeError):
    """A kernel of another package returned what its op does not promise. Found at its first
    call."""

    def __init__(self, op: str, kernel: str, field: str, got: object, want: object) -> None:
        given = f"{op}.{kernel}: {field} got {shown(got)}, want {shown(want)}"
        super().__init__(f"{given}; `run` of the kernel returns what docs/ops.md says of the op")
        self.op, self.kernel, self.field, self.got, self.want = op, kernel, field, got, want


class PageSizeConflict(AttnopsError, ValueError):
    """No page size suits all the kernels that a cache is to serve, or the one given does not.

    page_size: the one given, or None.
    takes: by kernel, the sizes that it takes of those tried.
    refused: by kernel, its reasons against the other sizes.
    """

    def __init__(
        self,
        page_size: int | None,
        tried: tuple[int, ...],
        takes: Mapping[str, tuple[int, ...]],
        refused: Mapping[str, tuple[Refusal, ...]],
    ) -> None:
        lines = [
            f"page_size: got {shown(page_size)}, want one of {', '.join(map(str, tried))} that "
            "all of these kernels take"
        ]
        for kernel, sizes in takes.items():
            some = (
                f"{', '.join(map(str, sizes))}{' only' * (len(sizes) < len(tried))}"
                if sizes
                else "none"
            )
            lines.append(
                f"  {kernel} takes "
                f"{': '.join([some, *('; '.join(map(str, r)) for r in [refused[kernel]] if r)])}"
            )
        super().__init__("\n".join(lines))
        self.page_size, self.takes, self.refused = page_size, takes, refused


class CacheError(AttnopsError, RuntimeError):
    """Base of the paged cache's errors. The cache is as it was before the call that raised."""


class OutOfPages(CacheError):
    """The pool has fewer free pages than the call needs."""

    def __init__(self, needed: int, free: int, total: int) -> None:
        super().__init__(
            f"pages: need {shown(needed)}, got {free} free of {total}; free a request or build a "
            "larger cache"
        )
        self.needed, self.free, self.total = needed, free, total


class UnknownRequest(CacheError, KeyError):
    """A request id that the cache does not hold: never allocated, or freed already."""

    def __init__(self, request: object, live: int) -> None:
        want = f"the id of one of the {live} live requests (freed twice, or from another cache?)"
        super().__init__(f"request: got {shown(request, repr)}, want {want}")
        self.request = request

    def __str__(self) -> str:
        return str(self.args[0])


class RequestTooLong(CacheError, ValueError):
    """A request would pass the length its row of the page table can describe."""

    def __init__(self, request: object, got: int, limit: int, limited_by: str) -> None:
        super().__init__(
            f"length of request {shown(request, repr)}: got {shown(got)} tokens, want at most "
            f"{limit} ({limited_by})"
        )
        self.request, self.got, self.limit = request, got, limit


class TooManyRequests(CacheError):
    """Every row of the cache's tables belongs to a live request."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"requests: got {limit} live, want fewer than max_requests = {limit}; free a request "
            "or build a larger cache"
        )
        self.limit = limit


class GraphError(AttnopsError, RuntimeError):
    """Base of the errors of `attnops.graphs`. A replay raises ReplayMismatch, and NotCapturable for
    a call between graphs whose result changes its shape. All others leave the cache as it was."""


class BatchTooLarge(GraphError, ValueError):
    """A batch is larger than the largest bucket of its kind, and the policy is not to run it
    without graphs."""

    def __init__(self, kind: str, field: str, got: int, largest: int) -> None:
        want = f"at most {largest}, the largest bucket" if largest else "a bucket for such batches"
        super().__init__(
            f"{kind} batch: {field} got {shown(got)}, want {want}; give Buckets more, or "
            "over='eager'"
        )
        self.kind, self.field, self.got, self.largest = kind, field, got, largest


class StaleGraph(GraphError):
    """A graph is called with other arguments, addresses, policy or autocast than it was captured
    with."""

    def __init__(self, field: str, got: object, want: object) -> None:
        super().__init__(
            f"{field}: got {shown(got)}, want {shown(want)}, as captured; call free() to capture "
            "anew"
        )
        self.field, self.got, self.want = field, got, want


class NotCapturable(GraphError):
    """A call, or a model, that can be neither captured nor left out of the graphs."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: cannot be captured, {why}")
        self.what, self.why = what, why


class SideEffect(NotCapturable):
    """A step that changes the model as it runs, as one that counts its calls does. A replay would
    not. The text names the attribute."""


class OverBudget(GraphError):
    """Graphs would take more memory than they may. All figures in bytes; `need` is measured by
    running the bucket without a graph."""

    def __init__(self, bucket: object, need: int, held: int, budget: int) -> None:
        super().__init__(
            f"{bucket}: got a need of {shown(need)} bytes beside {held} held by graphs, want at "
            f"most {shown(budget)} in all; "
            "drop the bucket, raise budget_bytes, or give over_budget='drop'"
        )
        self.bucket, self.need, self.held, self.budget = bucket, need, held, budget


class ReplayMismatch(GraphError):
    """A replay's result is not that of the same call without graphs. Found by `check_every`, after
    the replay."""

    def __init__(self, bucket: object, output: str, error: float, allowed: float) -> None:
        super().__init__(
            f"{bucket}, output {output}: got an error of {error:.3g} against eager, want at most "
            f"{allowed:.3g}"
        )
        self.bucket, self.output, self.error, self.allowed = bucket, output, error, allowed


class PatchError(AttnopsError, RuntimeError):
    """A model cannot be patched as asked."""


class NotFast(UserWarning):
    """A model that could have had pages or CUDA graphs does not get them, for a reason that is its
    own, the machine's or a version's; or no kernel of an op is installed on a GPU.

    It warns once a process for each class of model, or op. Results are right.
    """


class UntriedVersion(UserWarning):
    """A package that is installed is newer than the newest that attnops was tried with. It warns
    once a process for each package."""


# What was warned of, by category and subject.
_WARNED: set[tuple[type[Warning], str]] = set()


def warn_once(category: type[Warning], subject: str, text: str) -> None:
    """Warn of a subject, once a process, at the line of the caller's code that led here."""
    if (category, subject) in _WARNED:
        return
    _WARNED.add((category, subject))
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_library(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)


def _is_library(module: str) -> bool:
    return module.partition(".")[0] in ("attnops", "transformers", "torch", "contextlib")
