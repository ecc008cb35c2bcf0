"""The same decoder layers with fewer passes over memory, for processors: bfloat16 products, float32 residual stream.

A loaded model's layers are replaced by `Layer`, which gives the same up to rounding: query, key and value in one
product, the gate's activation and the multiplication inside the products that feed them, everything between two
attentions done piece by piece while the piece is in the cache. No model is known by name: a `Layer` is built from the
parts a layer has, run against it, and used only if every layer agrees. A model that does not runs as transformers
wrote it.
"""

from typing import Any

import torch
from torch import nn

from worker.engine.packed import ATTENTION, Group, Pack, attend
from worker.engine.product import LEAST_ROWS, Product, pieces

# Largest difference from the layer that is replaced, relative to its output: some roundings to bfloat16's 8 bits.
_TOLERANCE = 0.03
_PROBE_TOKENS = LEAST_ROWS + 1


def fuse(model: Any) -> bool:
    """Replace all layers of a float32 model in place, or none. Returns whether they were replaced."""
    model.set_attn_implementation(ATTENTION)
    layers = getattr(model.base_model, "layers", None)
    rotary = getattr(model.base_model, "rotary_emb", None)
    if not isinstance(layers, nn.ModuleList) or rotary is None:
        return False
    fused = []
    for index, original in enumerate(layers):
        layer = _fused(original, rotary, is_last=index == len(layers) - 1)
        if layer is None:
            return False
        fused.append(layer)
    for index, layer in enumerate(fused):
        layers[index] = layer
    return True


def _fused(original: Any, rotary: Any, *, is_last: bool) -> "Layer | None":
    """What may stand for a layer: built from its parts, and found to give the same."""
    try:
        layer = Layer(original)
        expected, got = _probe(original, layer.width, rotary), _probe(layer, layer.width, rotary)
    except (AttributeError, TypeError, RuntimeError):
        return None  # it lacks a part, or is called or answers in another way: it is another kind of layer
    layer.is_last = is_last
    return layer if bool((expected - got).norm() <= _TOLERANCE * expected.norm()) else None


def _probe(layer: Any, width: int, rotary: Any) -> torch.Tensor:
    """What a layer makes of noise in one causal sequence."""
    states = torch.randn(1, _PROBE_TOKENS, width, generator=torch.Generator().manual_seed(1))
    output: torch.Tensor = layer(
        states.clone(),
        attention_mask=None,
        position_embeddings=rotary(states, torch.arange(_PROBE_TOKENS)[None]),
        pack=Pack([Group(0, 1, _PROBE_TOKENS, None)]),
    )
    return output - states  # the stream itself would hide a wrong layer


class Layer(nn.Module):
    """One pre-norm decoder layer: rotary attention, then a gated MLP with SiLU.

    Raises AttributeError or TypeError if the original lacks a part or has one of another type.
    """

    def __init__(self, original: Any) -> None:
        super().__init__()
        attention, mlp = original.self_attn, original.mlp
        self.norm, self.mlp_norm = Norm(original.input_layernorm), Norm(original.post_attention_layernorm)
        self.qkv = Product(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = Product(attention.o_proj)
        self.gate, self.up, self.down = Product(mlp.gate_proj), Product(mlp.up_proj), Product(mlp.down_proj)
        self.q_norm, self.k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self.index, self.head_size, self.scaling = attention.layer_idx, attention.head_dim, attention.scaling
        self.queries = attention.q_proj.out_features // self.head_size
        self.keys = attention.k_proj.out_features // self.head_size
        self.width = attention.q_proj.in_features
        self.is_last = False

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], pack: Pack, **_: Any
    ) -> torch.Tensor:
        """`[1, tokens, width]` float32 in and out; the input is overwritten.

        The last layer returns only the rows that will be read, where `pack` names them.
        """
        stream = hidden_states[0]
        attended = attend(self.index, pack, *self._heads(stream, *position_embeddings), self.scaling)
        if self.is_last and pack.reads is not None:
            stream, attended = stream[pack.reads], attended[pack.reads]
        for rows in pieces(stream.shape[0]):
            piece = stream[rows].add_(self.out(attended[rows]))
            states = self.mlp_norm(piece)
            piece.add_(self.down(self.up.times(states, self.gate.silu(states))))
        return stream[None]

    def _heads(
        self, stream: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value, `[tokens, heads, head size]`, the first two rotated."""
        tokens, rotated_heads = stream.shape[0], self.queries + self.keys
        half = self.head_size // 2
        # One half of the table is enough: the other repeats it.
        cos, sin = cos[0, :, None, :half], sin[0, :, None, :half]
        rotated = torch.empty(tokens, rotated_heads, self.head_size, dtype=torch.bfloat16)
        value = torch.empty(tokens, self.keys, self.head_size, dtype=torch.bfloat16)
        for rows in pieces(tokens):
            heads = self.qkv(self.norm(stream[rows])).unflatten(-1, (-1, self.head_size))
            value[rows] = heads[:, rotated_heads:]
            rotate(self._normed(heads[:, :rotated_heads]), cos[rows], sin[rows], rotated[rows])
        return rotated[:, : self.queries], rotated[:, self.queries :], value

    def _normed(self, heads: torch.Tensor) -> torch.Tensor:
        if self.q_norm is None or self.k_norm is None:
            return heads
        return torch.cat([self.q_norm(heads[:, : self.queries]), self.k_norm(heads[:, self.queries :])], dim=1)


class Norm(nn.Module):
    """Root-mean-square norm over the last dimension, float32 in, bfloat16 out: what follows is a product."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.weight, self.epsilon = original.weight.detach(), float(original.variance_epsilon)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """`[rows, width]` in and out."""
        scale = torch.linalg.vector_norm(states, dim=-1, keepdim=True).square_()
        scale = scale.div_(states.shape[-1]).add_(self.epsilon).rsqrt_()
        normed: torch.Tensor = (states * scale).mul_(self.weight)
        return normed.bfloat16()


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, into: torch.Tensor) -> None:
    """Rotary position embedding of `[tokens, heads, size]` in float32, rounded to `into`'s dtype at the end."""
    low, high = heads.float().chunk(2, dim=-1)
    into_low, into_high = into.chunk(2, dim=-1)
    into_low.copy_(torch.addcmul(low * cos, high, sin, value=-1))
    into_high.copy_(torch.addcmul(high * cos, low, sin))
