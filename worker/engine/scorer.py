"""One forward pass -> label scores: the label rows of the output layer, read along the label tree."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

from worker.engine.tree import LabelTree

# Products of this many rows exactly: another number takes another kernel, and with it other bits.
_ROWS = 16


class Strategy(Protocol):
    """A way to get from prompts to hidden states."""

    @property
    def name(self) -> str:
        """Its name in metrics and certificates."""

    @property
    def reuses_prefix(self) -> bool:
        """Whether the prefix is run once for all prompts, and not for each."""

    @property
    def takes_any_mix(self) -> bool:
        """Whether a prompt costs its own length, whatever the others' lengths."""

    def hidden(self, prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, int]:
        """Hidden states `[prompts, reads, hidden]`, of the tree or the taps, and the tokens that were run for them."""


class Head(Protocol):
    """What makes log-probabilities of hidden states."""

    def log_probs(self, states: torch.Tensor) -> torch.Tensor:
        """`[prompts, reads, hidden]` -> `[prompts, labels]`, float32; a question's add up to a probability of one."""


class FewRows:
    """A small linear layer in float32, of which no row depends on how many there are, of states or of weights."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._outputs = weight.shape[0]
        missing = max(0, _ROWS - self._outputs)
        # A handful of rows: in float32 they cost nothing, and a score keeps its digits.
        self.weight = torch.cat([weight, weight[:1].expand(missing, -1)]).float()
        self.bias = None if bias is None else torch.cat([bias, bias[:1].expand(missing)]).float()

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """`[rows, inner]` -> `[rows, outputs]`."""
        rows = states.shape[0]
        filled = torch.cat([states, states[:1].expand(-rows % _ROWS, -1)]).float()
        parts = [F.linear(part, self.weight, self.bias) for part in torch.split(filled, _ROWS)]
        return torch.cat(parts)[:rows, : self._outputs]


class LabelHead:
    """The label rows of the output layer, and how they make log-probabilities."""

    def __init__(self, model: Any, tree: LabelTree) -> None:
        self._tree = tree
        output = model.get_output_embeddings()
        index = torch.tensor([token for choice in tree.choices for token in choice], device=output.weight.device)
        self.rows = FewRows(output.weight[index], None if output.bias is None else output.bias[index])
        ends = torch.tensor([len(choice) for choice in tree.choices]).cumsum(0).tolist()
        self._spans = list(zip([0, *ends[:-1]], ends, strict=True))

    def log_probs(self, states: torch.Tensor) -> torch.Tensor:
        """See `Head`; read along the label tree."""
        choices = []
        for read, (start, end) in enumerate(self._spans):
            choices.append(self.rows(states[:, read])[:, start:end].log_softmax(dim=-1))
        labels = [sum((choices[read][:, choice] for read, choice in path)) for path in self._tree.paths]
        return torch.stack([torch.as_tensor(label) for label in labels], dim=1)
