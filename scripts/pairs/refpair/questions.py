"""Short questions and answers for the chat pair: facts of answers.txt in many forms of asking, units, and what it does not know.

A question is held out of training by its own text, so that a fact is asked in forms that were never seen with it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

HELD_OUT_PERCENT = 12
UNKNOWN = "I do not know that. I only know a little about Python, units, and edge-mtp."
MAX_COUNT = 200
SHARES = {
    **{"call": 3.5, "word": 1.2, "module": 1.3, "idea": 4.5, "pair": 1, "error": 1, "howto": 6, "tool": 1.3, "say": 1, "talk": 1.2},
    **{"unit": 2.5, "unknown": 3},
}
_PLURALS = {"foot": "feet", "inch": "inches", "century": "centuries"}


def _lines(name: str) -> Iterator[list[str]]:
    for line in Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            yield [part.strip() for part in line.split(" | ", 2)]


def _words() -> dict[str, tuple[str, ...]]:
    words: dict[str, tuple[str, ...]] = {}
    for name, items in _lines("forms.txt"):
        words[name] = (*words.get(name, ()), *items.split(" ; "))
    return words


WORDS = _words()
_BEFORE = {"call": ("doing", "asked"), "word": ("doing", "asked"), "module": ("doing", "asked"), "idea": ("asked",), "error": ("asked",)}
_BEFORE |= {"howto": ("how",), "tool": ("how",)}
# Of each kind the forms that it shares with others, and its own.
FORMS = {kind: tuple(form for name in (*_BEFORE.get(kind, ()), kind) for form in WORDS.get(name, ())) for kind in SHARES}


@dataclass(frozen=True, kw_only=True)
class Fact:
    """An answer, and the phrases that ask for it."""

    kind: str
    phrases: tuple[str, ...]
    answer: str


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A question with its answer."""

    kind: str
    question: str
    answer: str

    @property
    def held_out(self) -> bool:
        """Decided by the letters and digits of the question alone: `What is len?` and `what is len` are on one side."""
        text = "".join(letter for letter in self.question.lower() if letter.isalnum())
        return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) % 100 < HELD_OUT_PERCENT


def facts() -> list[Fact]:
    """Reads answers.txt."""
    return [Fact(kind=kind, phrases=tuple(phrases.split(" ; ")), answer=answer) for kind, phrases, answer in _lines("answers.txt")]


class Questions:
    """Draws turns, each kind as often as SHARES says."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._facts: dict[str, list[Fact]] = {}
        for fact in facts():
            self._facts.setdefault(fact.kind, []).append(fact)

    def turns(self, *, held_out: bool, kind: str | None = None) -> Iterator[Turn]:
        """Yields turns of one side of the split for ever."""
        while True:
            turn = self._turn(kind or self._random.choices(tuple(SHARES), tuple(SHARES.values()))[0])
            if turn.held_out == held_out:
                yield turn

    def _turn(self, kind: str) -> Turn:
        if kind == "unit":
            question, answer = self._unit()
        elif kind == "unknown":
            form, (a, b) = self._random.choice(FORMS["unknown"]), self._random.sample(range(100), 2)
            question, answer = form.format(x=self._subject(), y=self._subject(), deed=self._choice("deed"), a=a, b=b), UNKNOWN
        else:
            fact = self._random.choice(self._facts[kind])
            phrase, other = self._phrases(fact)
            question, answer = self._random.choice(FORMS[kind]).format(x=phrase, y=other), fact.answer
        return Turn(kind=kind, question=self._typed(question), answer=answer)

    def _phrases(self, fact: Fact) -> tuple[str, str]:
        """A phrase that asks for the fact; of a difference one of each side, in any order, both with their number of words."""
        sides = [side.split(" ; ") for side in " ; ".join(fact.phrases).split(" / ")]
        if len(sides) == 1:
            return self._random.choice(WORDS.get(f"written {fact.kind}", ("{x}",))).format(x=self._random.choice(sides[0])), ""
        number = self._random.randrange(min(len(side) for side in sides))
        first, second = self._random.sample([side[number] for side in sides], 2)
        return first, second

    def _subject(self) -> str:
        if self._random.random() < 0.3:  # words that nobody knows
            return "".join(self._random.choices(WORDS["syllable"], k=self._random.randint(2, 4)))
        return self._choice("subject").format(**{name: self._choice(name) for name in ("place", "thing", "person")})

    def _choice(self, name: str) -> str:
        return self._random.choice(WORDS[name])

    def _unit(self) -> tuple[str, str]:
        """One of the larger unit in the smaller one; of several what has to be multiplied, as a model this small cannot."""
        large, small, factor = self._choice("units").split()
        count = self._random.choice((1, self._random.randint(2, 12), self._random.randint(2, MAX_COUNT)))
        several = f"{count} {large if count == 1 else _plural(large)}"
        single = self._random.choice((several, f"{'an' if large == 'hour' else 'a'} {large}", f"one {large}"))
        answer = f"1 {large} is {factor} {_plural(small)}{f': multiply {factor} by {count}' if count > 1 else ''}."
        return self._random.choice(FORMS["unit"]).format(smalls=_plural(small), n=single if count == 1 else several), answer

    def _typed(self, question: str) -> str:
        """The question as people type it."""
        if self._random.random() < 0.3:
            question = question[0].lower() + question[1:]
        if self._random.random() < 0.25:
            question = question.rstrip("?.")
        return question[0].upper() + question[1:] if self._random.random() < 0.5 else question


def _plural(unit: str) -> str:
    return _PLURALS.get(unit, unit + "s")


class Conversations:
    """Conversations as tokens: ids [N, length] and the mask of what the model has to write."""

    def __init__(self, tokenizer: Tokenizer, questions: Questions, length: int, seed: int) -> None:
        self._tokenizer, self._length, self._random = tokenizer, length, random.Random(seed)
        self._turns = questions.turns(held_out=False)

    def batch(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns int64 ids [count, length] and their bool mask; a conversation is cut at the length."""
        rows = [self._conversation() for _ in range(count)]
        return np.array([ids for ids, _ in rows], np.int64), np.array([mask for _, mask in rows], bool)

    def _conversation(self) -> tuple[list[int], list[bool]]:
        ids, mask = [2], [False]
        if self._random.random() < 0.1:
            self._add(ids, mask, f"<|turn>system\n{self._random.choice(WORDS['system'])}<turn|>\n", answer=False)
        while len(ids) < self._length:
            turn = next(self._turns)
            self._add(ids, mask, f"<|turn>user\n{turn.question}<turn|>\n<|turn>model\n", answer=False)
            self._add(ids, mask, f"{turn.answer}<turn|>", answer=True)
            self._add(ids, mask, "\n", answer=False)
        return ids[: self._length], mask[: self._length]

    def _add(self, ids: list[int], mask: list[bool], text: str, *, answer: bool) -> None:
        pieces = self._tokenizer.encode(text, add_special_tokens=False).ids
        ids += pieces
        mask += [answer] * len(pieces)
