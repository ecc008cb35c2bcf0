"""Reads the residual stream after some layers while a model runs, and ends the model at the deepest of them."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from worker.engine.tap import Pooling, Reading, Tap
from worker.errors import ConfigError


def pool(reading: Reading, states: dict[int, torch.Tensor]) -> torch.Tensor:
    """One prompt's tapped states `[tokens, width]` by depth -> `[taps, width]` in float32.

    One prompt at a time, so that nothing depends on how many there are. An empty ticket is read as its frame.
    """
    return torch.stack([_pooled(reading, states[tap.depth], tap.pooling) for tap in reading.taps])


def _pooled(reading: Reading, states: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    if pooling == "last":
        return states[-1].float()
    own = states[reading.lead : states.shape[0] - reading.tail]
    own = (own if own.shape[0] else states).float()
    return own.mean(dim=0) if pooling == "mean" else own.amax(dim=0)


class Listener:
    """Copies the residual stream after the tapped layers while a model runs."""

    def __init__(self, model: Any, taps: Sequence[Tap]) -> None:
        self._layers = {tap.depth: layers_of(model)[tap.depth - 1] for tap in taps}

    @contextmanager
    def listening(self) -> Iterator[dict[int, torch.Tensor]]:
        """The states of each tapped depth, as the layer gives them, once the model has run inside the block."""
        heard: dict[int, torch.Tensor] = {}
        with ExitStack() as stack:
            for depth, layer in self._layers.items():
                stack.enter_context(_removing(layer.register_forward_hook(partial(_keep, heard, depth))))
            yield heard


def layers_of(model: Any) -> Any:
    """A decoder's layers. Raises ConfigError for a model that does not have them in the usual place."""
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, torch.nn.ModuleList):
        raise ConfigError("this model keeps its layers in an unusual place: a head cannot be fitted to it")
    return layers


def cut(model: Any, taps: Sequence[Tap]) -> None:
    """Drop the layers behind the deepest tap, in place: nobody reads them."""
    layers = layers_of(model)
    depth = max(tap.depth for tap in taps)
    if depth > len(layers):
        raise ConfigError(f"the task's head reads after layer {depth}, and this model has {len(layers)}")
    model.base_model.layers = layers[:depth]


def _keep(heard: dict[int, torch.Tensor], depth: int, module: Any, inputs: Any, output: Any) -> None:
    states = output[0] if isinstance(output, tuple) else output
    # Copied: the next layer may add to the stream in place.
    heard[depth] = states.clone()


@contextmanager
def _removing(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()
