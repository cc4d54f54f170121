"""What a bundle says about generation holds on both backends: suppressed tokens never come out, and the sampling is the user's default."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from edge_runtime.bundle.bundle import open_bundle
from edge_runtime.bundle.manifest import GenerationDefaults, with_hash
from edge_runtime.cli.run import main
from edge_runtime.decoding.sampling import MODEL_SAMPLING, SamplingParams, default_sampling, over_defaults, sampling_sentence
from edge_runtime.errors import BundleError
from edge_runtime.server.requests.completions import read_completion
from edge_runtime.session.generation import GREEDY_PARAMS
from edge_runtime.session.open import open_session
from edge_runtime.text.constraints import Regex

PROMPT = "def area(self):\n    return "
SAMPLED = GenerationDefaults(temperature=1.0, top_k=64, top_p=0.95)
Bundles = Callable[..., Path]


@pytest.fixture
def bundle_saying(tmp_path: Path) -> Bundles:
    """Returns a function from a bundle and the keys of `generation` to a copy that has them."""

    def made(bundle: Path, **generation: Any) -> Path:
        copy = Path(shutil.copytree(bundle, tmp_path / f"bundle-{len(list(tmp_path.iterdir()))}", copy_function=shutil.copy))
        manifest = copy / "manifest.json"
        manifest.write_text(with_hash(json.loads(manifest.read_text()) | {"generation": generation}))
        return copy

    return made


@pytest.mark.parametrize("backend", ["llama", "onnx"])
def test_suppressed_tokens_never_come_out(
    backend: str, exported_pair: Path, onnx_pair: Callable[..., Path], bundle_saying: Bundles
) -> None:
    plain_bundle = exported_pair if backend == "llama" else onnx_pair("f32")
    requests: list[dict[str, Any]] = [
        {"draft_length": 0},
        {"draft_length": 4},
        {"draft_length": 4, "sampling": SamplingParams(temperature=1.0, seed=3)},
        {"draft_length": 4, "sampling": SamplingParams(temperature=1.0, seed=3), "acceptance": "coupled"},
        {"draft_length": 4, "sampling": SamplingParams(temperature=0.0, repetition_penalty=1.2)},
        {"draft_length": 4, "constraint": Regex("(?s:.{0,200})")},
    ]

    def emitted(folder: Path) -> list[list[int]]:
        with open_session(folder, backend=backend) as session:
            made = []
            for request in requests:
                session.target.rollback(0)
                generation = session.generate(PROMPT, max_tokens=20, **request)
                assert "".join(generation) is not None
                made.append(list(generation.tokens))
            return made

    before = emitted(plain_bundle)
    banned = sorted({token for tokens in before for token in tokens[:3]} - {1})
    after = emitted(bundle_saying(plain_bundle, suppress_tokens=banned))
    assert all(set(tokens) & set(banned) for tokens in before), "each request emits what is then suppressed"
    assert all(tokens and not set(tokens) & set(banned) for tokens in after)
    assert after[0] == after[1], "drafts change nothing"


def test_end_tokens_of_the_bundle_end_a_generation(exported_pair: Path, bundle_saying: Bundles) -> None:
    with open_session(exported_pair) as session:
        whole = session.generate(PROMPT, max_tokens=12)
        assert "".join(whole)
    with open_session(bundle_saying(exported_pair, end_tokens=[whole.tokens[4]])) as session:
        ended = session.generate(PROMPT, max_tokens=12)
        assert "".join(ended)
    assert ended.tokens == whole.tokens[: whole.tokens.index(whole.tokens[4]) + 1]
    assert ended.finish_reason == "stop"


def test_a_token_beyond_the_vocabulary_is_refused(exported_pair: Path, bundle_saying: Bundles) -> None:
    with pytest.raises(BundleError, match="the generation defaults name a token beyond the vocabulary"):
        open_bundle(bundle_saying(exported_pair, suppress_tokens=[1 << 30]))


def test_the_bundles_sampling_is_the_default_and_shown(exported_pair: Path, bundle_saying: Bundles) -> None:
    bundle = bundle_saying(exported_pair, temperature=1.0, top_k=64, top_p=0.95)

    def sentences(*words: str) -> str:
        result = CliRunner().invoke(main, ["generate", str(bundle), PROMPT, "--max-tokens", "4", *words])
        assert result.exit_code == 0, result.output
        return result.stderr

    says = "sampling as the model's generation_config says: "
    assert f"{says}temperature 1, top-k 64, top-p 0.95 (--temperature 0 is greedy)" in sentences()
    assert f"{says}temperature 0.5, top-k 64, top-p 0.95" in sentences("--temperature", "0.5")
    assert says not in sentences("--temperature", "0")
    assert says not in sentences("--verify-lossless")


def test_what_the_user_gives_counts() -> None:
    defaults = default_sampling(SAMPLED, GREEDY_PARAMS)
    assert defaults == SamplingParams(temperature=1.0, top_k=64, top_p=0.95)
    assert over_defaults(SamplingParams(temperature=0.0, seed=3), {"seed"}, defaults) == SamplingParams(top_k=64, top_p=0.95, seed=3)
    assert over_defaults(SamplingParams(temperature=0.7, top_k=0), {"temperature", "top_k"}, defaults) == SamplingParams(
        temperature=0.7, top_p=0.95
    )
    assert over_defaults(GREEDY_PARAMS, {"temperature"}, defaults) == GREEDY_PARAMS
    assert default_sampling(None, GREEDY_PARAMS) == GREEDY_PARAMS
    greedy = default_sampling(GenerationDefaults(temperature=0.0, top_k=64), MODEL_SAMPLING)
    assert (greedy, sampling_sentence(greedy)) == (GREEDY_PARAMS, "greedy")


def test_the_server_fills_in_what_a_request_lacks() -> None:
    defaults = default_sampling(SAMPLED, MODEL_SAMPLING)

    def drawn(**fields: Any) -> SamplingParams:
        choice = read_completion({"prompt": "x", **fields}).choices[0]
        return over_defaults(choice.sampling, choice.sampling_fields, defaults)

    assert drawn() == drawn(temperature=None) == defaults
    assert drawn(top_k=0, temperature=0.5) == SamplingParams(temperature=0.5, top_p=0.95)
    assert drawn(temperature=0).temperature == 0
