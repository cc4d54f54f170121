"""What tests of several floors share: the reference pair as an exported bundle, and a probe memory of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from silent import Silent

PAIR = Path(__file__).parent.parent / "exporter" / "edge_export" / "reference_pair"


@pytest.fixture(scope="session")
def exported_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped pair as a float16 bundle, exported once per run."""
    pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")
    pytest.importorskip("gguf", reason="needs edge-mtp[export]")
    from edge_export.export import ExportRequest, export_pair

    output = tmp_path_factory.mktemp("exported") / "bundle"
    request = ExportRequest(
        target=str(PAIR / "target"), drafter=str(PAIR / "drafter"), output=output, target_quantization="f16", drafter_quantization="f16",
        context=1024, verify=False,
    )  # fmt: skip
    export_pair(request, Silent())
    return output


@pytest.fixture(scope="module")
def probe_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps the probe's answers out of the user's own cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGE_MTP_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
