"""The model's tokenizer without its added tokens: a ticket is data, and no text in it may become a control token."""

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from worker.errors import ConfigError


class PlainTokenizer:
    """Encodes text into ids none of which belongs to an added token, `<|im_end|>` and `<tool_call>` included.

    `split_special_tokens=True` would spare only the special ones. Here the added tokens are taken out of the tokenizer,
    so their text is spelled in ordinary pieces.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError("this model has no tokenizer.json; only fast tokenizers can be used")
        description = json.loads(backend.to_str())
        self._added = {int(token["id"]) for token in description["added_tokens"]}
        description.update(added_tokens=[], post_processor=None, truncation=None, padding=None)
        self._tokenizer = Tokenizer.from_str(json.dumps(description))
        self.ordinary_ids = sorted(set(self._tokenizer.get_vocab().values()) - self._added)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, in their order."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [self._without_added(encoding.ids) for encoding in encodings]

    def _without_added(self, ids: list[int]) -> list[int]:
        # A vocabulary may hold an added token's text as an ordinary piece too; then it is left out, not obeyed.
        return ids if self._added.isdisjoint(ids) else [token for token in ids if token not in self._added]
