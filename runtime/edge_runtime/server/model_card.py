"""What clients can learn about the model, in the formats of OpenAI, Anthropic, llama-server and Ollama."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from edge_runtime.bundle.manifest import Manifest
from edge_runtime.server.json_text import Json
from edge_runtime.session.row_equality import RowEquality

# The Ollama release whose API this server implements. Clients read it to learn which fields they may send.
OLLAMA_VERSION = "0.12.0"
_LATEST = ":latest"


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """The facts about a served model. `name` is its id for clients, `context` the tokens per request, `sessions` the concurrent requests.

    `trained_context` is the longest context that the model was trained for, in tokens; None if the bundle does not state it. `kernels` is
    the variant of this project's own kernels; None for the standard ones. `answers` says whether the model is instruction-tuned. `rows`
    says whether drafts and other requests can change greedy text; the server compares this when it starts. `fingerprint` is the
    `system_fingerprint` of responses.
    """

    name: str
    context: int
    trained_context: int | None
    sessions: int
    drafter: str
    kernels: str | None
    files_format: str
    template: str
    manifest: Manifest
    answers: bool
    rows: RowEquality
    fingerprint: str

    def is_called(self, name: object) -> bool:
        """Whether `name`, with or without Ollama's tag, is this model's."""
        return isinstance(name, str) and name.removesuffix(_LATEST) == self.name

    def models(self) -> Json:
        """Returns the list of /v1/models, for clients of OpenAI's and Anthropic's APIs."""
        return {"object": "list", "data": [self.model()], "has_more": False, "first_id": self.name, "last_id": self.name}

    def model(self) -> Json:
        """Returns the entry of /v1/models: the fields of OpenAI and Anthropic, vLLM's `max_model_len` and llama-server's `meta`."""
        facts = self.manifest.architecture
        meta = {
            "n_ctx": self.context,
            **({} if self.trained_context is None else {"n_ctx_train": self.trained_context}),
            "n_vocab": facts.vocab_size,
            "n_embd": facts.hidden_size,
            "n_params": facts.parameters,
            **self._drafting,
            "description": self.manifest.description,
            "answers": self.answers,
            "input_modalities": ["text", *(name for name, accepted in self._modalities.items() if accepted)],
        }
        return {
            "id": self.name,
            "object": "model",
            "created": int(self._created.timestamp()),
            "owned_by": "edge-mtp",
            "type": "model",
            "display_name": self.name,
            "created_at": self._created.astimezone(UTC).isoformat().replace("+00:00", "Z"),
            "lifecycle": "active",
            "max_input_tokens": self.context,
            "max_tokens": self.context,
            "max_model_len": self.context,
            "meta": meta,
        }

    def props(self) -> Json:
        """Returns llama-server's /props, as far as its fields apply here, with the drafter and the kernels."""
        return {
            "model_alias": self.name,
            "default_generation_settings": {"n_ctx": self.context},
            "total_slots": self.sessions,
            "chat_template": self.template,
            "modalities": {"vision": self._modalities["image"], "audio": self._modalities["audio"]},
            **self._drafting,
            "system_fingerprint": self.fingerprint,
        }

    def ollama_model(self) -> Json:
        """Returns the entry of /api/tags and /api/ps."""
        return {
            "name": f"{self.name}{_LATEST}",
            "model": f"{self.name}{_LATEST}",
            "modified_at": self._created.isoformat(),
            "expires_at": "9999-12-31T23:59:59Z",
            "size": sum(file.bytes for file in self.manifest.files),
            "size_vram": 0,
            "digest": "",
            "context_length": self.context,
            "details": self._details(),
        }

    def ollama_details(self) -> Json:
        facts = self.manifest.architecture
        return {
            "modelfile": "",
            "parameters": f"num_ctx {self.context}",
            "template": self.template,
            "modified_at": self._created.isoformat(),
            "details": self._details(),
            "model_info": {
                "general.architecture": "gemma4",
                "general.parameter_count": facts.parameters,
                "gemma4.context_length": self.context,
                "gemma4.embedding_length": facts.hidden_size,
                "gemma4.block_count": facts.layers,
                "edge_mtp.rows": self.rows.verdict,
            },
            "capabilities": ["completion", "tools", "thinking", *(["vision"] if self._modalities["image"] else [])],
        }

    def _details(self) -> Json:
        facts = self.manifest.architecture
        billions = facts.parameters / 1e9
        return {
            "parent_model": "",
            "format": self.files_format,
            "family": "gemma4",
            "families": ["gemma4"],
            "parameter_size": f"{billions:.1f}B" if billions >= 1 else f"{facts.parameters / 1e6:.1f}M",
            "quantization_level": next((file.quantization or "" for file in self.manifest.files if file.role == "target"), ""),
        }

    @property
    def _drafting(self) -> Json:
        """The drafter and the kernels in use, and whether they can change greedy text."""
        return {"drafter": self.drafter, "kernels": self.kernels, "rows": self.rows.to_json()}

    @property
    def _modalities(self) -> dict[str, bool]:
        """Which media a message can have in addition to text."""
        media = self.manifest.media
        return {"image": media is not None, "audio": media is not None and media.audio is not None}

    @property
    def _created(self) -> datetime:
        try:
            return datetime.fromisoformat(self.manifest.created_at)
        except ValueError:
            return datetime.fromtimestamp(0).astimezone()
