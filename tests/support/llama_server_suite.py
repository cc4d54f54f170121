"""A plug-in for llama-server's own tests, which run unchanged against `edge-run serve`: options become ours, texts may be any.

    pytest -p llama_server_suite tools/server/tests/unit      in llama.cpp's source, with BUNDLE in the environment

Servers with the same options are one process. What does not apply here is skipped, with its reason.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chat_server import Child

sys.modules.setdefault("wget", types.ModuleType("wget"))  # which loads models from a hub
sys.path.insert(0, str(Path.cwd()))
BUNDLE = "EDGE_MTP_SUITE_BUNDLE"
FILES = (
    "test_basic.py",
    "test_chat_completion.py",
    "test_compat_anthropic.py",
    "test_compat_oai_responses.py",
    "test_ctx_shift.py",
    "test_ignore_eos.py",
    "test_security.py",
    "test_tokenize.py",
    "test_tool_call.py",
)
_COUNTS = "counts of its own model's tokenizer"
_TEMPLATES = "prompts by templates of other models, which a bundle does not take"
_FIELDS = "a field of its own that says more about a request"
_NATIVE = "its own /completion says what was set"
_HUB = "a model or an image from a hub"
_PURPOSE = "differs on purpose: "
# Why a test does not apply, or those of its cases whose names begin so.
NOT_HERE = {
    "test_access_static_assets_without_api_key": "files of its own page",
    "test_anthropic_empty_messages": f"{_PURPOSE}no message is an error, as in Anthropic's API",
    "test_anthropic_thinking_history_in_count_tokens": _TEMPLATES,
    "test_anthropic_thinking_history_in_template": _TEMPLATES,
    "test_anthropic_tool_result_with_image": f"{_PURPOSE}an image for a model without an encoder is the client's error",
    "test_anthropic_vision_base64_with_multimodal_model": _HUB,
    "test_anthropic_vision_format_accepted": _HUB,
    "test_apply_chat_template": _TEMPLATES,
    "test_chat_completion": _COUNTS,
    "test_chat_completion_cached_tokens": _COUNTS,
    "test_chat_completion_stream": _COUNTS,
    "test_chat_completion_with_openai_library": "its fingerprint begins with b, ours with fp_",
    "test_chat_completion_with_timings_per_token": _FIELDS,
    "test_chat_template": _TEMPLATES,
    "test_chat_template_assistant_prefill": _TEMPLATES,
    "test_chat_template_continue_final_message_vllm_compat": _TEMPLATES,
    "test_cors_options[origin-Access-Control-Allow-Credentials": f"{_PURPOSE}keys are no cookies",
    "test_cors_options[web.mydomain.fr-Access-Control-Allow-Headers": f"{_PURPOSE}the headers that were asked for are repeated",
    "test_cors_options[web.mydomain.fr-Access-Control-Allow-Methods": f"{_PURPOSE}nothing is deleted here",
    "test_cors_origins_defaults_to_localhost_with_tools_enabled": "tools that a server runs",
    "test_cors_origins_localhost_rejects": f"{_PURPOSE}a website that is not allowed gets 403, not an answer that its browser hides",
    "test_cors_proxy_only_forwards_explicit_proxy_headers": "a proxy for tools that a server runs",
    "test_ctx_shift_disabled_long_prompt": _COUNTS,
    "test_ctx_shift_disabled_short_prompt": _COUNTS,
    "test_ctx_shift_disabled_stream": "its own model ends no answer before the limit",
    "test_ctx_shift_enabled": "a context does not shift here: the answer ends where it is full",
    "test_ignore_eos_false_no_logit_bias": _NATIVE,
    "test_ignore_eos_populates_logit_bias": _NATIVE,
    "test_invalid_chat_completion_req[messages7]": f"{_PURPOSE}two answers in a row are one conversation",
    "test_load_split_model": _HUB,
    "test_local_media_file[../../../tools-file:": "files that a server reads by their names",
    "test_logprobs_stream": f"{_PURPOSE}the first delta has empty text, as OpenAI's",
    "test_no_ui": "the chat page is always there",
    "test_responses_stream_with_llama_telemetry": _FIELDS,
    "test_return_progress": _FIELDS,
    "test_server_model_aliases_and_tags": "a bundle has one name",
    "test_server_models": "a bundle has one name",
    "test_server_multiple_addresses": "a server has one address",
    "test_server_props": "the path of a model, which clients need not know",
    "test_server_slots": "/slots is always there",
    "test_tokenize_with_bos": "the id of its own tokenizer",
    "test_tokenize_with_pieces": _FIELDS,
    "test_verbose_debug": _FIELDS,
}
_children: dict[tuple[str, ...], Child] = {}


def arguments(server: Any) -> tuple[str, ...]:
    """The options of `edge-run serve` for those of a test's server; a context is that of all sessions there, and of each here."""
    slots = server.n_slots or 1
    options = ["--sessions", str(slots), "--context", str((server.n_ctx or 4096) // slots)]
    if server.n_predict and server.n_predict > 0:
        options += ["--max-tokens", str(server.n_predict)]
    if server.api_key:
        options += ["--api-key", server.api_key]
    return (*options, "--allow-origin", server.cors_origins or "*")


def sent(path: str) -> str:
    """The path of a request here: the native /completion is that of OpenAI's API."""
    return "/v1/completions" if path in ("/completion", "/completions") else path


def received(body: Any) -> Any:
    """A response or a chunk as llama-server names it."""
    if isinstance(body, dict) and (error := body.get("error")) and error.get("code") == "context_length_exceeded":
        error["type"] = "exceed_context_size_error"
    for choice in body.get("choices", ()) if isinstance(body, dict) else ():
        if choice.get("delta", {}).get("role") and not choice["delta"]["content"]:
            choice["delta"]["content"] = None
        if "text" in choice:
            body["content"] = choice["text"]
    return body


def pytest_configure() -> None:
    """Has the tests start our server in place of theirs."""
    import utils

    def start(server: Any, timeout_seconds: int = 0) -> None:
        options = arguments(server)
        if options not in _children:
            _children[options] = Child(Path(os.environ[BUNDLE]), *options)
        server.server_port = int(_children[options].url.rpartition(":")[2])
        server.ready = True

    request, stream = utils.ServerProcess.make_request, utils.ServerProcess.make_stream_request

    def make_request(server: Any, method: str, path: str, data: Any = None, *rest: Any, **named: Any) -> Any:
        response = request(server, method, sent(path), data, *rest, **named)
        response.body = received(response.body)
        response.headers = {name.title(): value for name, value in response.headers.items()}  # a plain dict there
        return response

    def make_stream_request(server: Any, method: str, path: str, data: Any = None, *rest: Any, **named: Any) -> Iterator[Any]:
        try:
            yield from map(received, stream(server, method, sent(path), data, *rest, **named))
        except utils.ServerError as error:
            error.body = received(error.body)
            raise

    utils.ServerProcess.make_request, utils.ServerProcess.make_stream_request = make_request, make_stream_request
    utils.ServerProcess.start = start
    utils.ServerProcess.stop = lambda _: None
    utils.ServerPreset.load_all = staticmethod(lambda: None)
    utils.match_regex = lambda *_: True  # what a model of stories says


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out what does not apply."""
    for item in items:
        names = (item.name.partition("[")[0], *(name for name in NOT_HERE if "[" in name and item.name.startswith(name)))
        reason = next((NOT_HERE[name] for name in names if name in NOT_HERE), None)
        if reason is None and item.get_closest_marker("slow"):
            reason = "a model from a hub"
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def _children_end() -> Iterator[None]:
    yield
    for child in _children.values():
        child.end()
