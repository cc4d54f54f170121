"""A headless Chromium for tests of pages; a skip with the reason where there is none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


@contextmanager
def chromium(profile: Path, *, theme: str = "light", size: tuple[int, int] = (1200, 900)) -> Iterator[Any]:
    """Starts a browser of this size with a fresh `profile` folder that says it prefers `theme`; yields its driver."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium (edge-mtp[dev])")
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver_path = shutil.which("chromedriver")
    if browser is None or driver_path is None:
        pytest.skip("needs Chromium and its driver (apt install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in (*FLAGS, f"--window-size={size[0]},{size[1]}", f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver_path))
    try:
        driver.set_page_load_timeout(60)
        features = [{"name": "prefers-color-scheme", "value": theme}]
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        yield driver
    finally:
        driver.quit()
