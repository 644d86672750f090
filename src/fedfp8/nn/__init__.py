"""FP8 training of any model: `prepare` it, train as before. The only package that knows torch's layers."""

from fedfp8.nn.convert import float_state_dict, layout_of, load_state, state_of
from fedfp8.nn.layers import FP8Layer, QuantConv1d, QuantConv2d, QuantLinear, QuantMatMul
from fedfp8.nn.preparation import parameter_groups, prepare, report, restore, set_rounding

__all__ = [
    "FP8Layer",
    "QuantConv1d",
    "QuantConv2d",
    "QuantLinear",
    "QuantMatMul",
    "float_state_dict",
    "layout_of",
    "load_state",
    "parameter_groups",
    "prepare",
    "report",
    "restore",
    "set_rounding",
    "state_of",
]
