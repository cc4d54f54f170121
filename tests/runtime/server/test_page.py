"""The chat page in headless Chromium, on the reference pair and on a scripted server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs edge-mtp[serve]")
pytest.importorskip("starlette", reason="needs edge-mtp[serve]")
pytest.importorskip("selenium", reason="needs edge-mtp[dev]")

from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from chat_server import scripted_server
from chromium import chromium


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with chromium(tmp_path_factory.mktemp("chromium"), size=(390, 844)) as driver:
        yield driver


def say(browser: Any, text: str) -> None:
    browser.find_element(By.ID, "text").send_keys(text)
    browser.find_element(By.ID, "send").click()


def shown(browser: Any, selector: str) -> list[str]:
    return [element.text for element in browser.find_elements(By.CSS_SELECTOR, selector)]


def until(browser: Any, condition: Any) -> None:
    WebDriverWait(browser, 60, poll_frequency=0.05).until(lambda _: condition())


def idle(browser: Any) -> bool:
    visible: bool = browser.find_element(By.ID, "send").is_displayed()
    return visible


def test_a_chat_on_the_reference_pair(browser: Any, several: str, exported_pair: Path) -> None:
    browser.get_log("browser")  # discards the entries of other tests
    browser.get(several)
    until(browser, lambda: browser.find_element(By.ID, "model").text == exported_pair.name)
    for text in ("def add(a, b):", "class Stack:"):
        say(browser, text)
        until(browser, lambda: idle(browser) and any(shown(browser, ".figures")))
        assert shown(browser, ".user p") == [text]
        assert all(shown(browser, ".assistant > p"))
        assert "tok/s" in shown(browser, ".figures")[0]
        browser.find_element(By.ID, "new").click()
    assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth"), "it fits a phone's width"
    complaints = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE" and "favicon" not in entry["message"]]
    assert complaints == []


def test_stop_ends_the_answer_and_keeps_what_was_said(browser: Any) -> None:
    with scripted_server(lambda turn, before: "w" * 1800 if turn == 0 else f"{before.count('w')} letters") as server:
        server.together.before_forward = lambda: time.sleep(0.005)
        browser.get(server.url)
        say(browser, "long")
        until(browser, lambda: "www" in "".join(shown(browser, ".assistant > p")))
        browser.find_element(By.ID, "stop").click()
        until(browser, lambda: idle(browser))
        said = shown(browser, ".assistant > p")[0]
        assert 0 < len(said) < 1800
        assert "stopped" in shown(browser, ".figures")[0]
        until(browser, lambda: server.worker.load() == (0, 0))
        say(browser, "go on")
        until(browser, lambda: idle(browser) and f"{len(said)} letters" in shown(browser, ".assistant > p"))


def test_text_is_shown_as_text_and_thoughts_apart(browser: Any) -> None:
    with scripted_server("<|channel>thought\nsecret<channel|><b>bold</b> <img src=x onerror=alert(1)>") as server:
        browser.get(server.url)
        say(browser, "<i>me</i>")
        until(browser, lambda: idle(browser) and bool(shown(browser, ".figures")[0]))
        assert shown(browser, ".assistant > p") == ["<b>bold</b> <img src=x onerror=alert(1)>"]
        assert shown(browser, ".user p") == ["<i>me</i>"]
        assert browser.find_element(By.CSS_SELECTOR, "details p").get_attribute("textContent") == "secret"
        browser.find_element(By.ID, "new").click()
        assert shown(browser, "article") == []


def test_errors_are_shown_and_a_key_can_be_typed(browser: Any) -> None:
    with scripted_server("ok", key="secret") as server:
        browser.get(server.url)
        until(browser, lambda: browser.find_element(By.ID, "key").is_displayed())
        say(browser, "hi")
        until(browser, lambda: "API key" in "".join(shown(browser, ".error")))
        browser.find_element(By.ID, "key").send_keys("secret")
        say(browser, "hi")
        until(browser, lambda: "ok" in shown(browser, ".assistant > p"))
