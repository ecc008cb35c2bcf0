"""The textbook way: left padding, a mask, explicit positions, the prefix's cache expanded. Reference and fallback."""

from collections.abc import Sequence
from typing import Any

import torch

from worker.engine.reading import Listener, pool
from worker.engine.tap import Reading
from worker.engine.tree import ROOT

# Any id does for padding: it is masked, and nothing is ever found by looking for it.
_PAD_ID = 0


class Padded:
    """Hidden states by left-padded batches over a shared prefix.

    The prefix is run once; every batch gets a cache of its own, filled with copies, so that none is polluted.
    """

    name = "padded"
    reuses_prefix = True
    takes_any_mix = False

    def __init__(self, model: Any, prefix_ids: Sequence[int], reading: Reading) -> None:
        self._model, self._reading, self._tree = model, reading, reading.tree
        self._listener = Listener(model, reading.taps)
        self._device = next(model.parameters()).device
        self._prefix_length = len(prefix_ids)
        self._prefix = self._run_prefix(prefix_ids)
        self._sees = torch.tensor(reading.tree.sees(), dtype=torch.bool).reshape(2 * [len(reading.tree.ids)])
        self._depths = torch.tensor(reading.tree.depths(), dtype=torch.long)

    def hidden(self, prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, int]:
        """Hidden states `[prompts, reads, hidden]`, and the tokens that were run for them."""
        return self.padded_to(max(map(len, prompts)), prompts)

    def padded_to(self, longest: int, prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, int]:
        """`hidden`, with every prompt padded to `longest` tokens."""
        lengths = torch.tensor([len(ids) for ids in prompts])
        ids = torch.full((len(prompts), longest + len(self._tree.ids)), _PAD_ID)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) : longest] = torch.tensor(prompt)
            ids[row, longest:] = torch.tensor(self._tree.ids, dtype=torch.long)
        with self._listener.listening() as heard:
            states = self._model.base_model(
                input_ids=ids.to(self._device),
                attention_mask=self._mask(lengths, longest).to(self._device),
                position_ids=self._positions(lengths, longest).to(self._device),
                cache=self._expanded_prefix(len(prompts)),
                use_cache=True,
            ).last_hidden_state
        if self._reading.taps:
            pooled = [self._tapped(heard, row, len(prompt)) for row, prompt in enumerate(prompts)]
            return torch.stack(pooled), ids.numel()
        # Left padding ends every prompt in the same column, and the tree's tokens follow it.
        columns = [longest - 1 if node == ROOT else longest + node for node in self._tree.reads]
        return states[:, columns], ids.numel()

    def _tapped(self, heard: dict[int, torch.Tensor], row: int, length: int) -> torch.Tensor:
        return pool(self._reading, {depth: states[row, states.shape[1] - length :] for depth, states in heard.items()})

    def _positions(self, lengths: torch.Tensor, longest: int) -> torch.Tensor:
        own = torch.arange(longest)[None] - (longest - lengths)[:, None]
        branches = lengths[:, None] + self._depths[None]
        return torch.cat([own.clamp(min=0), branches], dim=1) + self._prefix_length

    def _mask(self, lengths: torch.Tensor, longest: int) -> torch.Tensor:
        """Which columns each row attends to, `[prompts, 1, queries, prefix + queries]`, True where it does."""
        width = longest + len(self._tree.ids)
        causal = torch.ones(width, width, dtype=torch.bool).tril()
        causal[longest:, longest:] = self._sees
        is_real = torch.arange(width)[None] >= (longest - lengths)[:, None]
        # A row of padding sees itself, since a row that sees nothing is a division by zero.
        own = (causal[None] & is_real[:, None]) | torch.eye(width, dtype=torch.bool)[None]
        prefix = torch.ones(len(lengths), width, self._prefix_length, dtype=torch.bool)
        return torch.cat([prefix, own], dim=2)[:, None]

    def _run_prefix(self, prefix_ids: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if not prefix_ids:
            return []
        cache = self._new_cache()
        self._model.base_model(input_ids=torch.tensor([prefix_ids], device=self._device), cache=cache, use_cache=True)
        # A model that was cut leaves some of its cache unused.
        return [(layer.keys, layer.values) for layer in cache.layers if layer.is_initialized]

    def _expanded_prefix(self, rows: int) -> Any:
        cache = self._new_cache()
        for index, (keys, values) in enumerate(self._prefix):
            cache.update(keys.expand(rows, -1, -1, -1), values.expand(rows, -1, -1, -1), index)
        return cache

    def _new_cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self._model.config)


class Single:
    """One ticket at a time, the whole prompt, no cache, no mask, no padding: what every other way is measured against.

    Labels of several tokens are scored step by step, one pass a branching, so that this shares nothing with the tree.
    """

    name = "single"
    reuses_prefix = False
    takes_any_mix = True

    def __init__(self, model: Any, prefix_ids: Sequence[int], reading: Reading) -> None:
        self._model, self._prefix_ids, self._reading = model, list(prefix_ids), reading
        self._listener = Listener(model, reading.taps)
        self._device = next(model.parameters()).device

    def hidden(self, prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, int]:
        """Hidden states `[prompts, reads, hidden]`, and the tokens that were run for them."""
        if self._reading.taps:
            return self._read_taps(prompts)
        states, tokens, tree = [], 0, self._reading.tree
        for prompt in prompts:
            for node in tree.reads:
                ids = [*self._prefix_ids, *prompt, *tree.path_to(node)]
                states.append(self._last_state(ids))
                tokens += len(ids)
        return torch.stack(states).view(len(prompts), len(tree.reads), -1), tokens

    def _read_taps(self, prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, int]:
        pooled, prefix = [], len(self._prefix_ids)
        for prompt in prompts:
            with self._listener.listening() as heard:
                self._states([*self._prefix_ids, *prompt])
            pooled.append(pool(self._reading, {depth: states[0, prefix:] for depth, states in heard.items()}))
        return torch.stack(pooled), sum(prefix + len(prompt) for prompt in prompts)

    def _last_state(self, ids: Sequence[int]) -> torch.Tensor:
        return self._states(ids)[0, -1]

    def _states(self, ids: Sequence[int]) -> torch.Tensor:
        output = self._model.base_model(input_ids=torch.tensor([ids], device=self._device), use_cache=False)
        states: torch.Tensor = output.last_hidden_state
        return states
