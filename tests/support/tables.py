"""A vocabulary that is a list of pieces, so that one text may be spelled in several ways."""

from __future__ import annotations


class TableVocabulary:
    """Token ids index `pieces`; those in `eog_tokens` end a text."""

    def __init__(self, pieces: list[bytes], eog: frozenset[int]) -> None:
        self.pieces = pieces
        self.eog_tokens = eog
        self.control_tokens = {"<|call>": pieces.index(b"<|call>")} if b"<|call>" in pieces else {}

    @property
    def size(self) -> int:
        return len(self.pieces)

    def encode(self, text: str, *, add_bos: bool = False) -> list[int]:
        return [self.pieces.index(bytes([byte])) for byte in text.encode()]

    def piece(self, token: int) -> bytes:
        return self.pieces[token]

    def text(self, tokens: list[int]) -> str:
        return b"".join(self.pieces[t] for t in tokens if t not in self.eog_tokens).decode()


def byte_vocabulary(*longer: bytes) -> TableVocabulary:
    """Two tokens that end a text, one without text, all bytes, and `longer` pieces, of which some may be there twice."""
    return TableVocabulary([b"<eos>", b"<turn|>", b"", *(bytes([i]) for i in range(256)), *longer], frozenset({0, 1}))
