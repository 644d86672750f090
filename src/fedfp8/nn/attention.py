"""``nn.MultiheadAttention`` in FP8, and torch's transformer layers kept off the path that reads past their layers.

torch computes attention in one fused function on the module's raw weights. The twin computes the same, step by step, so
that every product has rounded operands: the projections of query, key and value, q·k, weights·v, and ``out_proj``, a
layer of its own. In eval mode ``nn.TransformerEncoderLayer`` and ``nn.TransformerEncoder`` may hand the weights of
their children to a fused kernel; the unfused twins do not, and are otherwise what they were.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fedfp8.nn.layers import FP8Layer, WeightedLayer
from fedfp8.nn.operand import compute

__all__ = ["QuantMultiheadAttention", "QuantOutProjection", "UnfusedEncoder", "UnfusedEncoderLayer"]


class QuantOutProjection(WeightedLayer, NonDynamicallyQuantizableLinear):
    """The ``out_proj`` of an attention module: a Linear under another name."""

    def _operate(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight, self.bias)


class QuantMultiheadAttention(FP8Layer, nn.MultiheadAttention):
    """Ranges: `alpha` of the packed weight (or one each of three weights); `beta_query`, `beta_key`, `beta_value` of
    the inputs (in self-attention only the first is used); `beta_q`, `beta_k`, `beta_weights`, `beta_v` of the products.
    """

    @property
    def weight_names(self) -> dict[str, str]:  # type: ignore[override]
        if self._qkv_same_embed_dim:
            return {"alpha": "in_proj_weight"}
        return {f"alpha_{x}": f"{x}_proj_weight" for x in "qkv"}

    @property
    def range_names(self) -> tuple[str, ...]:  # type: ignore[override]
        inputs = ("beta_query", "beta_key", "beta_value")
        return (*self.weight_names, *inputs, "beta_q", "beta_k", "beta_weights", "beta_v")

    def initial_range(self, name: str) -> float:
        """A softmax ends at 1, and dropout divides what it keeps by 1 - p."""
        return 1 / (1 - self.dropout) if name == "beta_weights" and self.dropout < 1 else 0.0

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        rest = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
        if self._off():
            return super().forward(query, key, value, *rest)
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal=True is only a hint about attn_mask: give the mask too")
        q, k, v = (self._batch_first(x, query.dim() == 3) for x in self._project(query, key, value))
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (torch.cat([x, b.expand(len(x), 1, -1)], 1) for x, b in ((k, self.bias_k), (v, self.bias_v)))
        if self.add_zero_attn:
            k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (q, k, v))

        scores = compute(torch.matmul, self._operand(q, "beta_q"), self._operand(k.transpose(-2, -1), "beta_k"))
        scores = scores / math.sqrt(q.shape[-1])
        for mask in (attn_mask, key_padding_mask):
            if mask is not None:
                scores = scores + self._additive(mask, scores, of_keys=mask is key_padding_mask)
        weights = F.dropout(scores.softmax(-1), self.dropout, self.training)
        mixed = compute(torch.matmul, self._operand(weights, "beta_weights"), self._operand(v, "beta_v"))

        out = self.out_proj(self._batch_first(mixed.transpose(1, 2).flatten(-2), query.dim() == 3))
        if query.dim() == 2:
            out, weights = out.squeeze(0), weights.squeeze(0)
        if not need_weights:
            return out, None
        return out, weights.mean(-3) if average_attn_weights else weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """q, k and v; an input that is used twice is rounded once, with the range of its first use."""
        inputs, names, at = [query], ["beta_query"], [0]
        for x, name in ((key, "beta_key"), (value, "beta_value")):
            same = [i for i, other in enumerate(inputs) if other is x]
            at += same or [len(inputs)]
            if not same:
                inputs.append(x)
                names.append(name)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)

        def operate(*rounded: Tensor) -> tuple[Tensor, ...]:
            xs, weights = rounded[: len(inputs)], rounded[len(inputs) :]
            if len(xs) == len(weights) == 1:
                return F.linear(xs[0], weights[0], self.in_proj_bias).chunk(3, -1)
            if len(weights) == 1:
                weights = weights[0].chunk(3)
            return tuple(F.linear(xs[i], w, b) for i, w, b in zip(at, weights, biases, strict=True))

        operands = [self._operand(x, name) for x, name in zip(inputs, names, strict=True)]
        return compute(operate, *operands, *(self._operand(w, name) for name, w in self.weights().items()))

    def _batch_first(self, x: Tensor, batched: bool) -> Tensor:
        """From the module's layout to (batch, tokens, features), or back."""
        if not batched:
            return x if x.dim() == 3 else x.unsqueeze(0)
        return x if self.batch_first else x.transpose(0, 1)

    def _additive(self, mask: Tensor, scores: Tensor, of_keys: bool) -> Tensor:
        """A mask as numbers to add to scores (batch, heads, queries, keys); True hides, as in torch."""
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=scores.dtype).masked_fill_(mask, -math.inf)
        mask = F.pad(mask, (0, scores.shape[-1] - mask.shape[-1]))  # what bias_k and add_zero_attn added is visible
        if of_keys:
            return mask.view(-1, 1, 1, mask.shape[-1])
        return mask if mask.dim() == 2 else mask.view(-1, self.num_heads, *mask.shape[1:])


class UnfusedEncoderLayer(nn.TransformerEncoderLayer):
    """The attribute that torch asks before it takes the fused path; the original value stays in ``__dict__``."""

    activation_relu_or_gelu: Any = property(lambda self: 0, lambda self, value: None)


class UnfusedEncoder(nn.TransformerEncoder):
    use_nested_tensor: Any = property(lambda self: False, lambda self, value: None)
