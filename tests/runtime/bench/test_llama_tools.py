"""llama.cpp's tools as a side: what they are asked, what they print, and every way in which they fail."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench_records import PEER_PLAIN, fixed
from edge_bench.measure.records import DEFAULT, LLAMA_CPP, Variant
from edge_bench.measure.request import Prompt, prepare, shipped_prompts
from edge_bench.measure.runners import EdgeRunner, LlamaTools, llama_tools
from edge_runtime.bundle.bundle import open_bundle
from edge_runtime.errors import BackendError, RequestError
from edge_runtime.session.open import open_session

PROMPT = Prompt(domain="d", number=0, ids=(1, 2, 3), text="a text")
OUTPUT = """encoded    3 tokens in    0.150 seconds, speed: 20 t/s
decoded   20 tokens in    0.500 seconds, speed: 40 t/s
n_drafted = 30
n_predict = 20
n_accept  = 12"""
BENCHED = '[ { "avg_ts": 80.0 } ]'


@pytest.fixture
def tools(tmp_path: Path):
    """Makes stand-ins that note their arguments and print what they are told to."""
    if os.name != "posix":
        pytest.skip("the stand-ins are shell scripts")

    def make(speculative: str = f"cat >&2 <<'X'\n{OUTPUT}\nX", bench: str = f"echo '{BENCHED}'", repack: bool = True) -> LlamaTools:
        for name, body in (("llama-speculative-simple", speculative), ("llama-bench", bench)):
            path = tmp_path / name
            path.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >> "{tmp_path}/arguments"\n{body}\n')
            path.chmod(0o755)
        return LlamaTools(tools=tmp_path, target=Path("t.gguf"), drafter=Path("d.gguf"), context=512, threads=2, repack=repack)

    return make


def asked(tools: LlamaTools) -> str:
    return " ".join((tools.tools / "arguments").read_text().splitlines())


def test_a_fixed_length(tools):
    side = tools(repack=False)
    run = side.run(fixed(4, LLAMA_CPP), PROMPT, 20)
    assert (run.tokens, run.seconds, run.drafted, run.accepted, run.output) == (20, 0.5, 30, 12, None)
    assert (run.prefill_seconds, run.first_token_seconds) == (0.15, None), "its prefill leaves out the last row"
    assert "-m t.gguf -t 2 -ngl 0 -md d.gguf --spec-type draft-mtp --spec-draft-n-max 4 --temp 0 -c 512 -n 20" in asked(side)
    assert asked(side).endswith("-p a text --no-repack")


def test_its_default_length(tools):
    side = tools()
    side.run(Variant(side=LLAMA_CPP, drafter="dense", policy=DEFAULT), PROMPT, 20)
    assert "n-max" not in asked(side)
    assert "repack" not in asked(side)


def test_plain_decoding_at_the_prompts_depth(tools):
    side = tools()
    run = side.run(PEER_PLAIN, PROMPT, 20)
    assert (run.tokens, run.seconds, run.drafted) == (20, 0.25, 0)
    assert "-p 0 -n 20 -d 3 -r 1" in asked(side)
    assert run.first_token_seconds == pytest.approx(3 / 80), "the prefill of three tokens, with logits of the last"
    assert "-p 3 -n 0 -r 1" in asked(side)


@pytest.mark.parametrize("repack", [True, False])
def test_plain_decoding_takes_no_kernels_that_crash_here(tools, repack):
    side = tools(repack=repack)
    side.run(PEER_PLAIN, PROMPT, 20)
    assert asked(side).count("--repack 0") == (0 if repack else 2)


@pytest.mark.parametrize(
    ("speculative", "words"),
    [
        ("echo nothing", "no figures in 12 runs"),
        ("echo broken model >&2; exit 3", "ended with exit code 3: broken model"),
        ("echo 'decoded 0 tokens in 0.1 seconds n_drafted = 1 n_accept = 1'", "not supported"),
        ("echo 'decoded 9 tokens in 0.1 seconds n_drafted = 1 n_accept = 2'", "not supported"),
    ],
)
def test_a_tool_that_fails_says_so(tools, speculative, words):
    with pytest.raises(BackendError, match=words):
        tools(speculative).run(fixed(4, LLAMA_CPP), PROMPT, 20)


@pytest.mark.parametrize("printed", ["nothing", "[]", "[{}]", '[{"avg_ts": 0}]', '[{"avg_ts": null}]'])
def test_a_bench_without_figures_says_so(tools, printed):
    with pytest.raises(BackendError, match="printed no figures"):
        tools(bench=f"echo '{printed}'").run(PEER_PLAIN, PROMPT, 20)


def test_a_folder_without_tools_is_refused(tmp_path):
    with pytest.raises(RequestError, match="has no llama-speculative-simple"):
        LlamaTools(tools=tmp_path, target=Path("t"), drafter=Path("d"), context=512, threads=2, repack=True)


def test_a_tool_that_cannot_run_says_so(tools):
    side = tools()
    (side.tools / "llama-bench").chmod(0o644)
    with pytest.raises(BackendError, match=r"could not be started .*llama-bench can be run"):
        side.run(PEER_PLAIN, PROMPT, 20)


@pytest.mark.peer
def test_the_real_tools_on_the_reference_pair(exported_pair, probe_memory):
    folder = os.environ.get("EDGE_MTP_LLAMA_CPP_BIN")
    if not folder:
        pytest.skip("needs llama.cpp's tools (EDGE_MTP_LLAMA_CPP_BIN names their folder)")
    with open_session(exported_pair, threads=1, drafter="dense", check="none") as session:
        prompts = prepare(shipped_prompts(["code", "chat"], 1), session)
        side, ours = llama_tools(session.bundle, Path(folder), context=session.target.context, threads=1), EdgeRunner(session)
        for prompt in prompts:
            run = side.run(fixed(3, LLAMA_CPP), prompt, 32)
            mine = ours.run(fixed(3), prompt, 32)
            assert run.tokens >= 32
            # Its text may be cut elsewhere and its ties fall otherwise, but it drafts after the same prompt with the same drafter.
            assert abs(run.accepted / run.drafted - mine.accepted / mine.drafted) < 0.35
        assert side.run(PEER_PLAIN, prompts[0], 16).tokens == 16
        assert side.run(Variant(side=LLAMA_CPP, drafter="dense", policy=DEFAULT), prompts[0], 16).drafted > 0


def test_tools_that_die_of_repacked_weights_run_without(tools):
    side = tools(bench=f"case \"$*\" in *--repack*) echo '{BENCHED}' ;; *) kill -SEGV $$ ;; esac")
    assert not side.tried().repack
    assert side.tried().run(PEER_PLAIN, PROMPT, 20).seconds == 0.25
    assert tools().tried().repack


def test_tools_take_a_bundles_files_where_no_library_is_installed(tools, exported_pair):
    """As in a device package for onnxruntime alone."""
    side = tools()
    actual = llama_tools(open_bundle(exported_pair), side.tools, context=256, threads=1)
    assert (actual.repack, actual.context) == (True, 256)
    assert actual.target.is_file()
    assert actual.drafter.is_file()


def test_a_build_is_named_by_number_and_commit(tools):
    assert tools(bench="""echo '[{"build_number": 7, "build_commit": "0c1e570"}]'""").build() == "b7 (0c1e570)"
