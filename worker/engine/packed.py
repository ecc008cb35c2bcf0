"""Real tokens only: a batch's prompts in one row, attention for each length apart, the prefix in front of every one.

Tickets are laid end to end in a single row `[1, tokens]`, so that every matrix product sees real tokens only. Attention
alone must keep them apart: transformers' own extension point hands it queries, keys and values, and it runs one
scaled-dot-product attention for each group of prompts of the same length. No prompt is ever padded to another's length,
so what one gets does not depend on which others are there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from transformers import AttentionInterface

from worker.engine.product import LEAST_ROWS
from worker.engine.reading import Listener, pool
from worker.engine.tap import Reading
from worker.engine.tree import ROOT

ATTENTION = "lengthwise_packed"


@dataclass(frozen=True)
class Group:
    """Neighbours in the row that have the same length. `mask` is `[length, prefix + length]`, None for plain causal."""

    start: int
    count: int
    length: int
    mask: torch.Tensor | None

    @property
    def end(self) -> int:
        """Where the next group starts."""
        return self.start + self.count * self.length

    def of(self, row: torch.Tensor) -> torch.Tensor:
        """This group's part of a row: `[tokens, heads, size]` -> `[prompts, length, heads, size]`, a view."""
        return row[self.start : self.end].view(self.count, self.length, *row.shape[1:])


@dataclass
class Pack:
    """What attention needs to know of a row, passed through the model to every layer.

    `prefix` has keys and values `[kv heads, tokens, head size]` per layer; `captured` collects them on the prefix's
    own run, and is None on all others.
    """

    groups: Sequence[Group]
    prefix: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    captured: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = None
    reads: torch.Tensor | None = None  # rows that will be read, for a last layer that can leave out the others


def attend(
    layer: int, pack: Pack, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """Attention over a packed row. `query` is `[tokens, heads, head size]`, `key` and `value` have the kv heads.

    Returns `[tokens, heads * head size]`.
    """
    query, key = query.to(value.dtype), key.to(value.dtype)  # rotation may have made them float32
    if pack.captured is not None:
        pack.captured[layer] = key.transpose(0, 1).contiguous(), value.transpose(0, 1).contiguous()
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    for group in pack.groups:
        q, k, v = (group.of(part).transpose(1, 2) for part in (query, key, value))
        if pack.prefix:
            prefix_k, prefix_v = pack.prefix[layer]
            k = torch.cat([prefix_k.expand(group.count, -1, -1, -1), k], dim=2)
            v = torch.cat([prefix_v.expand(group.count, -1, -1, -1), v], dim=2)
        attended = F.scaled_dot_product_attention(
            q, k, v, attn_mask=group.mask, is_causal=group.mask is None, scale=scaling, enable_gqa=True
        )
        group.of(output).copy_(attended.transpose(1, 2))
    return output.flatten(1)


def _interface(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    pack: Pack | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """`attend` as transformers calls it: `[1, heads, tokens, head size]` in, `[1, tokens, heads, head size]` out."""
    if pack is None or attention_mask is not None:
        raise RuntimeError("packed attention was called without its pack, or with a mask: tickets could see each other")
    q, k, v = (part[0].transpose(0, 1).contiguous() for part in (query, key, value))
    return attend(module.layer_idx, pack, q, k, v, scaling).view(1, *q.shape), None


AttentionInterface.register(ATTENTION, _interface)


class Packed:
    """Hidden states by packed rows over a shared prefix, which is run once and only ever read after that."""

    name = "packed"
    reuses_prefix = True
    takes_any_mix = True

    def __init__(self, model: Any, prefix_ids: Sequence[int], reading: Reading) -> None:
        self._model, self._reading, self._tree = model, reading, reading.tree
        self._listener = Listener(model, reading.taps)
        self._device = next(model.parameters()).device
        self._dtype = next(model.parameters()).dtype
        self._prefix_length = len(prefix_ids)
        self._sees = torch.tensor(self._tree.sees(), dtype=torch.bool).reshape(2 * [len(self._tree.ids)])
        model.set_attn_implementation(ATTENTION)
        self.prefix = self._run_prefix(prefix_ids)

    def hidden(self, prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, int]:
        """Hidden states `[prompts, reads, hidden]`, and the tokens that were run for them."""
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        rows = [list(prompts[index]) for index in order]
        # A row of few tokens would be run by other kernels, with other bits; a filler that nobody reads prevents it.
        if (missing := LEAST_ROWS - sum(len(row) + len(self._tree.ids) for row in rows)) > 0:
            rows.append([rows[-1][-1]] * (len(rows[-1]) + missing))
        lengths = [len(row) for row in rows]
        ids = [token for row in rows for token in (*row, *self._tree.ids)]
        positions, pack = self._positions(lengths), Pack(list(self._groups(lengths)), self.prefix)
        read = self._read_taps if self._reading.taps else self._read_tree
        back = torch.tensor(order, device=self._device).argsort()
        return read(ids, positions, pack, lengths[: len(prompts)])[back], len(ids)

    def _read_tree(
        self, ids: Sequence[int], positions: Sequence[int], pack: Pack, lengths: Sequence[int]
    ) -> torch.Tensor:
        reads = torch.tensor([row for rows in self._reads(lengths) for row in rows], device=self._device)
        # Read rows are few; for the last layer they are repeated up to what keeps its kernels the same.
        pack.reads = reads.repeat(-(-LEAST_ROWS // len(reads)))
        states = self._run(ids, positions, pack)
        states = states[: len(reads)] if states.shape[0] == len(pack.reads) else states[reads]
        return states.view(len(lengths), len(self._tree.reads), -1)

    def _read_taps(
        self, ids: Sequence[int], positions: Sequence[int], pack: Pack, lengths: Sequence[int]
    ) -> torch.Tensor:
        with self._listener.listening() as heard:
            self._run(ids, positions, pack)
        ends = list(accumulate(lengths))
        return torch.stack(
            [
                pool(self._reading, {depth: states[0, end - length : end] for depth, states in heard.items()})
                for end, length in zip(ends, lengths, strict=True)
            ]
        )

    def _run(self, ids: Sequence[int], positions: Sequence[int], pack: Pack) -> torch.Tensor:
        # No cache and no mask: with either, transformers would let the tickets of a row see each other.
        output = self._model.base_model(
            input_ids=torch.tensor([ids], device=self._device),
            position_ids=torch.tensor([positions], device=self._device),
            use_cache=False,
            pack=pack,
        )
        states: torch.Tensor = output.last_hidden_state[0]
        return states

    def _run_prefix(self, prefix_ids: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if not prefix_ids:
            return []
        captured: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        length = len(prefix_ids)
        self._run(prefix_ids, range(length), Pack([Group(0, 1, length, None)], captured=captured))
        return [captured[layer] for layer in sorted(captured)]

    def _groups(self, lengths: Sequence[int]) -> Iterator[Group]:
        """Runs of equal prompt lengths (sorted), as stretches of the row."""
        start = 0
        for length in sorted(set(lengths)):
            group = Group(start, lengths.count(length), length + len(self._tree.ids), self._mask(length))
            yield group
            start = group.end

    def _mask(self, length: int) -> torch.Tensor | None:
        """Zero where a token of a prompt and its branches may look, minus infinity elsewhere."""
        branches = len(self._tree.ids)
        if not branches and not self._prefix_length:
            return None
        own = torch.ones(length + branches, length + branches, dtype=torch.bool).tril()
        own[length:, length:] = self._sees
        sees = torch.cat([torch.ones(length + branches, self._prefix_length, dtype=torch.bool), own], dim=1)
        mask = torch.zeros(sees.shape, dtype=self._mask_dtype).masked_fill(~sees, float("-inf"))
        return mask.to(self._device)

    @property
    def _mask_dtype(self) -> torch.dtype:
        return self.prefix[0][0].dtype if self.prefix else self._dtype

    def _positions(self, lengths: Sequence[int]) -> list[int]:
        depths = self._tree.depths()
        return [
            self._prefix_length + position
            for length in lengths
            for position in (*range(length), *(length + depth for depth in depths))
        ]

    def _reads(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Where in the row each prompt is read: at its own last token, found by counting, and at its branchings."""
        start = 0
        for length in lengths:
            yield [start + length - 1 if node == ROOT else start + length + node for node in self._tree.reads]
            start += length + len(self._tree.ids)
