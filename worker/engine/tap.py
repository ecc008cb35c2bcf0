"""What is read of a forward pass: where the label tree branches, or the residual stream after some layers (pure).

A fitted head does not need a label's next token. It reads taps: a ticket's states after some layer, pooled over the
ticket. The pass can end at the deepest tap.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from worker.engine.tree import NO_LABELS, LabelTree

Pooling = Literal["mean", "last", "max"]
POOLINGS: tuple[Pooling, ...] = ("mean", "last", "max")


class Tap(msgspec.Struct, frozen=True):
    """The states after `depth` layers, counted from 1: their mean over the ticket's own tokens, the last token's, or
    the largest value of each of them over the ticket's tokens.
    """

    depth: int
    pooling: Pooling


class Reading(msgspec.Struct, frozen=True):
    """What to read of each prompt. With taps the tree is empty, and the other way round.

    `lead` and `tail` tokens of a prompt come before and after the ticket.
    """

    tree: LabelTree = NO_LABELS
    taps: tuple[Tap, ...] = ()
    lead: int = 0
    tail: int = 0


def told(taps: Sequence[Tap]) -> str:
    """Taps in words: `mean after layers 1, 2, 5; last after layer 5`."""
    parts = []
    for pooling in POOLINGS:
        depths = [str(tap.depth) for tap in taps if tap.pooling == pooling]
        if depths:
            parts.append(f"{pooling} after layer{'s' if len(depths) > 1 else ''} {', '.join(depths)}")
    return "; ".join(parts)
