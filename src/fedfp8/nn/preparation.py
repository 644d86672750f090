"""Turn a float model into its FP8-trained twin, in place, in one call; and back.

`prepare` changes the class of every layer it knows (`TWINS`) to its FP8 twin. Parameters stay the same objects under
the same names, so optimizers, checkpoints and tied weights go on working; each layer gains its ranges (``alpha``,
``beta``) as parameters of their own. `restore` changes the classes back and takes the ranges away.

Exact types only. A subclass may use its weight in a way the twin would not honour, so it is left in float and reported.
A subclass of a module that reads the weights of its children directly (``nn.MultiheadAttention``,
``nn.TransformerEncoderLayer``) would be half converted without anyone noticing, so it is refused.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import UninitializedParameter

from fedfp8.errors import QuantizationError
from fedfp8.fp8 import E4M3, Format, quantize
from fedfp8.modules import MatMul
from fedfp8.nn import layers, native
from fedfp8.nn.attention import QuantMultiheadAttention, QuantOutProjection, UnfusedEncoder, UnfusedEncoderLayer
from fedfp8.nn.layers import FP8Layer, WeightedLayer, initial_alpha

__all__ = ["Skip", "parameter_groups", "prepare", "report", "restore", "set_rounding"]

Skip = str | type[nn.Module] | Callable[[str, nn.Module], bool]

TWINS: dict[type[nn.Module], type[FP8Layer]] = {
    nn.Linear: layers.QuantLinear,
    nn.Conv1d: layers.QuantConv1d,
    nn.Conv2d: layers.QuantConv2d,
    nn.Conv3d: layers.QuantConv3d,
    nn.ConvTranspose1d: layers.QuantConvTranspose1d,
    nn.ConvTranspose2d: layers.QuantConvTranspose2d,
    nn.ConvTranspose3d: layers.QuantConvTranspose3d,
    nn.MultiheadAttention: QuantMultiheadAttention,
    NonDynamicallyQuantizableLinear: QuantOutProjection,
    MatMul: layers.QuantMatMul,
}
UNFUSED: dict[type[nn.Module], type[nn.Module]] = {
    nn.TransformerEncoderLayer: UnfusedEncoderLayer,
    nn.TransformerEncoder: UnfusedEncoder,
}
PLAIN = {twin: plain for plain, twin in (TWINS | UNFUSED).items()}
FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
WITH_WEIGHTS = (
    nn.Linear,
    _ConvNd,
    nn.Bilinear,
    nn.Embedding,
    nn.EmbeddingBag,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MultiheadAttention,
    MatMul,
)  # what `report` lists as left in float
SETTINGS = ("format", "rounding", "ranges_are", "path", "seed", "calls", "native")  # what a twin has beside its ranges
ROUNDINGS = ("nearest", "stochastic", "off")
RANGES = ("learned", "largest")

logger = logging.getLogger("fedfp8")


def prepare(
    model: nn.Module,
    format: Format | str = E4M3,
    *,
    skip: Skip | Iterable[Skip] = (),
    rounding: str = "nearest",
    ranges: str = "learned",
    input_range: float | None = None,
    compute: str = "emulated",
) -> nn.Module:
    """Give the Linear, Conv, ConvTranspose, MultiheadAttention and MatMul layers of `model` FP8 operands with learnable
    ranges; returns the model.

    format: a `Format` or its name, ``"E5M2"``. skip: layers (with all they contain) to leave in float, each a name
    pattern (``"head"``, ``"blocks.*.out"``), a module type, or a predicate ``(name, module) -> bool``. rounding: of the
    training forward, ``"nearest"``, ``"stochastic"`` or ``"off"``; see `set_rounding`. ranges: ``"learned"``, as in the
    paper, or ``"largest"``: of a weight its largest magnitude at any time, of an input that of each training batch, so
    that nothing is clipped and training goes as in float; worth a try with Adam. input_range: the largest magnitude of
    the data after its transform, taken as the range of the first layer's input; None takes it from the first batch.
    compute: ``"emulated"``, FP8 values in float32 arithmetic, or ``"native"``: Linear layers and convolutions of size 1
    run on FP8 hardware (`fedfp8.nn.native`); E4M3 and nearest rounding only.

    `report(model)` says what was swapped and what was left; it is also logged at INFO level. Nothing is
    changed if the call raises.
    """
    format = _check_format(format)
    _check_rounding(rounding)
    if ranges not in RANGES:
        raise QuantizationError(f"ranges is {ranges!r}; choose one of {', '.join(RANGES)}")
    if input_range is not None and not 0 < input_range < float("inf"):
        raise QuantizationError(
            f"input_range is {input_range}; it must be positive and finite: the largest |x| of the data"
        )
    if isinstance(skip, str | type) or callable(skip):
        skip = (skip,)
    chosen, fused = _choose(model, tuple(skip))
    _check_compute(compute, format, rounding, chosen)
    alphas = {id(w): _alpha(name, key, w) for name, layer in chosen for key, w in _weights(layer).items()}
    device = next((p.device for p in model.parameters()), None)
    for module in fused:
        module.__class__ = UNFUSED[type(module)]
    for name, layer in chosen:
        layer.__class__ = TWINS[type(layer)]
        layer.format, layer.rounding, layer.path, layer.ranges_are = format, rounding, name, ranges
        own = {range_name: alphas[id(weight)] for range_name, weight in layer.weights().items()}
        place = next((alpha.device for alpha in own.values()), device)
        for range_name in layer.range_names:
            of_input = nn.Parameter(torch.tensor(layer.initial_range(range_name), device=place))
            layer.register_parameter(range_name, own.get(range_name, of_input))
    weighted = [layer for _, layer in chosen if isinstance(layer, WeightedLayer)]
    for layer in weighted:
        layer.native = compute == "native" and layer.is_product()
    first = next(iter(weighted), None)
    if first is not None and input_range is not None:
        first.beta.data.fill_(input_range)  # type: ignore[operator]
    logger.info(report(model))
    return model


def restore(model: nn.Module, *, rounded: bool = False) -> nn.Module:
    """The inverse of `prepare`, in place: the layers' own classes again, without ranges; returns the model.

    The trained weights stay as they are, or, with `rounded`, become the FP8 values that the forward pass has used.
    Inputs are not rounded any more. A model that was never prepared is returned as it is; there is nothing to round it
    with, so `rounded` is refused.
    """
    found = [m for m in model.modules() if isinstance(m, FP8Layer)]
    if rounded and not found:
        raise QuantizationError(
            "the model is not prepared, so there are no ranges to round it with: call prepare first"
        )
    if rounded:
        for layer in found:
            layer.settle_ranges()
        values = {w: (w, getattr(m, r), m.format) for m in found for r, w in m.weights().items()}
        rounded_values = [(w, quantize(w, alpha, format)) for w, alpha, format in values.values()]
        for weight, value in rounded_values:
            weight.data.copy_(value)
    for layer in found:
        for range_name in layer.range_names:
            del layer._parameters[range_name]
    for module in list(model.modules()):
        if type(module) in PLAIN:
            module.__class__ = PLAIN[type(module)]
            for attribute in SETTINGS:
                module.__dict__.pop(attribute, None)
    return model


def _choose(model: nn.Module, skip: tuple[Skip, ...]) -> tuple[list[tuple[str, Any]], list[nn.Module]]:
    """The layers to swap, in the order of the model, and the modules to unfuse; raises before anything is changed."""
    chosen: list[tuple[str, nn.Module]] = []
    fused: list[nn.Module] = []
    used: set[Any] = set()
    for name, module in _walk(model, skip, used):
        if isinstance(module, FP8Layer):
            raise QuantizationError(
                f"the model is already prepared ({name or 'the model itself'} is a {type(module).__name__}); "
                "prepare it once, and use set_rounding to change how it rounds"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise QuantizationError(
                f"{name or 'the model'} is TorchScript, whose layers cannot be swapped; give the nn.Module that it was "
                "made from"
            )
        if type(module) in UNFUSED:
            fused.append(module)
        elif type(module) in TWINS and (type(module) is MatMul or _weights(module)):
            own = (*vars(module), *module._parameters, *module._buffers, *module._modules)
            if taken := [n for n in own if n in SETTINGS or n.split("_")[0] in ("alpha", "beta")]:
                raise QuantizationError(
                    f"{name or 'the model'} has an attribute {taken[0]!r}, a name that its FP8 twin uses; rename it, "
                    f"or leave the layer in float with skip={name!r}"
                )
            chosen.append((name, module))
        elif isinstance(module, FUSED):
            base = next(f.__name__ for f in FUSED if isinstance(module, f))
            raise QuantizationError(
                f"{name or 'the model'} is a {type(module).__name__}, a subclass of nn.{base}, which reads its weights "
                f"past its layers and would be half quantized; leave it in float with skip={type(module).__name__}"
            )
    if unused := [s for s in skip if isinstance(s, str) and s not in used]:
        names = ", ".join(n for n, _ in model.named_modules() if n)
        raise QuantizationError(f"skip pattern {unused[0]!r} matches no module; the model has: {names or '(itself)'}")
    if not chosen:
        raise QuantizationError(
            f"nothing to prepare: no {', '.join(plain.__name__ for plain in TWINS)} of exactly that type is left "
            f"(skip={list(skip)!r}); subclasses are not swapped"
        )
    return chosen, fused


def _walk(
    module: nn.Module, skip: tuple[Skip, ...], used: set[Any], name: str = "", seen: set[int] | None = None
) -> Iterator[tuple[str, nn.Module]]:
    """Every module once, depth first; a skipped one takes its children with it."""
    seen = set() if seen is None else seen
    matches = [s for s in skip if _matches(s, name, module)]
    used.update(s for s in matches if isinstance(s, str))
    if matches or id(module) in seen:
        return
    seen.add(id(module))
    yield name, module
    for child_name, child in module.named_children():
        yield from _walk(child, skip, used, f"{name}.{child_name}" if name else child_name, seen)


def _matches(skip: Skip, name: str, module: nn.Module) -> bool:
    if isinstance(skip, str):
        return fnmatchcase(name, skip)
    if isinstance(skip, type):
        return isinstance(module, skip)
    if callable(skip):
        return bool(skip(name, module))
    raise QuantizationError(
        f"skip holds {skip!r}; give name patterns, module types or predicates (name, module) -> bool"
    )


def _weights(layer: nn.Module) -> dict[str, nn.Parameter]:
    """The weights that are rounded, or would be."""
    names = ["weight"]
    if isinstance(layer, nn.MultiheadAttention):
        names = ["in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"]
    return {name: w for name in names if (w := layer._parameters.get(name)) is not None}


def _alpha(layer: str, key: str, weight: nn.Parameter) -> nn.Parameter:
    """The range of a weight. Tied weights share it: one tensor, one grid, sent once."""
    name = f"{layer}.{key}" if layer else key
    if isinstance(weight, UninitializedParameter):
        raise QuantizationError(f"{name} has no shape yet; run one batch through the model, then prepare it")
    if weight.dtype != torch.float32:
        raise QuantizationError(f"{name} is {weight.dtype}; FP8 training keeps float32 master weights: model.float()")
    return nn.Parameter(initial_alpha(weight, layer))


def report(model: nn.Module) -> str:
    """What `prepare` swapped and which layers with weights stay in float, in one line."""
    swapped = [m for m in model.modules() if isinstance(m, FP8Layer)]
    left: list[tuple[str, str]] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer, _ in left[-1:])
        if isinstance(module, WITH_WEIGHTS) and not isinstance(module, FP8Layer) and not inside:
            left.append((name, type(module).__name__))
    weights = {id(w): w.numel() for m in swapped for w in _weights(m).values()}
    formats = "/".join(sorted({m.format.name for m in swapped})) or "FP8"
    text = f"{formats}: {len(swapped)} layers swapped ({sum(weights.values()):,} weights)"
    if on_hardware := sum(getattr(m, "native", False) for m in swapped):
        text += f", {on_hardware} of them on FP8 hardware"
    shown = [f"{name} ({kind})" for name, kind in left[:8]] + ["..."] * (len(left) > 8)
    return f"{text}, {len(left)} in float" + (f": {', '.join(shown)}" if left else "")


def set_rounding(model: nn.Module, rounding: str, seed: int = 0) -> None:
    """Change how the training forward rounds: ``"nearest"`` (the method), ``"stochastic"``, or ``"off"``
    (float).

    Stochastic rounding draws from `seed`, the layer's name and the number of training forwards since this
    call: the same seed gives the same run; give each client and round its own. Eval mode rounds to nearest.
    """
    _check_rounding(rounding)
    found = [m for m in model.modules() if isinstance(m, FP8Layer)]
    if not found:
        raise QuantizationError("the model is not prepared, so it has no rounding to set; call prepare(model) first")
    if rounding == "stochastic" and any(getattr(layer, "native", False) for layer in found):
        raise QuantizationError(NEAREST_ONLY)
    for layer in found:
        layer.rounding, layer.seed, layer.calls = rounding, int(seed), 0


def _check_format(format: Format | str) -> Format:
    if isinstance(format, Format):
        return format
    if isinstance(format, str):
        try:
            return Format.parse(format)
        except ValueError as error:
            raise QuantizationError(str(error)) from None
    raise QuantizationError(f"format is {format!r}; give a Format or its name, for example fedfp8.E5M2 or 'E5M2'")


NEAREST_ONLY = 'compute="native" rounds to nearest only; use compute="emulated" for stochastic rounding'


def _check_compute(compute: str, format: Format, rounding: str, chosen: list[tuple[str, Any]]) -> None:
    if compute not in ("emulated", "native"):
        raise QuantizationError(f"compute is {compute!r}; choose 'emulated' or 'native'")
    if compute == "native":
        if format != E4M3:
            raise QuantizationError(f'compute="native" knows E4M3 only, not {format.name}; use compute="emulated"')
        if rounding == "stochastic":
            raise QuantizationError(NEAREST_ONLY)
        for device in {w.device for _, layer in chosen for w in _weights(layer).values()}:
            native.check(device)


def _check_rounding(rounding: str) -> None:
    if rounding not in ROUNDINGS:
        raise QuantizationError(f"rounding {rounding!r}; choose one of {', '.join(ROUNDINGS)}")


def parameter_groups(
    model: nn.Module, *, lr: float, weight_decay: float = 0.0, range_lr: float | None = None
) -> list[dict[str, Any]]:
    """Optimizer groups: everything else, then the ranges without weight decay and at `range_lr` (default
    `lr`).

    Decay pulls a range towards zero, where it clips; it has nothing to regularise there. A float model
    gives one group.
    """
    ranges = {id(r): r for m in model.modules() if isinstance(m, FP8Layer) for r in m.ranges().values()}
    others = [p for p in model.parameters() if id(p) not in ranges]
    groups: list[dict[str, Any]] = [{"params": others, "lr": lr, "weight_decay": weight_decay}]
    if ranges:
        groups.append(
            {"params": list(ranges.values()), "lr": lr if range_lr is None else range_lr, "weight_decay": 0.0}
        )
    return groups
