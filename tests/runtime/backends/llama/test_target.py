from __future__ import annotations

import os
import platform
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edge_runtime.backends.llama import loader
from edge_runtime.backends.llama.context import LlamaOptions, load_model
from edge_runtime.backends.llama.drafter import LlamaDrafter
from edge_runtime.backends.llama.pair import open_pair
from edge_runtime.backends.llama.target import LlamaTarget
from edge_runtime.errors import BackendError, RequestError

# Kernels differ by the number of rows and caches are float16; logits of the pair reach about 10.
LOGIT_TOLERANCE = 0.03
NEAR_TIE = 0.08


def options(**changes: Any) -> LlamaOptions:
    return LlamaOptions(**{"context": 1024, "threads": 1, "batch": 64, **changes})


def random_tokens(seed: int, count: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(300, 4096) for _ in range(count)]


@pytest.fixture(scope="module")
def opened(reference_pair: Any) -> Iterator[tuple[LlamaTarget, LlamaDrafter]]:
    target, drafter = open_pair(reference_pair.target, reference_pair.drafter, options())
    assert drafter is not None
    with target:
        yield target, drafter


@pytest.fixture
def target(opened: tuple[LlamaTarget, LlamaDrafter]) -> LlamaTarget:
    opened[0].rollback(0)
    return opened[0]


@pytest.fixture
def drafter(opened: tuple[LlamaTarget, LlamaDrafter]) -> LlamaDrafter:
    return opened[1]


def assert_same_logits(item: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> None:
    np.testing.assert_allclose(item, other, atol=LOGIT_TOLERANCE)
    top = np.sort(item, axis=1)
    clear = top[:, -1] - top[:, -2] > NEAR_TIE
    assert (item.argmax(1) == other.argmax(1))[clear].all()
    assert clear.any()


def test_a_failed_decode_leaves_the_cache_as_it_was(target: LlamaTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = random_tokens(12, 200)
    target.prefill(tokens[:20])
    right = target.verify(tokens[20:25]).copy()
    target.rollback(20)
    decode, calls = target.shared._api.llama_decode, []

    def fail_second(context: Any, batch: Any) -> int:
        calls.append(batch.n_tokens)
        return int(decode(context, batch)) if len(calls) == 1 else -3

    with monkeypatch.context() as patch:
        patch.setattr(target.shared._api, "llama_decode", fail_second)
        with pytest.raises(BackendError, match=r"failed on 64 tokens of the target with code -3, the computation failed"):
            target.prefill(tokens[20:])
    assert calls == [64, 64]
    assert target.length == 20
    assert target.hidden_row is None
    assert_same_logits(right, target.verify(tokens[20:25]))


def test_a_failed_draft_step_is_an_error(target: LlamaTarget, drafter: LlamaDrafter, monkeypatch: pytest.MonkeyPatch) -> None:
    target.prefill(random_tokens(13, 10))
    with monkeypatch.context() as patch:
        patch.setattr(target.shared._api, "llama_decode", lambda *_: 2)
        with pytest.raises(BackendError, match="failed on 1 tokens of the drafter with code 2"):
            drafter.draft(5, 1)


@pytest.mark.parametrize("wrong", [{"context": 0}, {"threads": 0}, {"batch": 16}, {"max_draft_length": 13}, {"max_draft_length": -1}])
def test_options_out_of_range(wrong: dict[str, int]) -> None:
    with pytest.raises(RequestError, match=r"-?[0-9]+"):
        options(**wrong)


def test_files_that_do_not_load(reference_pair: Any, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + b"\xff" * 100)
    with pytest.raises(BackendError, match=r"damaged.gguf has GGUF version"):
        LlamaTarget(damaged, options())
    with pytest.raises(BackendError, match="is not a file"):
        LlamaTarget(tmp_path / "missing.gguf", options())
    with pytest.raises(BackendError, match="has the architecture 'gemma4-assistant', not 'gemma4'"):
        LlamaTarget(reference_pair.drafter, options())
    with pytest.raises(RequestError, match="context 999999 is beyond"):
        LlamaTarget(reference_pair.target, options(context=999999))
    with pytest.raises(BackendError, match="has the architecture 'gemma4', not 'gemma4-assistant'"):
        open_pair(reference_pair.target, reference_pair.target, options())


def test_llama_cpp_still_says_that_it_could_not_allocate() -> None:
    """`load_model` chooses its advice by this word, since llama.cpp has no error code; see llama-model.cpp and ggml-backend.cpp."""
    pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")
    folder = Path(loader.llama_library().api._lib._name).parent
    texts = {b"unable to allocate %s buffer": "libllama", b"failed to allocate buffer of size": "libggml-base"}
    for text, stem in texts.items():
        (file, *_) = folder.glob(f"{stem}.*")
        assert text in file.read_bytes()


@pytest.mark.parametrize(("logged", "advice"), [("unable to allocate CPU buffer", "free some memory"), ("bad magic", "export it again")])
def test_the_advice_where_a_model_does_not_load(logged: str, advice: str) -> None:
    api = SimpleNamespace(llama_model_default_params=SimpleNamespace, llama_model_load_from_file=lambda *_: None)
    library = SimpleNamespace(api=api, log=SimpleNamespace(clear=lambda: None), quoted_error=lambda: f": {logged}")
    with pytest.raises(BackendError, match=f"{logged}; {advice}$"):
        load_model(library, Path("m.gguf"), options())


def test_a_drafter_of_another_target_is_refused(reference_pair: Any, target: LlamaTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "hidden_size", target.hidden_size * 2)
    with pytest.raises(BackendError, match=r"not a drafter of this model: the model's hidden size \d+ against \d+"):
        LlamaDrafter(reference_pair.drafter, target, options())


def test_a_target_without_a_drafter_keeps_no_hidden_rows(reference_pair: Any) -> None:
    target, drafter = open_pair(reference_pair.target, None, options(draft=False))
    with target:
        assert drafter is None
        target.prefill([5, 6, 7])
        assert np.isfinite(target.verify([8])).all()
        assert target.hidden_row is None


@pytest.mark.parametrize("version", ["0.3.35", "0.3.37", "0.4.0", "1.0"])
def test_other_library_versions_are_refused(version: str) -> None:
    with pytest.raises(BackendError, match=r"is .*, but the MTP interface is supported for 0.3.36 only; pip install 'edge-mtp\[llama\]'"):
        loader.check_version(version)


def test_a_missing_library_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(BackendError, match=r"llama-cpp-python is not installed .*; pip install 'edge-mtp\[llama\]'"):
        loader.llama_library.__wrapped__()


def test_chat_formats_and_caches_of_the_package_are_not_imported_and_can_be_afterwards() -> None:
    code = (
        "import sys\nfrom edge_runtime.backends.llama.loader import llama_library\n"
        "library = llama_library()\n"
        "assert not {'llama_cpp', 'llama_cpp.llama', 'jinja2', 'diskcache', 'numpy.ma', 'asyncio'} & set(sys.modules)\n"
        "import llama_cpp\n"
        "assert llama_cpp.Llama and llama_cpp.llama_cpp is library.api and llama_cpp.__version__ == library.version"
    )
    path = os.pathsep.join(sys.path)
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": path}, check=False).returncode == 0


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="other libraries of threads, or another time of a turn"
)
@pytest.mark.parametrize(("own", "spins"), [({}, "5000"), ({"OMP_WAIT_POLICY": "passive"}, "0"), ({"GOMP_SPINCOUNT": "77"}, "77")])
def test_threads_that_wait_sleep_soon_unless_the_user_says_how_long(own: dict[str, str], spins: str) -> None:
    pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")
    code = "from edge_runtime.backends.llama.loader import llama_library; llama_library()"
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_DISPLAY_ENV": "verbose", **own}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("this build of llama.cpp does not use libgomp")
    assert f"GOMP_SPINCOUNT = '{spins}'" in done.stderr
