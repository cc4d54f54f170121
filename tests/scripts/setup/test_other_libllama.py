"""Another wheel's llama.cpp: what of its structures differs from those that the runtime fills is told by name."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from other_libllama import STRUCTURES, bound, declared, differences, main

HEADER = """
typedef struct llama_batch {
    int32_t n_tokens;
    llama_token  *  token;
    int8_t flags[4];
} llama_batch;

struct llama_context_params {
    uint32_t n_ctx;
    size_t more;
    ggml_abort_callback abort_callback;
};
"""


def test_fields_are_compared_by_name_and_order() -> None:
    there = declared(HEADER)
    assert there == {"llama_batch": ["n_tokens", "token", "flags"], "llama_context_params": ["n_ctx", "more", "abort_callback"]}
    assert differences(there, there) == []
    ours = {
        "llama_batch": ["token", "n_tokens", "flags"],
        "llama_context_params": ["n_ctx", "abort_callback", "ours"],
        "llama_model_params": ["devices"],
    }
    assert differences(there, ours) == [
        "llama_batch has its fields in another order",
        "llama_context_params also has more and lacks ours",
        "llama_model_params is not declared",
    ]


def test_a_wheel_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    api = pytest.importorskip("llama_cpp.llama_cpp", reason="needs edge-mtp[llama]")
    assert all(bound(api)[name] for name in STRUCTURES)
    before = sorted(path.name for path in Path(api._base_path).iterdir())
    wheel = tmp_path / "other.whl"
    with zipfile.ZipFile(wheel, "w") as written:
        written.writestr("other/_cffi_bindings.py", HEADER)
        written.writestr("other/libllama.so", b"no library")
    done = CliRunner().invoke(main, [str(wheel)])
    assert done.exit_code == 1
    assert "llama_context_params also has more and lacks " in done.output
    assert "libllama.so does not load here: " in done.output
    assert sorted(path.name for path in Path(api._base_path).iterdir()) == before
