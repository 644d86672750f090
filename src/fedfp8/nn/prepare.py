"""Turn a float model into its FP8-trained twin, in place, in one call.

`prepare` changes the class of every ``nn.Linear``, ``nn.Conv1d``, ``nn.Conv2d`` and `MatMul` it finds to
its FP8 twin. Parameters stay the same objects under the same names, so optimizers, checkpoints and tied
weights go on working; each layer gains its ranges (``alpha``, ``beta``) as parameters of their own.

Exact types only. A subclass may use its weight in a way the twin would not honour, so it is left in float
and counted. Fused modules that read the weights of their children directly (``nn.MultiheadAttention``, the
eval fast path of ``nn.TransformerEncoderLayer``) would be half converted without anyone noticing, so they
are refused.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import UninitializedParameter

from fedfp8.errors import QuantizationError
from fedfp8.fp8 import E4M3, Format
from fedfp8.modules import MatMul
from fedfp8.nn.layers import (
    FP8Layer,
    QuantConv1d,
    QuantConv2d,
    QuantLinear,
    QuantMatMul,
    WeightedLayer,
    initial_alpha,
)

__all__ = ["Skip", "parameter_groups", "prepare", "report", "set_rounding"]

Skip = str | type[nn.Module] | Callable[[str, nn.Module], bool]

TWINS: dict[type[nn.Module], type[FP8Layer]] = {
    nn.Linear: QuantLinear,
    nn.Conv1d: QuantConv1d,
    nn.Conv2d: QuantConv2d,
    MatMul: QuantMatMul,
}
FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
LAYERS = (
    nn.Linear,
    _ConvNd,
    nn.Bilinear,
    nn.Embedding,
    nn.EmbeddingBag,
    nn.RNNBase,
    nn.MultiheadAttention,
    MatMul,
)
ROUNDINGS = ("nearest", "stochastic", "off")

logger = logging.getLogger("fedfp8")


def prepare(
    model: nn.Module,
    format: Format = E4M3,
    *,
    skip: Skip | Iterable[Skip] = (),
    rounding: str = "nearest",
    input_range: float | None = None,
) -> nn.Module:
    """Give every Linear, Conv and MatMul of `model` FP8 operands with learnable ranges; returns the model.

    skip: layers (with all they contain) to leave in float, each a name pattern (``"head"``,
    ``"blocks.*.out"``), a module type, or a predicate ``(name, module) -> bool``. rounding: of the training
    forward, ``"nearest"``, ``"stochastic"`` or ``"off"``; see `set_rounding`. input_range: the largest
    magnitude of the data after its transform, taken as the range of the first layer's input; None takes it
    from the first batch.

    `report(model)` says what was swapped and what was left; it is also logged at INFO level. Nothing is
    changed if the call raises.
    """
    _check_rounding(rounding)
    if input_range is not None and not 0 < input_range < float("inf"):
        raise QuantizationError(
            f"input_range is {input_range}; it must be positive and finite: the largest |x| of the data"
        )
    if isinstance(skip, str | type) or callable(skip):
        skip = (skip,)
    chosen = _choose(model, tuple(skip))
    alphas = {id(w): _alpha(name, w) for name, layer in chosen if (w := _weight(layer)) is not None}
    device = next((p.device for p in model.parameters()), None)
    for name, layer in chosen:
        alpha = alphas.get(id(_weight(layer)))
        layer.__class__ = TWINS[type(layer)]
        layer.format, layer.rounding, layer.path = format, rounding, name
        for range_name in layer.range_names:
            initial = torch.tensor(
                layer.initial_range(range_name), device=alpha.device if alpha is not None else device
            )
            beta = nn.Parameter(initial)
            layer.register_parameter(range_name, alpha if range_name == "alpha" else beta)
    first = next((layer for _, layer in chosen if isinstance(layer, WeightedLayer)), None)
    if first is not None and input_range is not None:
        first.beta.data.fill_(input_range)  # type: ignore[operator]
    logger.info(report(model))
    return model


def _choose(model: nn.Module, skip: tuple[Skip, ...]) -> list[tuple[str, Any]]:
    """The layers to swap, in the order of the model; raises before anything is changed."""
    chosen: list[tuple[str, nn.Module]] = []
    used: set[Any] = set()
    for name, module in _walk(model, skip, used):
        if isinstance(module, FP8Layer):
            raise QuantizationError(
                f"the model is already prepared ({name or 'the model itself'} is a {type(module).__name__}); "
                "prepare it once, and use set_rounding to change how it rounds"
            )
        if isinstance(module, FUSED):
            raise QuantizationError(
                f"{name or 'the model'} is an nn.{type(module).__name__}, which reads its weights past its layers "
                f"and would be half quantized; leave it in float with skip=nn.{type(module).__name__}, or build "
                "attention from nn.Linear and fedfp8.modules.MatMul as fedfp8.models.kwt1 does"
            )
        if type(module) in TWINS and (type(module) is MatMul or "weight" in module._parameters):
            chosen.append((name, module))
    if unused := [s for s in skip if isinstance(s, str) and s not in used]:
        names = ", ".join(n for n, _ in model.named_modules() if n)
        raise QuantizationError(f"skip pattern {unused[0]!r} matches no module; the model has: {names or '(itself)'}")
    if not chosen:
        raise QuantizationError(
            "nothing to prepare: no nn.Linear, nn.Conv1d, nn.Conv2d or MatMul of exactly that type is left "
            f"(skip={list(skip)!r}); subclasses are not swapped"
        )
    return chosen


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


def _weight(layer: nn.Module) -> nn.Parameter | None:
    return layer._parameters.get("weight")


def _alpha(name: str, weight: nn.Parameter) -> nn.Parameter:
    """The range of a weight. Tied weights share it: one tensor, one grid, sent once."""
    if isinstance(weight, UninitializedParameter):
        raise QuantizationError(f"{name}.weight has no shape yet; run one batch through the model, then prepare it")
    if weight.dtype != torch.float32:
        raise QuantizationError(
            f"{name}.weight is {weight.dtype}; FP8 training keeps float32 master weights: model.float()"
        )
    return nn.Parameter(initial_alpha(weight, name))


def report(model: nn.Module) -> str:
    """What `prepare` swapped and what stays in float, in one line."""
    swapped = [m for m in model.modules() if isinstance(m, FP8Layer)]
    left = [n for n, m in model.named_modules() if isinstance(m, LAYERS) and not isinstance(m, FP8Layer)]
    weights = {id(w): w.numel() for m in swapped if (w := _weight(m)) is not None}
    formats = "/".join(sorted({m.format.name for m in swapped})) or "FP8"
    text = f"{formats}: {len(swapped)} layers swapped ({sum(weights.values()):,} weights), {len(left)} skipped"
    return text + (f": {', '.join(left[:8])}{', ...' if len(left) > 8 else ''}" if left else "")


def set_rounding(model: nn.Module, rounding: str, seed: int = 0) -> None:
    """Change how the training forward rounds: ``"nearest"`` (the method), ``"stochastic"``, or ``"off"``
    (float).

    Stochastic rounding draws from `seed`, the layer's name and the number of training forwards since this
    call: the same seed gives the same run; give each client and round its own. Eval mode rounds to nearest.
    """
    _check_rounding(rounding)
    layers = [m for m in model.modules() if isinstance(m, FP8Layer)]
    if not layers:
        raise QuantizationError("the model is not prepared, so it has no rounding to set; call prepare(model) first")
    for layer in layers:
        layer.rounding, layer.seed, layer.calls = rounding, int(seed), 0


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
