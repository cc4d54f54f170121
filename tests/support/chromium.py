"""A headless Chromium for tests of pages; a skip with the reason where there is none."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = """
    --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync --disable-dev-shm-usage
""".split()


def shown(page: Any, selector: str) -> list[str]:
    """The texts of the visible elements that a CSS selector names."""
    texts: list[str] = page.execute_script(
        "return [...document.querySelectorAll(arguments[0])].filter((e) => e.checkVisibility()).map((e) => e.innerText)", selector
    )
    return texts


def until(page: Any, condition: Callable[[], Any]) -> None:
    """Waits until a condition holds, a minute at most."""
    from selenium.webdriver.support.wait import WebDriverWait

    WebDriverWait(page, 60, poll_frequency=0.05).until(lambda _: condition())


def fresh(page: Any, url: str) -> None:
    """Opens a page without a talk or settings of other tests."""
    page.get(url)
    page.execute_script("sessionStorage.clear(); localStorage.clear()")
    page.refresh()


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
