"""Training text that every Python machine has: the standard library's own sources.

Splits by file, never inside one: a held-out file shares no line of its own with training. Prose (docstrings and the
language reference that `pydoc_data.topics` carries) is drawn from the same files, so a held-out docstring is held out too.
"""

from __future__ import annotations

import ast
import hashlib
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

# Tables of code points, generated data and deliberately broken sources: text, but not language.
SKIPPED_PARTS = {"site-packages", "__pycache__", "encodings", "lib2to3", "cjkencodings", "idlelib", "turtledemo"}
MAX_FILE_BYTES = 400_000
MIN_FILE_BYTES = 400
MAX_DIGIT_SHARE = 0.12
HELD_OUT_PERCENT = 3
MIN_DOCSTRING_CHARS = 240
PROSE_REPEATS = 3


@dataclass(frozen=True, kw_only=True)
class Document:
    """One file's text; `name` is its path inside the standard library, so it names the same file on any machine."""

    name: str
    text: str

    @property
    def held_out(self) -> bool:
        """Decided by the name alone, so that the split does not depend on order, platform or Python version."""
        return int(hashlib.sha256(self.name.encode()).hexdigest()[:8], 16) % 100 < HELD_OUT_PERCENT


def _is_language(text: str) -> bool:
    digits = sum(text.count(d) for d in "0123456789")
    escapes = text.count("\\x") + text.count("\\u")
    return digits + 4 * escapes < MAX_DIGIT_SHARE * len(text)


def standard_library() -> Iterator[Document]:
    """Yields the sources of the running Python's standard library, tests included, in sorted order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_PARTS & set(relative.parts) or not MIN_FILE_BYTES <= path.stat().st_size <= MAX_FILE_BYTES:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if relative.parts[0] == "pydoc_data":
            continue  # comes in as prose, not as one dictionary of escaped strings
        if _is_language(text):
            yield Document(name=relative.as_posix(), text=text)


def language_reference() -> Iterator[Document]:
    """Yields the chapters of the language reference that `help()` shows."""
    from pydoc_data.topics import topics

    for name, text in sorted(topics.items()):
        if len(text) >= MIN_FILE_BYTES:
            yield Document(name=f"pydoc_data/topics/{name}", text=text)


def docstrings(document: Document) -> Iterator[str]:
    """Yields the long docstrings of one source file, cleaned of indentation."""
    try:
        tree = ast.parse(document.text)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and len(text) >= MIN_DOCSTRING_CHARS:
                yield text


def prose_documents(sources: list[Document]) -> Iterator[Document]:
    """Yields each file's long docstrings as a document of their own, and the language reference."""
    for source in sources:
        text = "\n\n".join(docstrings(source))
        if text:
            # The source's name decides the split: its docstrings go where it goes.
            yield Document(name=source.name, text=text)
    yield from language_reference()


@dataclass(frozen=True, kw_only=True)
class Split:
    """Documents of one side of the split."""

    code: list[Document]
    prose: list[Document]

    def tokens(self, tokenizer: Tokenizer, *, prose_repeats: int = 1, seed: int = 0) -> np.ndarray:
        """All documents as one uint16 stream, each between <bos> and <eos>, in an order the seed decides."""
        documents = self.code + self.prose * prose_repeats
        random.Random(seed).shuffle(documents)
        bos, eos = tokenizer.token_to_id("<bos>"), tokenizer.token_to_id("<eos>")
        encoded = tokenizer.encode_batch([d.text for d in documents], add_special_tokens=False)
        return np.concatenate([np.array([bos, *e.ids, eos], dtype=np.uint16) for e in encoded])


def load_splits() -> tuple[Split, Split]:
    """Returns (train, held out)."""
    code = list(standard_library())
    prose = list(prose_documents(code))
    train = Split(code=[d for d in code if not d.held_out], prose=[d for d in prose if not d.held_out])
    held = Split(code=[d for d in code if d.held_out], prose=[d for d in prose if d.held_out])
    return train, held
