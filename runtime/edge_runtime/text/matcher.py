"""llguidance in child processes with limits: a host process builds the token table once, and each constraint has a child for its matcher.

This module has both ends of the messages. It is the only one that imports the library.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from edge_devices.children import limit_step
from edge_devices.fork_host import Child, ChildError, Host, receive, send
from edge_runtime.errors import RequestError

Result = TypeVar("Result")

MEMORY_BYTES = 640 << 20
# A mask of a constraint within the limits took at most 14 ms on a server. The slowest phones are about 15 times slower.
COMPILE_SECONDS, STEP_SECONDS = 5.0, 0.5
# The average time allowed for a step, and the most unused time that may be saved up for slow steps. Each step delays a round for all of a
# server's clients.
MEAN_STEP_SECONDS, LEFT_SECONDS = 0.03, 5.0
_SHORTEST_SECONDS = 0.001  # 0 would mean no limit
_STACK_BYTES = 64 << 20
COMPILE, MASK, VALIDATE, CONSUME, ROLL_BACK, ACCEPTING = b"CMVTRA"
FAILED, STOPPED = 1, 2
# Flags and a number. The mask or the error message follows.
ANSWER = struct.Struct("<Bi")
_COUNTS = struct.Struct("<III")
_MEGABYTES = MEMORY_BYTES >> 20
_TOO_MUCH = f"compiling it takes more than {COMPILE_SECONDS:g} s of processor time or {_MEGABYTES} MB; simplify it"
_STEP_TOO_MUCH = (
    f"a step of it takes more than {STEP_SECONDS:g} s of processor time, or many of them {MEAN_STEP_SECONDS:g} s each,"
    f" or all of it {_MEGABYTES} MB; simplify it"
)


def llguidance_module() -> Any:
    """The llguidance module. Raises ImportError if it is not installed."""
    import llguidance

    return llguidance


def lark_from_gbnf(text: str) -> str:
    """Converts a GBNF grammar to the library's dialect of Lark. Raises RequestError."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(text))
    except RecursionError:
        raise RequestError("the grammar is nested too deeply; give its inner parts names") from None
    except Exception as error:  # noqa: BLE001 - the converter raises plain Exception for a rule that is missing or named twice
        raise RequestError(f"the grammar is not valid GBNF: {error}") from None


def packed_setup(pieces: list[bytes], ends: list[int], slices: list[str]) -> bytes:
    """Returns the first message to the host: the text of each token, the end tokens, and the library's slices."""
    joined = "\x00".join(slices).encode()
    numbers = struct.pack(f"<{len(ends) + len(pieces)}I", *ends, *map(len, pieces))
    return b"".join((_COUNTS.pack(len(pieces), len(ends), len(joined)), numbers, joined, *pieces))


def prepare(setup: bytes) -> tuple[Any, Any]:
    """Returns the library and the tokenizer from the message that `packed_setup` made."""
    count, end_count, slice_bytes = _COUNTS.unpack_from(setup)
    numbers = struct.unpack_from(f"<{end_count + count}I", setup, _COUNTS.size)
    place = _COUNTS.size + 4 * len(numbers)
    slices = setup[place : place + slice_bytes].decode().split("\x00")
    place, tokens = place + slice_bytes, []
    for size in numbers[end_count:]:
        tokens.append(setup[place : place + size])
        place += size
    ends = list(numbers[:end_count])
    llguidance = llguidance_module()
    return llguidance, new_tokenizer(llguidance, tokens, ends, slices)


def new_tokenizer(llguidance: Any, tokens: list[bytes], ends: list[int], slices: list[str]) -> Any:
    """Returns the library's tokenizer, which copies the tokens."""
    pieces = _Pieces(tokens, ends)
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(pieces), eos_token=ends, slices=slices)


def new_matcher(llguidance: Any, tokenizer: Any, grammar: str) -> Any:
    """Returns the library's matcher for a grammar in its dialect of Lark."""
    limits = llguidance.LLParserLimits(verbose_errors=False)
    return llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)


def on_deep_stack(work: Callable[[], Result]) -> Result:
    """Runs `work` in a thread with a stack deep enough for all grammars within the limits in `constraints`. Returns its result."""
    before = threading.stack_size(_STACK_BYTES)
    try:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(work).result()
    finally:
        threading.stack_size(before)


def serve(shared: tuple[Any, Any], connection: socket.socket) -> None:
    """Compiles the grammar in the first message, and answers the calls that follow."""
    first = receive(connection)
    limit_step(COMPILE_SECONDS)
    matcher = on_deep_stack(lambda: new_matcher(*shared, first[1:].decode()))
    _reply(connection, matcher, 0, b"")
    left = LEFT_SECONDS
    while True:
        limit_step(0)
        message = receive(connection)
        limit_step(min(STEP_SECONDS, max(left, _SHORTEST_SECONDS)))
        begin = time.process_time()
        number, data = _call(matcher, message[0], message[1:])
        _reply(connection, matcher, number, data)
        left = min(LEFT_SECONDS, left + MEAN_STEP_SECONDS - (time.process_time() - begin))


def _call(matcher: Any, operation: int, body: bytes) -> tuple[int, bytes]:
    if operation == MASK:
        return 0, matcher.compute_bitmask()
    if operation == ACCEPTING:
        return int(matcher.is_accepting()), b""
    numbers = list(struct.unpack(f"<{len(body) // 4}I", body))
    if operation == VALIDATE:
        return matcher.validate_tokens(numbers), b""
    if operation == CONSUME:
        return int(matcher.consume_tokens(numbers)), b""
    return int(matcher.rollback(numbers[0])), b""


def _reply(connection: socket.socket, matcher: Any, number: int, data: bytes) -> None:
    failed = matcher.is_error()
    flags = (FAILED if failed else 0) | (STOPPED if matcher.is_stopped() else 0)
    send(connection, ANSWER.pack(flags, number) + (matcher.get_error().encode("utf-8", "replace")[: 1 << 16] if failed else data))


class _Pieces:
    """The tokenizer's interface that llguidance needs."""

    def __init__(self, tokens: list[bytes], ends: list[int]) -> None:
        self.eos_token_id, self.bos_token_id = min(ends), None
        self.special_token_ids: list[int] = []
        self.tokens = tokens

    def __call__(self, text: str) -> list[int]:
        """Never called: tokenizing would be needed only if tokens were forced."""
        raise NotImplementedError


class Matcher:
    """The parent's end of a matcher in a child, with the methods of llguidance's matcher.

    It raises nothing. A failed matcher stays failed, and `get_error` says why.
    """

    def __init__(self, processes: Host, grammar: str) -> None:
        self._child: Child = processes.new_child()
        self._error = ""
        self._stopped = False
        self._ask(COMPILE, grammar.encode("utf-8", "replace"), _TOO_MUCH)

    def is_error(self) -> bool:
        return bool(self._error)

    def get_error(self) -> str:
        return self._error

    def is_stopped(self) -> bool:
        return self._stopped

    def is_accepting(self) -> bool:
        """Whether the text could end here."""
        return bool(self._ask(ACCEPTING)[0])

    def compute_bitmask(self) -> bytes:
        """Returns one bit per token: whether it may follow."""
        return self._ask(MASK)[1]

    def validate_tokens(self, tokens: Sequence[int]) -> int:
        """Returns how many of the tokens, from the first on, may follow."""
        return self._ask(VALIDATE, _packed(tokens))[0]

    def consume_tokens(self, tokens: Sequence[int]) -> bool:
        """Adds tokens. An invalid token makes the matcher fail."""
        return bool(self._ask(CONSUME, _packed(tokens))[0])

    def rollback(self, count: int) -> bool:
        """Removes the newest tokens."""
        return bool(self._ask(ROLL_BACK, _packed([count]))[0])

    def _ask(self, operation: int, body: bytes = b"", otherwise: str = _STEP_TOO_MUCH) -> tuple[int, bytes]:
        if self._error:
            return 0, b""
        try:
            answer = self._child.ask(bytes([operation]) + body)
            flags, number = ANSWER.unpack_from(answer)
            data = answer[ANSWER.size :]
        except (ChildError, struct.error):
            self._error, self._stopped = otherwise, True
            return 0, b""
        self._stopped = bool(flags & STOPPED)
        if flags & FAILED:
            self._error = data.decode("utf-8", "replace") or "the library failed"
            self._child.close()
            return 0, b""
        return number, data


def _packed(numbers: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)
