"""A plug-in for llama-server's own tests, which run unchanged against `edge-run serve`: models, options and fields become ours.

    pytest -p llama_server_suite tools/server/tests/unit      in llama.cpp's source, with a FOLDER for bundles in the environment

The words of an answer may be any: their models are trained on stories, and ours is not. Two differences on purpose are translated, since
so many cases rest on them: an image comes as its bytes, because this server fetches nothing, and an image for a model that takes none is
the client's error (400), not the server's (500). What does not apply here is left out, with its reason. What differs in a case that clients
of both servers meet is run all the same: where it passes after all, the list is wrong, and the run fails.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from changed_bundle import put_files
from chat_server import Child
from kept import PAIR, kept, shipped_bundle
from pictures import SCENES, photo, picture_bundle

sys.modules.setdefault("wget", types.ModuleType("wget"))  # which loads models from a hub
sys.path.insert(0, str(Path.cwd()))
FOLDER = "EDGE_MTP_SUITE_FOLDER"
FILES = """
    test_basic.py test_chat_completion.py test_compat_anthropic.py test_compat_oai_responses.py test_ctx_shift.py
    test_ignore_eos.py test_security.py test_tokenize.py test_tool_call.py test_vision_api.py
""".split()
# The cases that clients of both servers meet: these, and those of Anthropic's API. Others are about what llama-server alone has.
_MET = set(
    """
    test_chat_completion test_chat_completion_cached_tokens test_chat_completion_stream
    test_chat_completions_token_count test_chat_template_assistant_prefill
    test_chat_template_continue_final_message_mutual_exclusion test_chat_template_continue_final_message_vllm_compat
    test_completion_with_invalid_grammar test_completion_with_response_format test_context_size_exceeded
    test_context_size_exceeded_stream test_correct_api_key test_correct_api_key_anthropic_header test_cors_options
    test_cors_origins_localhost_reflects test_ctx_shift_disabled_long_prompt test_ignore_eos_false_no_logit_bias
    test_ignore_eos_populates_logit_bias test_invalid_chat_completion_req test_openai_library_correct_api_key
    test_server_models test_tokenize_detokenize test_vision_chat_completion test_vision_chat_completion_token_count
    """.split()
)
_NATIVE = "its own /completion repeats the settings of a request, and the other APIs do not"
_PARTS = "texts of one message follow each other, as Gemma's template has them; there an empty line is put between"
# Why a case that clients meet differs, by the beginning of its name.
DIFFERS = {
    "test_anthropic_empty_messages": "no message is an error, as in Anthropic's API",
    "test_chat_completion[None-Book-user_prompt": _PARTS,
    "test_chat_template_assistant_prefill[prefill": _PARTS,
    "test_cors_options[origin-Access-Control-Allow-Credentials": "keys are no cookies, and other websites must not use cookies of a proxy",
    "test_ignore_eos_": _NATIVE,
    "test_invalid_chat_completion_req[messages7]": "two answers in a row are one conversation",
}
_FIELDS = "a field of its own that says more about a request"
_TEMPLATES = "a template that llama.cpp has built in"
_EMBEDDINGS = "this model writes text"
# Why a test does not apply, or those of its cases whose names begin so.
NOT_HERE = {
    "test_access_static_assets_without_api_key": "files of its own page",
    "test_apply_chat_template": _TEMPLATES,
    "test_chat_completion_with_openai_library": "its fingerprint begins with b, ours with fp_",
    "test_chat_completion_with_timings_per_token": _FIELDS,
    "test_chat_template": _TEMPLATES,
    "test_cors_origins_defaults_to_localhost_with_tools_enabled": "tools that a server runs",
    "test_cors_origins_localhost_rejects": "a website that is not allowed gets 403, not an answer that its browser hides",
    "test_cors_proxy_only_forwards_explicit_proxy_headers": "a proxy for tools that a server runs",
    "test_ctx_shift_disabled_short_prompt": "counts of its own model's tokenizer",
    "test_ctx_shift_disabled_stream": "its own model ends no answer before the limit",
    "test_ctx_shift_enabled": "a context does not shift here: the answer ends where it is full",
    "test_load_split_model": "a model from a hub",
    "test_local_media_file[../../../tools-file:": "files that a server reads by their names",
    "test_logprobs_stream": "the first delta has empty text, as OpenAI's",
    "test_models_supports_multimodal_capability": "fields of its own about a model",
    "test_no_ui": "the chat page is always there",
    "test_responses_stream_with_llama_telemetry": _FIELDS,
    "test_return_progress": _FIELDS,
    "test_server_model_aliases_and_tags": "a bundle has one name",
    "test_server_multiple_addresses": "a server has one address",
    "test_server_props": "the path of a model, which clients need not know",
    "test_server_slots": "/slots is always there",
    "test_tokenize_with_bos": "the id of its own tokenizer",
    "test_tokenize_with_pieces": _FIELDS,
    "test_v1_models_supports_multimodal_capability": "fields of its own about a model",
    "test_verbose_debug": _FIELDS,
    "test_vision_completion": "prompts that are objects",
    "test_vision_embeddings": _EMBEDDINGS,
    "test_vision_embeddings_oai_content": _EMBEDDINGS,
}
# Their pictures, by their addresses: any will do.
_HUB = "https://huggingface.co/ggml-org/tinygemma3-GGUF/resolve/main/test/"
_PICTURES = {f"{_HUB}11_truck.png": photo(SCENES[0]), f"{_HUB}91_cat.png": photo(SCENES[1])}
_CONVERSATION = {"messages", "tools", "add_generation_prompt", "continue_final_message"}
_CONSTRAINED = {"response_format", "json_schema", "grammar", "tool_choice"}
_LIMITS = {"max_tokens", "max_completion_tokens", "n_predict"}
# Their test model has 512 pieces, most of them letters. Here these merges replace those of the shipped tokenizer, so that their prompts
# have as many tokens as there; the weights stay, and what they answer is no matter. Each word is built from its left or its right end, so
# that no step of it makes a piece of another text.
_MERGES = (
    "< |, | >, i m, a r, a n, t h, th e, ▁ the, ▁ i, ▁i s, W h, Wh a, Wha t, ▁ b, Y o, Yo u, ▁ ar, ▁ar e, W r, Wr i, Wri t, "
    "Writ e, ▁ f, ▁ c, + +, n g, c i, p l, pl a, pla t, plat e, m plate, e mplate"
)
_BUILT = [merge.split() for merge in _MERGES.split(", ")]
CHATML = (
    "{{ bos_token }}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_MOST_CHILDREN = 4
_children: dict[tuple[Path, tuple[str, ...]], Child] = {}


def bundle_of(server: Any) -> Path:
    """The bundle for the model of a test's server: that name for clients, that chat template or ChatML, and images or not."""
    template = server.chat_template if "{" in (server.chat_template or "") or " " in (server.chat_template or "") else None
    if server.chat_template_file:
        template = Path(server.chat_template_file).read_text(encoding="utf-8")
    media = "gemma3" in (server.model_hf_repo or "")
    made = picture_bundle() if media else _text_bundle()
    copy = Path(os.environ[FOLDER]) / hashlib.sha256(f"{made} {template}".encode()).hexdigest()[:12] / (server.model_alias or "model")
    if not copy.exists():
        shutil.copytree(made, copy)
        if not media:
            put_files(copy, lambda _: (template or CHATML).encode(), lambda file: file["role"] == "chat_template")
    return copy


def _text_bundle() -> Path:
    checkpoint = kept("letters", {"built": _BUILT}, _write_checkpoint)
    return shipped_bundle(target=str(checkpoint / "target"), drafter=str(checkpoint / "drafter"))


def _write_checkpoint(folder: Path) -> None:
    for half in ("target", "drafter"):
        shutil.copytree(PAIR / half, folder / half)
        _use_letters(folder / half / "tokenizer.json")


def _use_letters(path: Path) -> None:
    """Rewrites a tokenizer. Pieces that no merge makes any more get names that no text has: a text can be written in one way alone."""
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    used = {piece for a, b in _BUILT for piece in (a, b, a + b)}
    control = {token["content"] for token in tokenizer["added_tokens"]}
    kept_pieces = used | control | {piece for piece in vocabulary if len(piece) == 1 or re.fullmatch(r"<0x..>", piece)}
    free = [number for piece, number in vocabulary.items() if piece not in kept_pieces]
    pieces = {piece: number for piece, number in vocabulary.items() if piece in kept_pieces}
    missing = sorted(used - set(pieces))
    pieces |= dict(zip(missing, free, strict=False)) | {f"\u00a7{number}": number for number in free[len(missing) :]}
    tokenizer["model"] |= {"vocab": pieces, "merges": _BUILT}
    path.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")


def arguments(server: Any) -> tuple[str, ...]:
    """The options of `edge-run serve` for those of a test's server; a context is that of all sessions there, and of each here."""
    slots = server.n_slots or 1
    options = ["--sessions", str(slots), "--context", str((server.n_ctx or 4096) // slots)]
    if server.api_key:
        options += ["--api-key", server.api_key]
    return (*options, "--allow-origin", server.cors_origins or "*")


def sent(server: Any, path: str, data: Any) -> tuple[str, Any]:
    """A request as it is sent here: the native /completion is that of OpenAI's API, and an answer goes on to its limit, as theirs do.

    The limit of a server is one for requests without one there, and for all requests here.
    """
    path = "/v1/completions" if path in ("/completion", "/completions") else path
    if not isinstance(data, dict) or not ("/completions" in path or path == "/v1/messages"):
        return path, data
    messages = data.get("messages")
    for message in messages if isinstance(messages, list) else ():
        for part in message.get("content") or () if isinstance(message, dict) and isinstance(message.get("content"), list) else ():
            if (image := part.get("image_url")) and image["url"] in _PICTURES:
                image["url"] = "data:image/png;base64," + base64.b64encode(_PICTURES[image["url"]]).decode()
    own = {"ignore_eos": True} if not _CONSTRAINED & set(data) else {}
    if (server.n_predict or 0) > 0 and not _LIMITS & set(data):
        own["max_tokens"] = server.n_predict
    return path, {**own, **data}


def received(body: Any) -> Any:
    """A response or a chunk as llama-server names it."""
    if not isinstance(body, dict):
        return body
    if isinstance(error := body.get("error"), dict) and error.get("code") == "context_length_exceeded":
        error["type"] = "exceed_context_size_error"
    if "system_fingerprint" in body:
        body["system_fingerprint"] = body["system_fingerprint"].replace("fp_", "b")
    for choice in body.get("choices", ()):
        if choice.get("delta", {}).get("role") and not choice["delta"]["content"]:
            choice["delta"]["content"] = None
        if "text" in choice:
            body["content"] = choice["text"]
    return body


def prompt_of(server: Any, request: Any, data: dict[str, Any]) -> str:
    """The text that the model reads for a conversation: its tokens, as text again."""
    conversation = {name: value for name, value in data.items() if name in _CONVERSATION}
    tokens = request(server, "POST", "/tokenize", conversation).body["tokens"]
    return str(request(server, "POST", "/detokenize", {"tokens": tokens}).body["content"])


def _start(server: Any, timeout_seconds: int = 0) -> None:
    """Starts our server in place of theirs; those with the same model and options are one process."""
    key = (bundle_of(server), arguments(server))
    if key not in _children:
        if len(_children) == _MOST_CHILDREN:
            _children.pop(next(iter(_children))).end()
        _children[key] = Child(key[0], *key[1])
    _children[key] = _children.pop(key)  # the one that was used longest ago ends first
    server.server_port = int(_children[key].url.rpartition(":")[2])
    server.ready = True


def pytest_configure() -> None:
    """Has the tests start our server in place of theirs."""
    import utils

    request, stream, get = utils.ServerProcess.make_request, utils.ServerProcess.make_stream_request, requests.get

    def make_request(server: Any, method: str, path: str, data: Any = None, headers: Any = None, *rest: Any, **named: Any) -> Any:
        if path == "/apply-template":
            response = utils.ServerResponse()
            response.status_code, response.headers, response.body = 200, {}, {"prompt": prompt_of(server, request, data)}
            return response
        path, data = sent(server, path, data)
        response = request(server, method, path, data, headers, *rest, **named)
        response.body = received(response.body)
        if response.status_code == 400 and "image input is not supported" in str(response.body):
            response.status_code = 500
        if server.debug and response.status_code == 200 and "messages" in (data or {}):
            response.body["__verbose"] = {"prompt": prompt_of(server, request, data)}
        response.headers = {name.title(): value for name, value in response.headers.items()}  # a plain dict there
        if response.headers.get("Access-Control-Allow-Headers") == (headers or {}).get("Access-Control-Request-Headers"):
            response.headers["Access-Control-Allow-Headers"] = "*"  # all that were asked for
        return response

    def make_stream_request(server: Any, method: str, path: str, data: Any = None, *rest: Any, **named: Any) -> Iterator[Any]:
        path, data = sent(server, path, data)
        try:
            yield from map(received, stream(server, method, path, data, *rest, **named))
        except utils.ServerError as error:
            error.body = received(error.body)
            raise

    def get_picture(url: str, *rest: Any, **named: Any) -> Any:
        if url not in _PICTURES:
            return get(url, *rest, **named)
        return types.SimpleNamespace(content=_PICTURES[url], raise_for_status=lambda: None)

    requests.get = get_picture
    utils.ServerProcess.make_request, utils.ServerProcess.make_stream_request = make_request, make_stream_request
    utils.ServerProcess.start = _start
    utils.ServerProcess.stop = lambda _: None
    utils.ServerPreset.load_all = staticmethod(lambda: None)
    utils.match_regex = lambda *_: True  # what a model of stories says


def is_met(name: str, file: str, *, slow: bool) -> bool:
    return not slow and (file == "test_compat_anthropic.py" or name.partition("[")[0] in _MET)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out what does not apply, and expects what differs to fail."""
    for item in items:
        slow = item.get_closest_marker("slow") is not None
        if is_met(item.name, item.path.name, slow=slow):
            item.keywords["met"] = True
            why = next((reason for name, reason in DIFFERS.items() if item.name.startswith(name)), None)
            if why is not None:
                item.add_marker(pytest.mark.xfail(reason=why, strict=True))
            continue
        names = (item.name.partition("[")[0], *(name for name in NOT_HERE if "[" in name and item.name.startswith(name)))
        reason = "a model from a hub" if slow else next((NOT_HERE[name] for name in names if name in NOT_HERE), None)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    counts = {
        outcome: sum("met" in report.keywords for report in terminalreporter.getreports(outcome) if report.when == "call")
        for outcome in ("passed", "xfailed", "failed")
    }
    terminalreporter.write_line(
        f"met by clients: {sum(counts.values())} cases, {counts['passed']} pass, {counts['xfailed']} differ on purpose"
    )


@pytest.fixture(scope="session", autouse=True)
def _children_end() -> Iterator[None]:
    yield
    for child in _children.values():
        child.end()
