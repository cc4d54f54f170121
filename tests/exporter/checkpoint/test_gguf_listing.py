"""Listings of repositories as they are published: the pair that a name means, by llama.cpp's rules.

File names: unsloth's, ggml-org's, bartowski's and Google's repositories as of November 2026, shortened.
"""

from __future__ import annotations

import pytest

from edge_export.checkpoint.hub import drafter_file, target_file

UNSLOTH = """
    gemma-4-E2B-it-BF16.gguf gemma-4-E2B-it-Q4_0.gguf gemma-4-E2B-it-Q4_K_M.gguf gemma-4-E2B-it-Q8_0.gguf
    gemma-4-E2B-it-UD-Q4_K_XL.gguf mmproj-BF16.gguf mmproj-F16.gguf mtp-gemma-4-E2B-it.gguf
""".split()
LARGE = """
    BF16/gemma-4-26B-A4B-it-BF16-00001-of-00002.gguf BF16/gemma-4-26B-A4B-it-BF16-00002-of-00002.gguf
    MTP/mtp-gemma-4-26B-A4B-it-BF16.gguf MTP/mtp-gemma-4-26B-A4B-it-Q8_0.gguf gemma-4-26B-A4B-it-Q4_K_M.gguf
    mtp-gemma-4-26B-A4B-it.gguf
""".split()
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
        # Words count in any case and between any marks, in the file's name or its folder's.
        (["MTP/g-it-Q8_0-MTP.gguf", "g-it-Q8_0.gguf", "g-it-UD-Q4_K_XL.gguf"], "Q8_0", "g-it-Q8_0.gguf", "MTP/g-it-Q8_0-MTP.gguf"),
        (["MTP/g-it-Q8_0-MTP.gguf", "g-it-UD-Q4_K_XL.gguf"], None, "g-it-UD-Q4_K_XL.gguf", "MTP/g-it-Q8_0-MTP.gguf"),
        (["MTP-g-it-Q8_0.gguf", "g-it-Q8_0.gguf"], "q8_0", "g-it-Q8_0.gguf", "MTP-g-it-Q8_0.gguf"),
        (["g-it.Mtp.Q8_0.gguf", "g-it.Q8_0.gguf"], "Q8_0", "g-it.Q8_0.gguf", "g-it.Mtp.Q8_0.gguf"),
        (["g_it_mtp_Q8_0.gguf", "g_it_Q8_0.gguf"], "Q8_0", "g_it_Q8_0.gguf", "g_it_mtp_Q8_0.gguf"),
        (["mtp/g-it-Q8_0.gguf", "g-it-Q8_0.gguf"], None, "g-it-Q8_0.gguf", "mtp/g-it-Q8_0.gguf"),
        (["g-it-Assistant/g-Q8_0.gguf", "g-it/g-Q4_0.gguf"], None, "g-it/g-Q4_0.gguf", "g-it-Assistant/g-Q8_0.gguf"),
        (["MTP-pair/g-it-Q4_0.gguf", "MTP-pair/g-it-mtp.gguf"], None, "MTP-pair/g-it-Q4_0.gguf", "MTP-pair/g-it-mtp.gguf"),
        (["MMPROJ-F16.gguf", "g-Imatrix.gguf", "g-it-Q5_K_M.gguf"], None, "g-it-Q5_K_M.gguf", None),
        # A tag is a whole word.
        (["g-BF16.gguf", "g-F16.gguf", "mtp-g-BF16.gguf", "mtp-g-F16.gguf"], "F16", "g-F16.gguf", "mtp-g-F16.gguf"),
        (["g-BF16.gguf", "mtp-g-F16.gguf"], "F16", None, "mtp-g-F16.gguf"),
        (["g-IQ4_0.gguf", "g-q4_0.gguf"], "Q4_0", "g-q4_0.gguf", None),
        (["g-Q4_K_M.gguf", "g-Q4_K_S.gguf"], "Q4_K", None, None),
        (["g-UD-Q4_K_XL.gguf", "g-Q4_K_XL.gguf"], "UD-Q4_K_XL", "g-UD-Q4_K_XL.gguf", None),
        (["Q4_0/model.gguf", "Q8_0/model.gguf", "Q8_0/model-mtp.gguf"], "q8_0", "Q8_0/model.gguf", "Q8_0/model-mtp.gguf"),
        (["g-1.5-Q4_0-00002-of-00002.gguf", "g-1.5-Q4_0-00001-of-00002.gguf"], "Q4_0", "g-1.5-Q4_0-00001-of-00002.gguf", None),
        (
            ["g-Q8_0.gguf", "mtp-g-Q8_0-00002-of-00002.gguf", "mtp-g-Q8_0-00001-of-00002.gguf"],
            "Q8_0",
            "g-Q8_0.gguf",
            "mtp-g-Q8_0-00001-of-00002.gguf",
        ),
    ],
)
def test_a_name_means_a_pair(files: list[str], tag: str | None, target: str | None, drafter: str | None) -> None:
    assert target_file(files, tag) == target
    assert drafter_file(files, target, tag) == drafter


def test_the_nearest_bits_count_where_no_tag_does() -> None:
    drafters = ["mtp-x-BF16.gguf", "mtp-x-Q8_0.gguf", "mtp-x-Q4_0.gguf"]
    chosen = {tag: drafter_file(drafters, f"x-{tag}.gguf") for tag in ("Q4_K_M", "Q8_0", "F16", "Q5_0")}
    assert chosen == {"Q4_K_M": "mtp-x-Q4_0.gguf", "Q8_0": "mtp-x-Q8_0.gguf", "F16": "mtp-x-BF16.gguf", "Q5_0": "mtp-x-Q4_0.gguf"}
