"""Listings of repositories as they are published: the pair that a name means, by llama.cpp's rules.

File names: unsloth's, ggml-org's, bartowski's and Google's repositories as of November 2026, shortened.
"""

from __future__ import annotations

import pytest

from edge_export.checkpoint.published.gguf_listing import drafter_file, quantization_tag, target_file

UNSLOTH = [
    "gemma-4-E2B-it-BF16.gguf",
    "gemma-4-E2B-it-Q4_0.gguf",
    "gemma-4-E2B-it-Q4_K_M.gguf",
    "gemma-4-E2B-it-Q8_0.gguf",
    "gemma-4-E2B-it-UD-Q4_K_XL.gguf",
    "mmproj-BF16.gguf",
    "mmproj-F16.gguf",
    "mtp-gemma-4-E2B-it.gguf",
]
LARGE = [
    "BF16/gemma-4-26B-A4B-it-BF16-00001-of-00002.gguf",
    "BF16/gemma-4-26B-A4B-it-BF16-00002-of-00002.gguf",
    "MTP/mtp-gemma-4-26B-A4B-it-BF16.gguf",
    "MTP/mtp-gemma-4-26B-A4B-it-Q8_0.gguf",
    "gemma-4-26B-A4B-it-Q4_K_M.gguf",
    "mtp-gemma-4-26B-A4B-it.gguf",
]
QAT = ["gemma-4-E2B-it-qat-UD-Q4_K_XL.gguf", "mmproj-F16.gguf", "mtp-gemma-4-E2B-it.gguf"]
GGML = ["gemma-4-E2B-it-BF16.gguf", "gemma-4-E2B-it-Q4_0.gguf", "gemma-4-E2B-it-Q8_0.gguf", "mmproj-gemma-4-E2B-it-BF16.gguf"]
GOOGLE = ["gemma-4-E2B_q4_0-it.gguf", "gemma-4-E2B-it-mmproj.gguf"]
FOLDERS = ["Q4_0/x-Q4_0.gguf", "Q4_0/mtp-x-Q4_0.gguf", "Q8_0/x-Q8_0.gguf", "Q8_0/mtp-x-Q8_0.gguf", "mtp-x-F16.gguf"]
OURS = ["gemma-4-E2B-it-Q4_K_M.gguf", "mtp-gemma-4-E2B-it-Q8_0.gguf", "mtp-gemma-4-E2B-it-Q8_0.gguf_head", "mmproj-gemma-4-E2B-it-F16.gguf"]
ASSISTANT = ["gemma-4-E2B-it-Q8_0.gguf", "gemma-4-E2B-it-assistant-Q8_0.gguf"]


@pytest.mark.parametrize(
    ("files", "tag", "target", "drafter"),
    [
        (UNSLOTH, None, "gemma-4-E2B-it-Q4_K_M.gguf", "mtp-gemma-4-E2B-it.gguf"),
        (UNSLOTH, "q4_0", "gemma-4-E2B-it-Q4_0.gguf", "mtp-gemma-4-E2B-it.gguf"),
        (UNSLOTH, "UD-Q4_K_XL", "gemma-4-E2B-it-UD-Q4_K_XL.gguf", "mtp-gemma-4-E2B-it.gguf"),
        (UNSLOTH, "Q5_0", None, "mtp-gemma-4-E2B-it.gguf"),
        (LARGE, None, "gemma-4-26B-A4B-it-Q4_K_M.gguf", "mtp-gemma-4-26B-A4B-it.gguf"),
        (LARGE, "BF16", "BF16/gemma-4-26B-A4B-it-BF16-00001-of-00002.gguf", "mtp-gemma-4-26B-A4B-it.gguf"),
        (LARGE[:-1], None, "gemma-4-26B-A4B-it-Q4_K_M.gguf", "MTP/mtp-gemma-4-26B-A4B-it-Q8_0.gguf"),
        (QAT, None, "gemma-4-E2B-it-qat-UD-Q4_K_XL.gguf", "mtp-gemma-4-E2B-it.gguf"),
        (GGML, None, "gemma-4-E2B-it-Q8_0.gguf", None),
        (["google_gemma-4-E2B-it-Q4_0.gguf"], None, "google_gemma-4-E2B-it-Q4_0.gguf", None),
        (GOOGLE, None, "gemma-4-E2B_q4_0-it.gguf", None),
        (GOOGLE, "Q5_0", None, None),
        (FOLDERS, "Q8_0", "Q8_0/x-Q8_0.gguf", "Q8_0/mtp-x-Q8_0.gguf"),
        (OURS, None, "gemma-4-E2B-it-Q4_K_M.gguf", "mtp-gemma-4-E2B-it-Q8_0.gguf"),
        (ASSISTANT, None, *ASSISTANT),
        ([], None, None, None),
    ],
)
def test_a_name_means_a_pair(files: list[str], tag: str | None, target: str | None, drafter: str | None) -> None:
    assert target_file(files, tag) == target
    assert drafter_file(files, target, tag) == drafter


def test_the_nearest_bits_count_where_no_tag_does() -> None:
    drafters = ["mtp-x-BF16.gguf", "mtp-x-Q8_0.gguf", "mtp-x-Q4_0.gguf"]
    chosen = {tag: drafter_file(drafters, f"x-{tag}.gguf") for tag in ("Q4_K_M", "Q8_0", "F16", "Q5_0")}
    assert chosen == {"Q4_K_M": "mtp-x-Q4_0.gguf", "Q8_0": "mtp-x-Q8_0.gguf", "F16": "mtp-x-BF16.gguf", "Q5_0": "mtp-x-Q4_0.gguf"}


def test_a_tag_is_the_last_part_of_a_name() -> None:
    names = {"a-Q4_0.gguf": "Q4_0", "a.F16.gguf": "F16", "a-BF16-00001-of-00002.gguf": "BF16", "a.gguf": None}
    assert {name: quantization_tag(name) for name in names} == names
