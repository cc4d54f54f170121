"""The model card of a bundle, its presets for llama.cpp's server and Ollama, and its upload to the hub."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_devices.errors import errors_as, markdown_text, one_line
from edge_devices.files.limited_read import read_at_most
from edge_export.checkpoint.hub_client import Repository, hub_errors, upload_files
from edge_export.errors import CheckpointError, ExportError
from edge_export.output import CARD_NAME, MODELFILE_NAME, PRESET_NAME
from edge_runtime.bundle.bundle import SIGNATURE_NAME, Quality, exported_quality, hub_repository, open_bundle
from edge_runtime.bundle.manifest import FIGURES_OF, MANIFEST_NAME, MEDIA_ENCODER, BundleFile, Manifest, files_key
from edge_runtime.config.settings import CONFIG_NAME

_APACHE = "google/gemma-4-"
_UNMEASURED = """## On devices

Not measured: speed, acceptance by kind of text, cost curve, joules per token. `edge-bench run FOLDER` measures them.
"""


def card(manifest: Manifest, figures: Sequence[str] = (), repository: str | None = None) -> str:
    """Returns the model card.

    `repository` is where the bundle is published; None makes the card for the bundle's folder. Every card has what the export measured. A
    published one can also have `figures`, which are sections about devices.
    """
    parts = [
        _metadata(manifest),
        f"# {markdown_text(title_of(manifest))}: a model and its drafter\n",
        f"{_sentence(manifest)}\n",
        "| file | what | weights | bytes |\n|:--|:--|:--|--:|",
        "\n".join(map(_file_row, manifest.files)) + "\n",
        *_usage(manifest, repository),
        *_quality(manifest),
        *(figures or [_UNMEASURED]),
        f"Written by {markdown_text(manifest.created_by)} at {markdown_text(manifest.created_at)}.\n",
    ]
    return "\n".join(parts)


def _file_row(entry: BundleFile) -> str:
    cells = (entry.path, entry.role, entry.weights, f"{entry.bytes:,}")
    return f"| {' | '.join(map(markdown_text, cells))} |"


def _usage(manifest: Manifest, repository: str | None) -> list[str]:
    formats, title = formats_of(manifest), _word(title_of(manifest))
    extra = "onnx" if "onnx" in formats else "llama"
    folder = "FOLDER" if repository is None else title
    fetch = "" if repository is None else f"    hf download {repository} --local-dir {folder}\n"
    # edge-mtp is not on a package index until its first release.
    install = f"    pip install '.[{extra},serve]'    # in a clone of edge-mtp\n"
    lines = ["## Run it\n", f"{install}{fetch}    edge-run chat {folder}\n    edge-run serve {folder}\n"]
    if "gguf" not in formats:
        return lines
    target, drafter, _ = gguf_files(manifest)
    return [
        *lines,
        "Other programs, in this folder:\n",
        f"    llama-server --models-preset {PRESET_NAME}\n"
        f"    llama-server -m {_word(target.path)} --spec-draft-model {_word(drafter.path)} --spec-type draft-mtp\n"
        f"    ollama create {title.lower()}\n",
    ]


def _word(text: str) -> str:
    """Quotes a name for a command that people paste into a shell."""
    return shlex.quote(one_line(text))


def _quality(manifest: Manifest) -> list[str]:
    heading = "## What the export measured\n"
    compared = list(_compared(manifest))
    if not compared:
        parity = manifest.parity or {}
        reason = str(parity.get("skipped") or parity.get("onnx", {}).get("skipped", "no reason given"))
        return [heading, f"Nothing: parity and KL with the unquantized checkpoint were not measured ({markdown_text(reason)}).\n"]
    day = markdown_text(manifest.created_at[:10])
    return [
        heading,
        f"Against the unquantized checkpoint in transformers (float32), on texts that nothing was fitted to, {day},"
        " on the machine of the export.\n",
        "| format | mean KL, nats | perplexity | unquantized | same first choice | drafts that agree |\n|:--|--:|--:|--:|--:|--:|",
        "\n".join(_parity_row(*each) for each in compared) + "\n",
        *(f"As {name} it {quality.words}.\n" for name, quality, _ in compared),
    ]


def _metadata(manifest: Manifest) -> str:
    """Returns the YAML at the beginning of a card. Names that are not hub names are left out."""
    origins = [manifest.sources[role].origin for role in ("target", "drafter")]
    bases = [name for origin in origins if ":" not in origin and (name := hub_repository(origin)) is not None]
    lines = ["---", "library_name: edge-mtp"]
    if len(bases) == len(origins):
        lines += ["base_model:", *(f"- {name}" for name in bases), "base_model_relation: quantized"]
        lines += ["license: apache-2.0"] if all(name.startswith(_APACHE) for name in bases) else []
    task = "text-generation" if manifest.media is None else "image-text-to-text"
    lines += [
        f"pipeline_tag: {task}",
        "tags:",
        *(f"- {tag}" for tag in (*formats_of(manifest), "speculative-decoding", "multi-token-prediction", "gemma4")),
    ]
    return "\n".join([*lines, "---", ""])


def _sentence(manifest: Manifest) -> str:
    sources = {role: markdown_text(source.origin) for role, source in manifest.sources.items()}
    text = f"Quantized from `{sources['target']}` and its drafter `{sources['drafter']}`, which proposes tokens that the model checks."
    return f"{text} The text stays the model's own." + (f" It is {markdown_text(manifest.description)}." if manifest.description else "")


def _compared(manifest: Manifest) -> Iterator[tuple[str, Quality, float | None]]:
    """Yields each format that was compared, its quality, and the share of its drafts that equal the reference's."""
    parity: dict[str, Any] = manifest.parity or {}
    for name, figures in (("GGUF", parity), ("ONNX", parity.get("onnx") or {})):
        if (quality := exported_quality(figures)) is not None:
            drafts = figures.get("drafts")
            agreement = drafts.get("quantized_agreement") if isinstance(drafts, dict) else None
            yield name, quality, agreement if isinstance(agreement, int | float) and 0 <= agreement <= 1 else None


def _parity_row(name: str, quality: Quality, drafts: float | None) -> str:
    return (
        f"| {name} | {quality.mean_kl:.3g} | {quality.perplexity:.4g} | {quality.reference_perplexity:.4g} |"
        f" {quality.greedy_agreement:.1%} | {'' if drafts is None else f'{drafts:.1%}'} |"
    )


def title_of(manifest: Manifest) -> str:
    """Returns the target's name: from its file if there is a GGUF, else from its source."""
    target = _gguf(manifest, "target")
    if target is None:
        return manifest.sources["target"].origin.rpartition("/")[2]
    return target.path.removesuffix(".gguf").removesuffix(f"-{(target.quantization or '').upper()}")


def formats_of(manifest: Manifest) -> list[str]:
    """Returns the formats of the target's files: gguf, onnx or both."""
    return sorted({entry.format for entry in manifest.files if entry.role == "target"} & {"gguf", "onnx"})


def gguf_files(manifest: Manifest) -> tuple[BundleFile, BundleFile, BundleFile | None]:
    """Returns the GGUF files: target, drafter, and the media encoder or None. Raises ExportError if one of the first two is missing."""
    target, drafter = _gguf(manifest, "target"), _gguf(manifest, "drafter")
    if target is None or drafter is None:
        raise ExportError("the manifest lists a target of GGUF without its drafter; export the bundle again")
    return target, drafter, _gguf(manifest, MEDIA_ENCODER)


def _gguf(manifest: Manifest, role: str) -> BundleFile | None:
    return next((entry for entry in manifest.files if (entry.role, entry.format) == (role, "gguf")), None)


# Files for other programs. Formats: llama.cpp's docs/preset.md and tools/server/README.md, Ollama's parser/parser.go. The manifest does not
# list these files, and edge-mtp does not read them, so users may change them.

# For our names of sampling defaults: llama-server's option, and Ollama's parameter.
_SAMPLING = {
    "temperature": ("temp", "temperature"),
    "top_k": ("top-k", "top_k"),
    "top_p": ("top-p", "top_p"),
    "min_p": ("min-p", "min_p"),
    "repetition_penalty": ("repeat-penalty", "repeat_penalty"),
}


def write_companions(folder: Path, manifest: Manifest) -> None:
    """Writes the model card into a bundle's folder, and the presets if there are GGUF files. Raises OSError."""
    texts = {CARD_NAME: card(manifest)}
    if "gguf" in formats_of(manifest):
        texts |= {PRESET_NAME: preset(manifest), MODELFILE_NAME: modelfile(manifest)}
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8", newline="\n")


def preset(manifest: Manifest) -> str:
    """Returns an INI file with one section for `llama-server --models-preset`. Paths are relative to the folder where the server starts."""
    target, drafter, encoder = gguf_files(manifest)
    lines = [
        "; llama.cpp: in this folder, llama-server --models-preset models.ini",
        "version = 1",
        "",
        f"[{title_of(manifest)}]",
        f"model = {target.path}",
        f"spec-draft-model = {drafter.path}",
        "spec-type = draft-mtp",
        f"spec-draft-n-max = {manifest.runtime.draft_length}",
        f"ctx-size = {manifest.runtime.context}",
        *([f"mmproj = {encoder.path}"] if encoder is not None else []),
        *(f"{_SAMPLING[name][0]} = {value:g}" for name, value in _sampling(manifest)),
    ]
    return "\n".join(lines) + "\n"


def modelfile(manifest: Manifest) -> str:
    """Returns a Modelfile for `ollama create`, with the drafter as DRAFT. Ollama reads the chat template from the GGUF itself."""
    target, drafter, encoder = gguf_files(manifest)
    lines = [
        f"# Ollama: in this folder, ollama create {title_of(manifest).lower()}",
        f"FROM ./{target.path}",
        *([f"FROM ./{encoder.path}"] if encoder is not None else []),
        f"DRAFT ./{drafter.path}",
        f"PARAMETER draft_num_predict {manifest.runtime.draft_length}",
        f"PARAMETER num_ctx {manifest.runtime.context}",
        *(f"PARAMETER {_SAMPLING[name][1]} {value:g}" for name, value in _sampling(manifest)),
    ]
    return "\n".join(lines) + "\n"


def _sampling(manifest: Manifest) -> Iterator[tuple[str, float]]:
    for name in _SAMPLING:
        if manifest.generation is not None and (value := getattr(manifest.generation, name)) is not None:
            yield name, value


_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_MAX_FIGURES = 1 << 20
# Files of a bundle that its manifest does not list but that are published too. Any other file in the folder is the user's own.
_BESIDE = (MANIFEST_NAME, SIGNATURE_NAME, CONFIG_NAME, PRESET_NAME, MODELFILE_NAME)


@dataclass(frozen=True, kw_only=True)
class Publication:
    """A checked bundle and its card. `files` maps names in the repository to size and, if known, sha256; the card is not one of them."""

    folder: Path
    repository: str
    title: str
    files: dict[str, tuple[int, str | None]]
    card: str

    def tree(self) -> list[tuple[str, int]]:
        """Returns the name and size of each file for the repository."""
        return sorted((name, size) for name, (size, _) in self._contents().items())

    def upload(self, *, private: bool) -> tuple[Repository, list[str]]:
        """Uploads the bundle, and then compares the repository's listing with it.

        The repository is created if it does not exist; `private` matters only then. Files that it has already are not sent again. Returns
        the repository, and the names of other files in it. If the hub refuses something or its listing differs, raises CheckpointError,
        which says that the command may be repeated.
        """
        with hub_errors(
            f"huggingface_hub, which would publish {self.repository}, is not installed",
            f"{self.repository} could not be published on the Hugging Face hub",
            "check the token, the name and the network and repeat the command, which goes on where it stopped",
        ):
            message = f"Publish {self.title} with edge-mtp"
            there = upload_files(self.folder, self.files, {CARD_NAME: self.card}, self.repository, private=private, message=message)
        for name, (size, sha256) in self._contents().items():  # the hub may have ignored a file
            stored, digest = there.files.get(name, (None, None))
            if size != stored or (sha256 and digest and sha256 != digest):
                state = "lacks" if name not in there.files else "holds other contents under the name of"
                raise CheckpointError(
                    f"the hub took the upload, but {self.repository} {state} {name}; look at its .gitignore and publish again"
                )
        return there, sorted(there.files.keys() - self.files.keys() - {CARD_NAME, ".gitattributes"})

    def _contents(self) -> dict[str, tuple[int, str | None]]:
        return self.files | {CARD_NAME: (len(self.card.encode()), None)}


def publication(folder: Path, repository: str, figures: Sequence[Path]) -> Publication:
    """Checks the repository's name, every byte of the bundle, and the figures, before anything is uploaded. Raises EdgeError."""
    if not _REPOSITORY.fullmatch(repository):
        raise CheckpointError(f"{repository!r} is no OWNER/NAME of a hub repository, such as me/gemma-4-E2B-it-edge-mtp; give that alone")
    manifest = open_bundle(folder, check="full").manifest
    if not {"target", "drafter"} <= manifest.sources.keys():
        raise ExportError(f"{folder}: the manifest does not name what target and drafter were made from; export the bundle again")
    files: dict[str, tuple[int, str | None]] = {entry.path: (entry.bytes, entry.sha256) for entry in manifest.files}
    for name in _BESIDE:
        if (folder / name).is_symlink():  # a link in a downloaded folder could point to any file of this machine
            raise ExportError(f"{folder / name} is a symbolic link; put the file itself into the folder, or remove the link")
        if (folder / name).is_file():
            files[name] = (folder / name).stat().st_size, None
    text = card(manifest, [_figures(path, manifest) for path in figures], repository)
    return Publication(folder=folder, repository=repository, title=one_line(title_of(manifest)), files=files, card=text)


def _figures(path: Path, manifest: Manifest) -> str:
    """Returns the section of figures in a file. Raises ExportError if it holds no figures, or those of another bundle."""
    with errors_as(ExportError, f"{path} cannot be read", "give a file that edge-bench run BUNDLE --markdown wrote", OSError, ValueError):
        text = read_at_most(path, _MAX_FIGURES).decode()
    first, _, section = text.partition("\n")
    if first != FIGURES_OF.format(files_key(manifest.files)):
        raise ExportError(f"{path} does not begin as figures of this bundle's files do; edge-bench run BUNDLE --markdown writes them")
    return section
