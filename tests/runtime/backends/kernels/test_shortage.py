"""An operation of ggml whose work memory does not suffice: its result is no number and the graph is to end; the process lives on."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")

from edge_runtime.backends.kernels.ggml import failure_check
from edge_runtime.backends.llama.context import LlamaOptions
from edge_runtime.backends.llama.loader import llama_library
from edge_runtime.backends.llama.target import LlamaTarget
from edge_runtime.errors import BackendError

if llama_library().row_kernels is None:
    pytest.skip("no row kernels here", allow_module_level=True)
ATTENTION, F32, F16 = 74, 0, 1  # enum ggml_op, enum ggml_type


class Tensor(ctypes.Structure):
    """struct ggml_tensor."""


Tensor._fields_ = [
    ("type", ctypes.c_int),
    ("buffer", ctypes.c_void_p),
    ("ne", ctypes.c_int64 * 4),
    ("nb", ctypes.c_size_t * 4),
    ("op", ctypes.c_int),
    ("op_params", ctypes.c_int32 * 16),
    ("flags", ctypes.c_int32),
    ("src", ctypes.POINTER(Tensor) * 10),
    ("view_src", ctypes.c_void_p),
    ("view_offs", ctypes.c_size_t),
    ("data", ctypes.c_void_p),
    ("name", ctypes.c_char * 64),
    ("extra", ctypes.c_void_p),
    ("padding", ctypes.c_char * 8),
]


class Work(ctypes.Structure):
    """struct ggml_compute_params."""

    _fields_ = (
        ("thread", ctypes.c_int),
        ("threads", ctypes.c_int),
        ("size", ctypes.c_size_t),
        ("memory", ctypes.c_void_p),
        ("pool", ctypes.c_void_p),
        ("reference", ctypes.c_bool),
    )


def tensor(array: np.ndarray, *sources: Tensor) -> Tensor:
    """A tensor over the array, whose last dimension is ggml's first."""
    made = Tensor(type=F32 if array.dtype == np.float32 else F16, data=array.ctypes.data)
    made.ne[:], made.nb[:] = array.shape[::-1], array.strides[::-1]
    for place, source in enumerate(sources):
        made.src[place] = ctypes.pointer(source)
    return made


def method(instance: int, number: int, result: Any, *arguments: Any) -> Any:
    """The function of this number in the table of a C++ object of one base."""
    table = ctypes.cast(instance, ctypes.POINTER(ctypes.POINTER(ctypes.c_void_p)))[0]
    return ctypes.CFUNCTYPE(result, ctypes.c_void_p, *arguments)(table[number])


def attention(memory_bytes: int) -> tuple[bool, np.ndarray]:
    """Computes an attention of 3 rows with this much work memory; returns what ggml gets, and the result [3, 2, 8]."""
    out = np.zeros((1, 3, 2, 8), np.float32)
    queries = np.ones((1, 2, 3, 8), np.float32)
    # One head of keys: one piece of work, which asks no pool of threads for the next.
    rows = [np.ones((1, 1, 64, 8), np.float16) for _ in range(2)]
    mask = np.zeros((1, 1, 32, 64), np.float16)
    operands = [tensor(array) for array in (queries, *rows, mask)]
    operation = tensor(out, *operands)
    operation.op = ATTENTION
    operation.op_params[0] = int(np.float32(1).view(np.int32))
    types = llama_library().api._lib._Z39ggml_backend_cpu_get_extra_buffer_typesv
    types.restype = ctypes.POINTER(ctypes.POINTER(ctypes.POINTER(ctypes.c_void_p)))
    buffer_type = types()[0][0]  # the first one is ours: six functions, the device, the context
    extra = buffer_type[7]
    computes = method(extra, 3, ctypes.c_void_p, ctypes.c_void_p)(extra, ctypes.addressof(operation))
    assert computes, "the kernels do not take this attention"
    memory = np.zeros(memory_bytes + 64, np.uint8)
    work = Work(threads=1, size=memory_bytes, memory=memory.ctypes.data)
    done = method(computes, 3, ctypes.c_bool, ctypes.c_void_p, ctypes.c_void_p)(
        computes, ctypes.addressof(work), ctypes.addressof(operation)
    )
    return done, out[0]


def failed() -> bool:
    check = failure_check()
    check.restype = ctypes.c_bool
    return bool(check(None))


def test_enough_work_memory_fails_nothing() -> None:
    done, out = attention(1 << 20)
    assert done
    assert (out == 1).all()
    assert not failed()


@pytest.mark.parametrize("size", [0, 100])
def test_too_little_work_memory_is_reported_once(size: int) -> None:
    done, out = attention(size)
    assert done, "ggml would compute it by its own operation"
    assert np.isnan(out).all()
    assert failed()
    assert not failed()


def test_a_graph_ends_after_an_operation_that_failed(quantized_pair: Any) -> None:
    options = LlamaOptions(context=64, threads=1, batch=64, draft=False)
    path = next(quantized_pair.glob("target*.gguf"))
    with LlamaTarget(path, options) as target:
        target.verify([2, 5])
        expected = np.array(target.verify([6]))
        target.rollback(2)
        attention(0)
        with pytest.raises(BackendError, match="code 2, an operation of the row kernels had no work memory"):
            target.verify([6])
        assert np.array_equal(target.verify([6]), expected)
