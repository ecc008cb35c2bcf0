"""Matrix products in bfloat16 whose rows do not depend on how many rows there are.

The processor's library picks another kernel, and with it another order of summation, when a product has few rows or a
long inner dimension. Both are kept from happening: rows are run in pieces of 64 to 256, and an inner dimension is split
until, on this machine, every number of rows in that range gives the same bits. That is tried out once for each shape.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import nn

# Rows of one product. Fewer than the least take other kernels; more than the most fall out of the cache.
LEAST_ROWS, MOST_ROWS = 64, 256
_TRIED_ROWS = (64, 77, 96, 113, 128, 145, 160, 191, 207, 224, 243, 256)
_SPLITS = (1, 2, 4, 8)


def pieces(rows: int) -> Iterator[slice]:
    """Cut rows into as few near-equal pieces of at most MOST_ROWS as there can be."""
    count = -(-rows // MOST_ROWS)
    for piece in range(count):
        yield slice(piece * rows // count, (piece + 1) * rows // count)


class Product(nn.Module):
    """One product that stands for linear layers with the same input, their outputs side by side. bfloat16 in and out.

    Raises TypeError for a layer that is not exactly linear.
    """

    def __init__(self, *linears: Any) -> None:
        super().__init__()
        if any(type(linear) is not nn.Linear for linear in linears):
            raise TypeError("expected linear layers")
        weight = torch.cat([linear.weight.detach() for linear in linears]).bfloat16()
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        self.bias = torch.cat(biases).bfloat16() if biases else None
        self.weights = _laid_out(weight, _splits(*weight.shape, torch.get_num_threads()))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """`[rows, inner]` -> `[rows, outer]`."""
        first, *others = zip(states.chunk(len(self.weights), dim=1), self.weights, strict=True)
        output = _pointwise(*first, self.bias, "none", [])
        for part, weight in others:
            output = _binary(part, output, weight, None, "add")
        return output

    def silu(self, states: torch.Tensor) -> torch.Tensor:
        """SiLU of the product, applied before it is rounded and written where the product is a single one."""
        if len(self.weights) > 1:
            return F.silu(self.forward(states), inplace=True)
        return _pointwise(states, self.weights[0], self.bias, "swish", [1.0])

    def times(self, states: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """The product times `other`, element by element, likewise."""
        if len(self.weights) > 1:
            return self.forward(states).mul_(other)
        return _binary(states, other, self.weights[0], self.bias, "mul")


def _laid_out(weight: torch.Tensor, splits: int) -> list[torch.Tensor]:
    """The weight in the layout of the matrix unit, its inner dimension split."""
    return [
        torch.ops.mkldnn._reorder_linear_weight(part.contiguous(), MOST_ROWS) for part in weight.chunk(splits, dim=1)
    ]


@cache
def _splits(outer: int, inner: int, threads: int) -> int:
    """The fewest parts of the inner dimension with which every number of rows gives the same bits.

    `threads` is part of the key: the library cuts the work differently for another number. If nothing helps the product
    stays whole, and the certificate will say `close` instead of `exact`.
    """
    random = torch.Generator().manual_seed(1)
    states = torch.randn(MOST_ROWS, inner, generator=random).bfloat16()
    weight = torch.randn(outer, inner, generator=random).bfloat16()
    for splits in _SPLITS:
        if inner % (32 * splits) == 0 and _same_for_all_rows(states, weight, splits):
            return splits
    return 1


def _same_for_all_rows(states: torch.Tensor, weight: torch.Tensor, splits: int) -> bool:
    weights = _laid_out(weight, splits)
    parts = states.chunk(splits, dim=1)
    for part, laid_out in zip(parts, weights, strict=True):
        whole = _pointwise(part, laid_out, None, "none", [])
        for rows in _TRIED_ROWS:
            few = part[MOST_ROWS - rows :]
            if not torch.equal(_pointwise(few, laid_out, None, "none", []), whole[MOST_ROWS - rows :]):
                return False
    return True


def _pointwise(
    states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str, scalars: list[float]
) -> torch.Tensor:
    output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(states, weight, bias, activation, scalars, "")
    return output


def _binary(
    states: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, operation: str
) -> torch.Tensor:
    output: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(states, other, weight, bias, operation)
    return output
