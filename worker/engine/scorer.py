"""One forward pass -> label scores: the label rows of the output layer, read along the label tree."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

from worker.engine.tree import LabelTree

# A matrix product with fewer rows takes another kernel, and with it other bits.
_LEAST_ROWS = 16


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
        """Hidden states `[prompts, reads, hidden]` where the tree is read, and the tokens that were run for them."""


class LabelHead:
    """The label rows of the output layer, and how they make log-probabilities."""

    def __init__(self, model: Any, tree: LabelTree) -> None:
        self._tree = tree
        rows = [token for choice in tree.choices for token in choice]
        padded = rows + rows[:1] * (_LEAST_ROWS - len(rows))
        output = model.get_output_embeddings()
        index = torch.tensor(padded, device=output.weight.device)
        # A handful of rows: in float32 they cost nothing, and a score keeps its digits.
        self._weight = output.weight[index].float()
        self._bias = None if output.bias is None else output.bias[index].float()
        ends = torch.tensor([len(choice) for choice in tree.choices]).cumsum(0).tolist()
        self._spans = list(zip([0, *ends[:-1]], ends, strict=True))

    def log_probs(self, states: torch.Tensor) -> torch.Tensor:
        """`[prompts, reads, hidden]` -> `[prompts, labels]`, float32 log-probabilities that add up to one."""
        choices = []
        for read, (start, end) in enumerate(self._spans):
            scores = self._scores(states[:, read].float())[:, start:end]
            choices.append(scores.log_softmax(dim=-1))
        labels = [sum((choices[read][:, choice] for read, choice in path)) for path in self._tree.paths]
        return torch.stack([torch.as_tensor(label) for label in labels], dim=1)

    def _scores(self, states: torch.Tensor) -> torch.Tensor:
        prompts = states.shape[0]
        if prompts < _LEAST_ROWS:
            states = torch.cat([states, states[:1].expand(_LEAST_ROWS - prompts, -1)])
        return F.linear(states, self._weight, self._bias)[:prompts]
