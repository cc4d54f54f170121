"""Text to token ids and back, with the bundle's tokenizer.json. The only module that imports tokenizers."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from edge_devices.errors import first_line
from edge_devices.machine.device_package import how_to_get
from edge_runtime.backends.committed_tokens import TokenRange
from edge_runtime.bundle.manifest import OnnxGraphs
from edge_runtime.bundle.tokenizer_json import check_parts, read_tokenizer
from edge_runtime.errors import BackendError, BundleError, EdgeRuntimeError

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"
# Marks in Gemma 4's brackets mean something in a conversation, though they are visible in output.
_BRACKETED = re.compile(r"<\|[^<>]+>|<[^<>]+\|>")
_NO_TOKEN = -1


@contextlib.contextmanager
def _panics_as(kind: type[EdgeRuntimeError], what: str, advice: str) -> Iterator[None]:
    """Turns errors of the library into `kind`, but not our own. A panic of its Rust code is a BaseException, not an Exception."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, EdgeRuntimeError):
        raise
    except BaseException as error:
        raise kind(f"{what} ({first_line(error)}); {advice}") from error


class TokenizerVocabulary(TokenRange):
    """A Gemma tokenizer: BPE with byte fallback. Implements `interfaces.Vocabulary`; `size` is the model's, `eog_tokens` end a text."""

    def __init__(self, path: Path, graphs: OnnxGraphs, size: int) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise BackendError(f"tokenizers is not installed ({error}); {how_to_get('onnx')}") from error
        with _panics_as(BundleError, f"{path} is no tokenizer", "copy the bundle again"):
            self._tokenizer: Any = Tokenizer.from_buffer(read_tokenizer(path))
            # A checkpoint's file may say both: prompts would be cut off, or filled up to any length.
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            check_parts(self._tokenizer, path)
            _keep_no_words(self._tokenizer.model)
        # Special tokens are found here: the tokenizer takes them by a state of its own, for which a short prompt would wait for a long one.
        self._tokenizer.encode_special_tokens = True
        self.size = size
        self.kept = {}
        self.eog_tokens = frozenset(graphs.eog_tokens)
        self.bos = _NO_TOKEN if graphs.bos_token is None else graphs.bos_token
        self.eos = _NO_TOKEN if graphs.eos_token is None else graphs.eos_token
        self._control = frozenset(graphs.control_tokens)
        added = self._tokenizer.get_added_tokens_decoder().items()
        self._bracketed = {token.content: index for index, token in added if _BRACKETED.fullmatch(token.content)}
        # Marks such as <|channel> are found in any text; the tokenizer itself tells no difference between them and control tokens.
        self._marks = {token.content: index for index, token in added if token.special and index not in self._control}
        self._special = {token.content: index for index, token in added if token.special}
        self._mark, self._any_special = _pattern(self._marks), _pattern(self._special)

    @cached_property
    def control_tokens(self) -> Mapping[str, int]:
        """Text -> id of the control tokens: of <|turn> and its like, and of what is visible in output but no text, as <|channel>."""
        listed = [(self._tokenizer.id_to_token(token), token) for token in sorted(self._control) if token < self.size]
        return {text: token for text, token in listed if text is not None} | self._bracketed

    def encode(self, text: str, *, add_bos: bool = True, parse_special: bool = False) -> list[int]:
        """Returns the token ids of `text`; a surrogate that is no half of a pair becomes U+FFFD.

        `parse_special` lets control tokens such as <|turn> in the text become those tokens; leave it off for foreign text.
        """
        clean = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        known, pattern = (self._special, self._any_special) if parse_special else (self._marks, self._mark)
        parts = [part for part in pattern.split(clean) if part] if pattern else [clean]
        tokens = [token for part in parts for token in ([known[part]] if part in known else self._plain(part))]
        return [self.bos, *tokens] if add_bos and self.bos >= 0 else tokens

    def _plain(self, part: str) -> list[int]:
        with _panics_as(BackendError, "the tokenizer failed", "copy the bundle again"):
            tokens: list[int] = self._tokenizer.encode(part, add_special_tokens=False).ids
        return tokens

    def _bytes_of(self, token: int, *, special: bool) -> bytes:
        text: str | None = self._tokenizer.id_to_token(token)
        if text is None or (token in self._control and not special):
            return b""
        byte = _BYTE.fullmatch(text)
        return bytes([int(byte.group(1), 16)]) if byte else text.replace(_SPACE, " ").encode("utf-8")


def _pattern(tokens: Collection[str]) -> re.Pattern[str] | None:
    """Returns what splits a text at tokens, the longest of those that begin at a place; None without tokens."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None


def _keep_no_words(model: Any) -> None:
    """Turns off a BPE model's cache of 10,000 words: Gemma's tokenizer splits no text, so its words are whole prompts, 40 MB of them."""
    resize = getattr(model, "_resize_cache", None)  # not in every version
    if resize is not None:
        resize(0)
