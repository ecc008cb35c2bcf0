"""Products in bfloat16: a row's result does not depend on how many rows there are, and is the right one."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from worker.engine import product
from worker.engine.product import LEAST_ROWS, MOST_ROWS, Product, pieces

# outer, inner: square, tall, wide, a long inner dimension, one that no split divides.
SHAPES = [(64, 64), (576, 576), (192, 576), (1536, 576), (576, 1536), (896, 4864), (48, 100)]
ROWS = [64, 65, 79, 100, 128, 129, 200, 255, 256]


def linear(outer: int, inner: int, *, bias: bool = True) -> nn.Linear:
    """A linear layer with the same weights each time."""
    torch.manual_seed(outer + inner)
    return nn.Linear(inner, outer, bias=bias).requires_grad_(False)


def rows_of(inner: int) -> torch.Tensor:
    """As many rows as a product takes."""
    return torch.randn(MOST_ROWS, inner, generator=torch.Generator().manual_seed(2)).bfloat16()


def knows_its_rows(inner: int, outer: int) -> bool:
    """Whether a way to split was found on this machine with which the number of rows makes no difference."""
    splits = product._splits(outer, inner, torch.get_num_threads())
    return product._same_for_all_rows(rows_of(inner), linear(outer, inner).weight.bfloat16(), splits)


@pytest.mark.parametrize(("outer", "inner"), SHAPES)
def test_rows_do_not_depend_on_how_many_there_are(outer: int, inner: int) -> None:
    """From the least to the most rows, each row's result has the same bits, wherever in the product it stands.

    Where this machine has no such kernels, the certificate must say `close`, and there is nothing to test.
    """
    if not knows_its_rows(inner, outer):
        pytest.skip("this machine's kernels differ by the number of rows; the certificate says so")
    layer, states = Product(linear(outer, inner)), rows_of(inner)
    with torch.inference_mode():
        whole = layer(states)
        for rows in ROWS:
            assert torch.equal(layer(states[:rows]), whole[:rows])
            assert torch.equal(layer(states[-rows:]), whole[-rows:])


@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_a_product_is_the_linear_layer(monkeypatch: pytest.MonkeyPatch, splits: int, *, bias: bool) -> None:
    """Whole or split, alone or side by side, with a bias or without, it is F.linear up to bfloat16's rounding."""
    monkeypatch.setattr(product, "_splits", lambda *_: splits)
    one, other = linear(96, 256, bias=bias), linear(32, 256, bias=bias)
    states = rows_of(256)
    with torch.inference_mode():
        both = Product(one, other)
        assert len(both.weights) == splits
        expected = torch.cat([F.linear(states.float(), layer.weight, layer.bias) for layer in (one, other)], dim=1)
        torch.testing.assert_close(both(states).float(), expected, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("splits", [1, 2, 4])
def test_activation_and_multiplication_inside_are_those_outside(monkeypatch: pytest.MonkeyPatch, splits: int) -> None:
    """`silu` and `times` give what the operations give one after another, split or not."""
    monkeypatch.setattr(product, "_splits", lambda *_: splits)
    layer, states = linear(128, 256), rows_of(256)
    gate = torch.randn(MOST_ROWS, 128, generator=torch.Generator().manual_seed(3)).bfloat16()
    with torch.inference_mode():
        fused, plain = Product(layer), F.linear(states.float(), layer.weight, layer.bias)
        torch.testing.assert_close(fused.silu(states).float(), F.silu(plain), atol=0.02, rtol=0.02)
        torch.testing.assert_close(fused.times(states, gate).float(), plain * gate.float(), atol=0.03, rtol=0.03)


@given(st.integers(0, 5000))
def test_pieces_cover_all_rows_once(rows: int) -> None:
    """Pieces follow each other without gap or overlap; none is over the most, nor under the least if it can be."""
    cut = list(pieces(rows))
    sizes = [piece.stop - piece.start for piece in cut]
    assert sum(sizes) == rows
    assert [piece.start for piece in cut] == [0, *(piece.stop for piece in cut)][: len(cut)]
    assert all(one.stop == other.start for one, other in pairwise(cut))
    assert all(min(rows, LEAST_ROWS) <= size <= MOST_ROWS for size in sizes)
    assert not sizes or max(sizes) - min(sizes) <= 1


def test_only_plain_linear_layers_are_taken() -> None:
    """A layer that does more than a product, such as an adapter around one, is refused, not simplified."""

    class Adapted(nn.Linear):
        """A linear layer of another make."""

    with pytest.raises(TypeError, match="expected linear layers"):
        Product(linear(64, 64), Adapted(64, 64))
