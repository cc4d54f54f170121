"""A request's memory goes with its last use: nothing of it waits for the garbage collector, and no library keeps its text."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.decoding.sampling import SamplingParams
from edge_runtime.session.open import open_session
from edge_runtime.session.session import Session

# Different lengths of arrays that a request of 40 tokens may hand to llama.cpp.
LENGTHS = 8
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "plain": {"draft_length": 0},
    "drafts": {"draft_length": 4},
    "sampled": {"sampling": SamplingParams(temperature=0.9, top_p=0.95, seed=1), "draft_length": 3},
    "coupled": {"sampling": SamplingParams(temperature=0.9, seed=1), "acceptance": "coupled", "draft_length": 3},
    "stop": {"stop": ("return",)},
    "reused": {"reuse_prefix": True},
}


@pytest.fixture(scope="module", params=["llama", "onnx"])
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    if request.param == "llama":
        folder: Path = request.getfixturevalue("exported_pair")
    else:
        folder = request.getfixturevalue("onnx_pair")("int4")
    with open_session(folder, backend=request.param, context=256, threads=1) as opened:
        gc.collect()
        gc.freeze()  # what other tests left need not be looked through in each collection, which takes a second
        yield opened
        gc.unfreeze()


@pytest.mark.parametrize("kind", REQUESTS)
def test_nothing_of_a_request_is_left_to_the_garbage_collector(kind: str, session: Session) -> None:
    def request(prompt: str) -> weakref.ref[Any]:
        generation = session.generate(prompt, max_tokens=40, **REQUESTS[kind])
        generation.text()
        return weakref.ref(generation)

    request("def area(r):")  # what is made once is made now
    gc.collect()
    gc.disable()
    try:
        request("class Stack:")
        gc.collect()  # types of ctypes that went with the last collection, if any, are there again
        for prompt in ("import os\n", "class Stack:", "def add(a, b):"):
            assert request(prompt)() is None
        gc.set_debug(gc.DEBUG_SAVEALL)
        request("for line in lines:")
        gc.collect()
        left = [type(result).__name__ for result in gc.garbage]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    # An array's type is made once for each length between two collections, and how long batches are depends on what is measured.
    assert not [name for name in left if name not in ("PyCArrayType", "StgDict", "getset_descriptor", "tuple", "dict")]
    assert left.count("PyCArrayType") <= LENGTHS


def test_the_tokenizer_library_keeps_no_prompts(onnx_pair: Callable[..., Path]) -> None:
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        pytest.skip("only the GNU C library tells how much is allocated")

    class Info(ctypes.Structure):
        """Ten sizes, of which the eighth is what malloc has given out (malloc.h)."""

        _fields_ = (("others", ctypes.c_size_t * 7), ("used", ctypes.c_size_t), ("rest", ctypes.c_size_t * 2))

    mallinfo.restype = Info
    with open_session(onnx_pair("int4"), backend="onnx", context=256, threads=1) as session:
        session.vocabulary.encode("x" * 200)
        before = mallinfo().used
        for number in range(2000):
            session.vocabulary.encode(f"{number:0200}")
        assert mallinfo().used - before < 1 << 20
