"""The checks of one model type: patched against eager, in float32."""

from __future__ import annotations

import contextlib
import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import attnops
from attnops.core.errors import AttnopsError, PatchError
from attnops.core.tensors import FAINT
from attnops.hf.cache.names import argument, argument_of
from benchmarks.census import inputs as given_inputs
from benchmarks.census.inputs import PADDINGS, Inputs, padded, padding, parameters, tokens

EPS = torch.finfo(torch.float32).eps
MODES = ("auto", "explicit", "compact")
"""Mask modes. "auto" is "dense" on a CPU."""
CACHES = ("dynamic", "static", "none")
NEW, PROMPT = 5, 7
FLOOR = 32 * EPS
TIMES_NOISE = 8.0
TEETH = 4.0
"""A token that is hidden changes the output by at least so many bounds, or the bound proves
nothing."""


class Wrong(AssertionError):
    """The patched model gives something else than eager."""

    status = "wrong"


class Eager(Exception):
    """transformers' own eager model cannot do it."""

    status = "eager"


class AsChosen(Exception):
    """Eager differs from the attention that transformers itself chooses for this model, mostly
    sdpa, and the patched model equals that."""

    status = "chosen"


Found = dict[str, Tensor]
Check = Callable[[], None]


def outputs_of(result: Any, prefix: str = "") -> Found:
    """The float tensors of a model's output, by name; caches and weights of attention left out."""
    found: Found = {}
    items = (
        result.items()
        if hasattr(result, "items")
        else enumerate(result)
        if isinstance(result, (tuple, list))
        else ()
    )
    for name, value in items:
        if any(
            word in str(name)
            for word in ("past_key_values", "attentions", "cache", "router", "loss", "mems")
        ):
            continue
        if isinstance(value, Tensor):
            if value.is_floating_point() and value.numel():
                found[f"{prefix}{name}"] = value.detach().clone()
        elif isinstance(value, (tuple, list)) or hasattr(value, "items"):
            found |= outputs_of(value, f"{prefix}{name}.")
    if isinstance(result, Tensor):
        found[prefix or "output"] = result.detach().clone()
    return found


def run(model: Any, given: Inputs) -> Found:
    torch.manual_seed(3)
    with torch.no_grad():
        return outputs_of(model(**given))


def visible(found: Found, given: Inputs) -> Found:
    """What padding leaves meaningful: positions that are not padding, or else rows without any."""
    masks = [
        given[name]
        for name in ("attention_mask", "decoder_attention_mask")
        if isinstance(given.get(name), Tensor)
    ]
    if not masks:
        return found
    whole = torch.stack([mask.bool().all(1) for mask in masks]).all(0)
    # A decoder that is given a row of padding by its encoder says nothing in that row.
    some = torch.stack([mask.bool().any(1) for mask in masks]).all(0)
    kept: Found = {}
    for name, value in found.items():
        mask = next(
            (
                mask
                for mask in masks
                if value.shape[:2] == mask.shape and ("encoder" not in name or mask is masks[0])
            ),
            None,
        )
        if mask is not None and "pool" not in name:
            kept[name] = value[mask.bool() & some[:, None]]
        elif value.shape[:2] == (len(whole), len(whole)):
            kept[name] = value[whole][:, whole]  # of the rows to each other, as similarities are
        elif value.shape[:1] == whole.shape and value.dim() > 1:
            kept[name] = value[whole]
    return kept


def within(off: float, limit: float, what: str = "") -> None:
    """Raise Wrong unless something is off by the limit at most."""
    if not off <= limit:
        raise Wrong(f"{what}off by {off:.1e}, bound {limit:.1e}")


def distance(ours: Found, eager: Found) -> float:
    """The largest difference of any output over that output's largest eager value. Infinite where
    ours is not finite and eager is."""
    worst = 0.0
    for name, want in eager.items():
        if name not in ours or ours[name].shape != want.shape:
            raise Wrong(
                f"{name} is {list(ours[name].shape) if name in ours else 'missing'}, want "
                f"{list(want.shape)}"
            )
        fine = torch.isfinite(want)
        if not fine.any():
            continue
        if not torch.isfinite(ours[name][fine]).all():
            return float("inf")
        top = want[fine].abs().max().item()
        off = (ours[name][fine].double() - want[fine].double()).abs().max().item()
        worst = max(worst, off / top if top else off)
    return worst


class Subject:
    """One model with its inputs, eager's answers and the bound on differences from them."""

    def __init__(
        self,
        model: Any,
        chosen: Callable[[], dict[str, str]] = dict,
        given: Inputs | None = None,
        whole: Any = None,
    ) -> None:
        """chosen: tells transformers' own choices of attention, see `models.chosen`. given: inputs
        to try before those of the census.

        whole: the model to patch, where `model` is a part of it.
        """
        self.model = model
        self.chosen = chosen
        self.patch = partial(attnops.patch, model if whole is None else whole)
        self.names, self.implementations = parameters(model), implementations(model)
        self.given = given_inputs.first_that_runs(model, given)
        brought = given or {}
        self.brought = any(value is brought.get(name) for name, value in self.given.items())
        self.cases: dict[str, Inputs] = {}
        self.eager: dict[str, Found] = {}
        self.failed: dict[str, str] = {}
        self.made: dict[str, Any] = {}
        for kind in PADDINGS:
            made = padded(model, self.given, kind)
            if made is None:
                continue
            try:
                found = run(model, made)
                self.eager[kind], self.cases[kind] = found, made
            except Exception as error:
                self.failed[kind] = short(error)
        again = distance(run(model, self.given), self.eager["none"])
        if again > FLOOR:
            raise ValueError(f"eager differs from itself by {again:.1e} from run to run")
        if not any(torch.isfinite(value).any() for value in self.eager["none"].values()):
            raise ValueError("no output of eager is finite with these weights")
        self.noise = max(self._noise(kind) for kind in ("none", "left") if kind in self.cases)
        self.limit = FLOOR + TIMES_NOISE * self.noise

    def _noise(self, kind: str) -> float:
        """How far eager's output moves when each weight moves by its last bit."""
        case, noise = self.cases[kind], 0.0
        for seed in (5, 6):
            with nudged(self.model, seed):
                moved = run(self.model, case)
            noise = max(noise, distance(visible(moved, case), visible(self.eager[kind], case)))
        return noise

    def stock(self, name: str, make: Callable[[], Any]) -> Any:
        """What eager makes, which it is asked for once by this name. Raises Eager if it cannot make
        it."""
        if name not in self.made:
            try:
                self.made[name] = make()
            except Exception as error:
                self.made[name] = Eager(short(error))
        if isinstance(found := self.made[name], Eager):
            raise found
        return found

    def compare(self, kind: str, ours: Found) -> None:
        case = self.cases[kind]

        def judge(want: Found) -> None:
            within(distance(visible(ours, case), visible(want, case)), self.limit)

        self.settle(judge, self.eager[kind], lambda: run(self.model, case))

    def settle(self, judge: Callable[[Any], None], eager: Any, stock: Callable[[], Any]) -> None:
        """Raise Wrong unless `judge` accepts eager's answer, or AsChosen when it accepts that of
        `stock` as transformers would run it."""
        try:
            judge(eager)
        except Wrong as wrong:
            try:
                with switched(self.model, self.chosen()):
                    want = stock()
                judge(want)
            except Exception:
                raise wrong from None
            raise AsChosen(f"{wrong}") from None


@contextlib.contextmanager
def switched(model: Any, names: dict[str, str]) -> Iterator[None]:
    """Within the block the modules at these paths use these implementations of attention."""
    configs = [
        (module.config, names[path]) for path, module in model.named_modules() if path in names
    ]
    held = [(config, config._attn_implementation_internal) for config, _ in configs]
    for config, name in configs:
        config._attn_implementation_internal = name
    try:
        yield
    finally:
        for config, before in held[::-1]:
            config._attn_implementation_internal = before


@contextlib.contextmanager
def nudged(model: Any, seed: int) -> Iterator[None]:
    """Within the block each float32 weight is off by a random one of -1, 0, 1 units in the last
    place."""
    draw = given_inputs.seeded(seed)
    kept = [(p.data, p.detach().clone()) for p in model.parameters() if p.dtype == torch.float32]
    for weight, _ in kept:
        weight.mul_(1 + EPS * torch.randint(-1, 2, weight.shape, generator=draw))
    try:
        yield
    finally:
        for weight, was in kept:
            weight.copy_(was)


def short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


def ours_in(error: BaseException | None) -> AttnopsError | None:
    """An error of attnops in the chain of causes."""
    for _ in range(20):
        if error is None or isinstance(error, AttnopsError):
            break
        error = error.__cause__ or error.__context__
    return error if isinstance(error, AttnopsError) else None


def generation(model: Any, given: Inputs, cache: str) -> tuple[Tensor, Tensor]:
    """Greedy tokens `[B, NEW]` and their logits `[B, NEW, V]`."""
    options: dict[str, Any] = {
        "max_new_tokens": NEW,
        "min_new_tokens": NEW,
        "do_sample": False,
        "num_beams": 1,
    }
    options |= {
        "output_logits": True,
        "return_dict_in_generate": True,
        "use_cache": cache != "none",
    }
    if cache == "static":
        options["cache_implementation"] = "static"
    torch.manual_seed(3)
    result = model.generate(**given, **options)
    logits = torch.stack(list(result.logits), 1)
    return result.sequences[:, -logits.shape[1] :], logits


def same_generation(
    ours: tuple[Tensor, Tensor], eager: tuple[Tensor, Tensor], limit: float
) -> None:
    """Logits of each step, as long as the tokens before it are the same; another token only where
    two are as good as equal."""
    if eager[0].shape[0] != eager[1].shape[0]:  # a transcription, whose logits are of frames
        if not torch.equal(ours[0], eager[0]):
            raise Wrong("another transcription")
        return
    if ours[1].shape != eager[1].shape:
        raise Wrong(f"logits {list(ours[1].shape)}, want {list(eager[1].shape)}")
    top = eager[1][torch.isfinite(eager[1])].abs().max().item()
    live = torch.ones(ours[0].shape[0], dtype=torch.bool)
    for step in range(eager[1].shape[1]):
        a, b = ours[1][live, step], eager[1][live, step]
        if not len(a):
            break
        within(
            distance({"logits": a}, {"logits": b}) if a.numel() else 0.0,
            limit,
            f"step {step}: logits ",
        )
        for row in live.nonzero().flatten().tolist():
            mine, theirs = ours[0][row, step], eager[0][row, step]
            if not torch.equal(mine, theirs):
                gap = (
                    abs(float(eager[1][row, step, mine] - eager[1][row, step, theirs]))
                    if mine.dim() == 0
                    else float("inf")
                )
                if gap > 4 * limit * top:
                    raise Wrong(
                        f"step {step}: token {mine.tolist()}, want {theirs.tolist()}, "
                        f"{gap / top:.1e} apart"
                    )
                live[row] = False


def gradients(model: Any, given: Inputs) -> Found:
    """Of a random projection of what is visible, by parameter."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    result = model(**given)
    total: Any = 0
    weigh = {name: t for name, t in _floats(result).items() if t.requires_grad}
    for name, kept in visible(weigh, given).items():
        draw = torch.randn(kept.shape, generator=given_inputs.seeded(sum(map(ord, name))))
        total = total + torch.nan_to_num(kept * draw).sum()
    if not isinstance(total, Tensor):
        raise ValueError("no output has a gradient")
    total.backward()
    found = {
        name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None
    }
    model.zero_grad(set_to_none=True)
    return found


def _floats(result: Any) -> Found:
    items = (
        result.items()
        if hasattr(result, "items")
        else enumerate(result)
        if isinstance(result, (tuple, list))
        else ()
    )
    names = ("logits", "last_hidden_state", "encoder_last_hidden_state")
    named = {str(name): t for name, t in items if isinstance(t, Tensor) and t.is_floating_point()}
    return {name: t for name, t in named.items() if name in names} or named


def gradient_distance(ours: Found, eager: Found) -> float:
    """The largest difference over that parameter's largest gradient; those a thousandth of the
    largest of all count as such."""
    if ours.keys() != eager.keys():
        raise Wrong(f"parameters with a gradient differ: {sorted(ours.keys() ^ eager.keys())[:3]}")
    top = max((g.abs().max().item() for g in eager.values()), default=0.0)
    worst = 0.0
    for name, want in eager.items():
        if not torch.isfinite(want).all():
            continue
        if not torch.isfinite(ours[name]).all():
            return float("inf")
        off = (ours[name] - want).abs().max().item()
        worst = max(worst, off / max(want.abs().max().item(), 1e-3 * top, 1e-30))
    return worst


def checks_of(subject: Subject, inductor: bool = False) -> Iterator[tuple[str, Check]]:
    """Name and function of every check. A function returns, or raises: Wrong, Eager, an
    AttnopsError that refuses, or anything else."""
    model = subject.model
    yield "sensitive", partial(sensitive, subject)
    for mode in MODES:
        for kind in (kind for kind in PADDINGS if kind in subject.cases or kind in subject.failed):
            yield f"forward {kind} {mode}", partial(forward, subject, kind, mode)
    if generates(model):
        for mode in MODES:
            for cache in CACHES:
                yield f"generate {cache} {mode}", partial(generate, subject, cache, {"mask": mode})
        yield "generate paged", partial(generate, subject, "dynamic", {"cache": "paged"})
        decoder = (
            not getattr(model.config, "is_encoder_decoder", False) and "input_ids" in subject.given
        )
        if decoder and {"attention_mask", argument_of(model)} <= subject.names.keys():
            yield "steps dynamic compact", partial(steps, subject, "compact")
    trained = "left" if "left" in subject.cases else "none"
    for mode in MODES:
        yield f"gradients {mode}", partial(same_gradients, subject, trained, mode)
    for kind in ("none", "left"):
        if kind in subject.cases:
            yield f"compile aot_eager {kind}", partial(compiled, subject, kind, "aot_eager")
    if inductor:
        yield "compile inductor left", partial(compiled, subject, "left", "inductor")
    yield "copies", partial(copies, subject)
    yield "unpatch", partial(unpatched, subject)


def generates(model: Any) -> bool:
    return bool(getattr(type(model), "can_generate", lambda: False)()) and hasattr(
        model, "prepare_inputs_for_generation"
    )


def sensitive(subject: Subject) -> None:
    """Would the bound see a token that is missing? Without a mask that could hide a token, the
    check changes one input."""
    given = dict(subject.given)
    if "attention_mask" in subject.names and "input_ids" in given:
        mask = torch.ones(given["input_ids"].shape, dtype=torch.int64)
        mask[:, 2] = 0
        given["attention_mask"] = mask
    else:
        name = next(iter(given))
        given[name] = changed(given[name])
    off = subject.stock(
        "sensitive", lambda: distance(run(subject.model, given), subject.eager["none"])
    )
    if off < TEETH * subject.limit:
        raise Eager(
            f"its output changes by {off:.1e} when a token is hidden, and the bound is "
            f"{subject.limit:.1e}"
        )


def changed(value: Any) -> Any:
    """A copy of an input whose first quarter is another, that of each tensor of a list."""
    if isinstance(value, (list, tuple)):
        return type(value)(changed(one) for one in value)
    if not isinstance(value, Tensor):
        return value
    flat = value.flatten().clone()
    flat[: max(1, flat.numel() // 4)] = 0.5 if flat.is_floating_point() else 7
    return flat.view(value.shape)


def forward(subject: Subject, kind: str, mode: str) -> None:
    if kind in subject.failed:
        raise Eager(subject.failed[kind])
    with subject.patch(mask=mode):
        ours = run(subject.model, subject.cases[kind])
    subject.compare(kind, ours)


def prompt(subject: Subject) -> Inputs:
    """The inputs that generate() takes: a prompt padded on the left."""
    given = {
        name: value for name, value in subject.given.items() if not name.startswith("decoder_")
    }
    if "input_ids" in given and "attention_mask" in subject.names:
        if "pixel_values" not in given and "bbox" not in given and not subject.brought:
            given["input_ids"] = tokens(length=PROMPT)
        rows, length = given["input_ids"].shape[:2]
        given["attention_mask"] = padding("left", length, rows)
    return given


def generate(subject: Subject, cache: str, options: dict[str, Any]) -> None:
    make = partial(generation, subject.model, prompt(subject), cache)
    eager = subject.stock(f"generate {cache}", make)
    with subject.patch(**options):
        ours = make()
    subject.settle(lambda want: same_generation(ours, want, 2 * subject.limit), eager, make)


def steps(subject: Subject, mode: str) -> None:
    """Prefill, one token, two tokens, by hand, with a cache that grows."""
    from transformers import DynamicCache

    model, ids, mask = subject.model, tokens(), padding("left")
    assert mask is not None

    def by_hand() -> Found:
        cache, found = DynamicCache(config=model.config), {}
        for begin, end in ((0, 6), (6, 7), (7, 9)):
            with torch.no_grad():
                result = model(
                    ids[:, begin:end],
                    attention_mask=mask[:, :end],
                    **argument(model, cache),
                    use_cache=True,
                )
            found[f"{begin}"] = result.logits[mask[:, begin:end].bool()].clone()
        return found

    eager = subject.stock("steps", by_hand)
    with subject.patch(mask=mode):
        ours = by_hand()
    subject.settle(lambda want: within(distance(ours, want), 2 * subject.limit), eager, by_hand)


def same_gradients(subject: Subject, kind: str, mode: str) -> None:
    make = partial(gradients, subject.model, subject.cases[kind])

    def with_noise() -> tuple[Found, float]:
        eager = make()
        with nudged(subject.model, 5):
            return eager, gradient_distance(make(), eager)

    eager, noise = subject.stock("gradients", with_noise)
    limit = 4 * FLOOR + TIMES_NOISE * max(noise, subject.noise)
    with subject.patch(mask=mode):
        ours = make()
    try:
        subject.settle(
            lambda want: within(gradient_distance(ours, want), limit, "gradients "), eager, make
        )
    except Wrong as wrong:
        largest = largest_logit(subject, kind)
        if largest <= -FAINT:
            raise
        raise Eager(
            f"{wrong}, and eager's logits reach {largest:.1e}, where float32 cannot tell one "
            "from another"
        ) from None


class Logits(TorchDispatchMode):
    """Within the block `largest` is the largest argument of any softmax so far."""

    largest = 0.0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten._softmax.default and args[0].numel():
            self.largest = max(self.largest, float(args[0].max()))
        return function(*args, **(kwargs or {}))


def largest_logit(subject: Subject, kind: str) -> float:
    """Of eager. A gradient takes weights from logits and their log-sum-exp, and a weight is as far
    off as the last bit of these."""
    with Logits() as seen:
        run(subject.model, subject.cases[kind])
    return float(seen.largest)


def compiled(subject: Subject, kind: str, backend: str) -> None:
    make = partial(run_compiled, subject, kind, backend)
    try:
        with subject.patch():
            ours = make()
    except Exception:
        subject.stock(f"compile {backend} {kind}", make)
        raise
    try:
        subject.compare(kind, ours)
    except Wrong as wrong:
        as_compiled(subject, kind, backend, ours, wrong)


def run_compiled(subject: Subject, kind: str, backend: str) -> Found:
    """The outputs of the model through torch.compile."""
    torch._dynamo.reset()
    try:
        return run(
            torch.compile(subject.model, backend=backend, dynamic=False), subject.cases[kind]
        )
    finally:
        torch._dynamo.reset()


def as_compiled(subject: Subject, kind: str, backend: str, ours: Found, wrong: Wrong) -> None:
    """Raise Eager where the compiler changes transformers' unpatched model, and ours equals that
    one compiled; else `wrong`."""
    case = subject.cases[kind]
    try:
        stock = run_compiled(subject, kind, backend)
        changes = distance(visible(stock, case), visible(subject.eager[kind], case))
        off = distance(visible(ours, case), visible(stock, case))
    except Exception:
        raise wrong from None
    if not (changes > subject.limit and off <= subject.limit):
        raise wrong
    raise Eager(
        f"torch.compile changes the unpatched model by {changes:.1e}, and the bound is "
        f"{subject.limit:.1e}"
    ) from None


def copies(subject: Subject) -> None:
    """A deep copy and a pickle of a patched model answer as it does."""

    def can_be_copied() -> None:
        pickle.dumps(subject.model)
        copy.deepcopy(subject.model)

    subject.stock("copies", can_be_copied)
    with subject.patch(mask="compact"):
        want = run(subject.model, subject.given)
        for twin in (copy.deepcopy(subject.model), pickle.loads(pickle.dumps(subject.model))):
            if (off := distance(run(twin, subject.given), want)) > FLOOR:
                raise Wrong(f"a copy is off by {off:.1e}")


def unpatched(subject: Subject) -> None:
    """To the bit what it was before the first patch."""
    for kind, case in subject.cases.items():
        for name, value in run(subject.model, case).items():
            if not torch.equal(
                torch.nan_to_num(value), torch.nan_to_num(subject.eager[kind][name])
            ):
                raise Wrong(f"{name} ({kind}) is not what it was before patch()")
    left = [name for name in vars(subject.model) if "attnops" in name]
    names = implementations(subject.model)
    if left or names != subject.implementations:
        raise Wrong(f"left behind: {left}, {sorted(set(names.values()))}")


def implementations(model: Any) -> dict[str, str]:
    """The implementation of attention of each module that has a config, by path."""
    found = {
        path: getattr(getattr(module, "config", None), "_attn_implementation", None)
        for path, module in model.named_modules()
    }
    return {path: name for path, name in found.items() if name is not None}


def patches(model: Any, part: str = "") -> dict[str, Any]:
    """What patch() says of the model: how many modules are patched, and why others are not. Raises
    PatchError.

    part: the path of a module, "" for all of the model. Of a part without attention this raises
    PatchError, too.
    """
    before = implementations(model)
    with attnops.patch(model) as handle:
        rows = [
            row
            for row in handle.report().rows
            if f"{row.path}.".startswith(f"{part}." if part else "")
        ]
    if implementations(model) != before:
        raise Wrong(f"unpatch() leaves {sorted(set(implementations(model).values()))}")
    patched = [row for row in rows if row.status == "patched"]
    reasons = sorted({row.status.removeprefix("skipped: ") for row in rows if row not in patched})
    if part and not patched:
        why = "; ".join(reasons) or "it has no attention module"
        raise PatchError(
            f"patch: nothing to patch in {type(model.get_submodule(part)).__name__}: {why}"
        )
    return {"patched": len(patched), "modules": len(rows), "skipped": reasons}


def quiet() -> None:
    """No warnings of transformers and torch: a model that is made small triggers hundreds."""
    import transformers

    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
