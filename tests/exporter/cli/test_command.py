"""edge-export without the packages it needs: a sentence, not a traceback."""

from __future__ import annotations

import os
import subprocess
import sys

RUN = "from edge_export.cli.command import main; main()"


def start(code: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([sys.executable, "-c", code, "pair", "--help"], capture_output=True, text=True, env=environment, check=False)


def test_a_missing_package_is_one_sentence():
    done = start(f"import sys; sys.modules['gguf'] = None; {RUN}")
    assert done.returncode == 1
    assert done.stderr.startswith("Error: edge-export needs gguf, which is not installed; run: pip install 'edge-mtp[export]'")
    assert "Traceback" not in done.stderr


def test_our_own_mistake_is_not_hidden():
    assert "Traceback" in start(f"import sys; sys.modules['edge_export.cli.export'] = None; {RUN}").stderr
