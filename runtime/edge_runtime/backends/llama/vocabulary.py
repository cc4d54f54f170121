"""Text to token ids and back, with the tokenizer that llama.cpp read from the target's GGUF."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from edge_runtime.backends.committed_tokens import TokenRange
from edge_runtime.backends.kernels.arrays import handed
from edge_runtime.backends.llama.loader import LlamaLibrary
from edge_runtime.errors import RequestError

# llama_tokenize counts in int32 and a token is never longer than its text, so no longer text can be asked for.
MAX_TEXT_BYTES = (1 << 31) - 64
_NO_TOKEN = -1
# llama_token_attr (include/llama.h). Of user-defined tokens, which stay visible in output, only those in Gemma 4's brackets mean something.
_UNKNOWN, _CONTROL, _USER_DEFINED = 1, 8, 16
_BRACKETED = re.compile(rb"<\|[^<>]+>|<[^<>]+\|>")


class LlamaVocabulary(TokenRange):
    """The vocabulary of a loaded model, valid as long as that model; `eog_tokens` end a generation."""

    def __init__(self, library: LlamaLibrary, model: Any) -> None:
        self._api = library.api
        self.kept = {}
        self._open_vocab: Any = self._api.llama_model_get_vocab(model)
        self.size: int = self._api.llama_vocab_n_tokens(self._vocab)
        vocab, ends = self._vocab, self._api.llama_vocab_is_eog  # looked up once, not for each of 262,144 tokens
        self.eog_tokens = frozenset(token for token in range(self.size) if ends(vocab, token))
        self.bos: int = self._api.llama_vocab_bos(self._vocab)
        self.eos: int = self._api.llama_vocab_eos(self._vocab)

    @property
    def _vocab(self) -> Any:
        if self._open_vocab is None:
            raise RequestError("the model of this vocabulary is closed; open the bundle again")
        return self._open_vocab

    def close(self) -> None:
        """Forgets the vocabulary, which the model frees. Can be called twice."""
        self._open_vocab = None
        self.kept.clear()

    @cached_property
    def control_tokens(self) -> Mapping[str, int]:
        """Text -> id of the control tokens: of <|turn> and its like, and of what is visible in output but no text, as <|channel>."""
        controls = {}
        for token in range(self.size):
            attributes = self._api.llama_vocab_get_attr(self._vocab, token)
            if attributes & (_UNKNOWN | _CONTROL | _USER_DEFINED):
                text = self.piece(token, special=True)
                if attributes & (_UNKNOWN | _CONTROL) or _BRACKETED.fullmatch(text):
                    controls[text.decode("utf-8", "replace")] = token
        return controls

    def encode(self, text: str, *, add_bos: bool = True, parse_special: bool = False) -> list[int]:
        """Returns the token ids of `text`.

        Any str is taken: NUL is a character like others, and a surrogate that is no half of a pair becomes U+FFFD.
        `parse_special` lets control tokens such as <|turn> in the text become those tokens; leave it off for foreign text.
        """
        data = _well_formed(text).encode("utf-8")
        if len(data) > MAX_TEXT_BYTES:
            raise RequestError(f"the text has {len(data)} bytes, more than the {MAX_TEXT_BYTES} the tokenizer can take; shorten it")
        tokens = self._tokenize(data, parse_special)
        return [self.bos, *tokens] if add_bos and self.bos != _NO_TOKEN else tokens

    def _bytes_of(self, token: int, *, special: bool) -> bytes:
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            written: int = self._api.llama_token_to_piece(self._vocab, token, buffer, size, 0, special)
            if written >= 0:
                return buffer.raw[:written]
            size = -written

    def _tokenize(self, data: bytes, parse_special: bool) -> list[int]:
        # One token per byte is the most that byte fallback can give.
        capacity = len(data) + 1
        # An array of ctypes would be a new type for each length, which only the garbage collector takes away.
        buffer = np.empty(capacity, np.int32)
        first = ctypes.byref(ctypes.c_int32.from_address(handed(buffer, np.int32, capacity)))
        # llama.cpp would add <eos> along with <bos> if a file asks for it, so special tokens are added by `encode`.
        count: int = self._api.llama_tokenize(self._vocab, data, len(data), first, capacity, False, parse_special)
        if count < 0:
            raise RequestError(f"the tokenizer refused a text of {len(data)} bytes (code {count}); shorten it")
        return [int(token) for token in buffer[:count]]


def _well_formed(text: str) -> str:
    """Joins surrogate pairs and replaces lone surrogates, which have no UTF-8 form, by U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
