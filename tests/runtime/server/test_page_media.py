"""Images on the chat page, in headless Chromium on the trained picture pair: attached, pasted and dropped, and files that are refused."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

for library in ("uvicorn", "starlette", "selenium", "llama_cpp", "gguf", "PIL"):
    pytest.importorskip(library)

from selenium.webdriver.common.by import By

from chat_server import Child
from chromium import chromium, fresh, shown, until
from pictures import SCENES, colours, photo, picture_bundle

QUESTION = "What is this?"
ANSWERED = ".assistant .figures, .assistant .error"
# Gives files to the page as a paste or a drop does.
GIVE = """
const [kind, files] = arguments, event = new Event(kind, {bubbles: true, cancelable: true}), data = new DataTransfer();
for (const [name, type, base64] of files) data.items.add(new File([Uint8Array.from(atob(base64), (c) => c.charCodeAt(0))], name, {type}));
event[kind === "paste" ? "clipboardData" : "dataTransfer"] = data;
(kind === "paste" ? document.getElementById("text") : document.body).dispatchEvent(event);
return event.defaultPrevented;
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, probe_memory: Path) -> Iterator[str]:
    child = Child(picture_bundle(), "--backend", "llama", "--context", "1024")
    yield child.url
    assert child.end() == 0, child.lines


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with chromium(tmp_path_factory.mktemp("chromium")) as driver:
        yield driver


@pytest.fixture
def page(browser: Any, server: str) -> Any:
    fresh(browser, server)
    until(browser, lambda: browser.find_element(By.ID, "attach").is_displayed())
    browser.find_element(By.ID, "settings-button").click()
    browser.find_element(By.ID, "temperature").send_keys("0")
    return browser


def give(page: Any, kind: str, *files: tuple[str, str, bytes]) -> bool:
    used: bool = page.execute_script(GIVE, kind, [[name, mime, base64.b64encode(data).decode()] for name, mime, data in files])
    return used


def asked(page: Any, text: str = QUESTION) -> list[str]:
    """Sends a message; returns the colours that the answer names."""
    before = len(shown(page, ".assistant"))
    page.find_element(By.ID, "text").send_keys(text)
    page.find_element(By.ID, "send").click()
    until(page, lambda: page.find_element(By.ID, "send").is_displayed() and len(shown(page, ANSWERED)) > before)
    assert shown(page, ".assistant .error") == []
    return colours(shown(page, ".assistant .text")[-1])


@pytest.mark.parametrize("way", ["attached", "pasted", "dropped"])
def test_the_answer_is_about_the_picture(way: str, page: Any, tmp_path: Path) -> None:
    scene = SCENES[["attached", "pasted", "dropped"].index(way)]
    if way == "attached":
        (tmp_path / "photo.png").write_bytes(photo(scene))
        page.find_element(By.ID, "files").send_keys(str(tmp_path / "photo.png"))
    else:
        assert give(page, {"pasted": "paste", "dropped": "drop"}[way], ("photo.png", "image/png", photo(scene)))
    until(page, lambda: shown(page, "#attached button") == ["photo.png ×"])
    assert asked(page) == [scene.colour, scene.ground]
    assert shown(page, ".user .media") == ["[photo.png]"]
    assert shown(page, "#attached button") == []


def test_pictures_stay_in_the_conversation(page: Any) -> None:
    for scene in SCENES[:2]:
        give(page, "drop", ("one.webp", "image/webp", photo(scene, "WEBP")))
        until(page, lambda: shown(page, "#attached button"))
        page.execute_script("document.getElementById('text').value = ''")
        assert asked(page, "What colour is it?") == [scene.colour, scene.ground]
    page.refresh()
    assert shown(page, ".user .media") == ["[one.webp]"] * 2


def test_a_picture_can_be_taken_away(page: Any) -> None:
    give(page, "drop", ("one.png", "image/png", photo(SCENES[0])), ("two.png", "image/png", photo(SCENES[1])))
    until(page, lambda: len(shown(page, "#attached button")) == 2)
    page.find_element(By.CSS_SELECTOR, "#attached button").click()
    assert shown(page, "#attached button") == ["two.png ×"]
    assert asked(page) == [SCENES[1].colour, SCENES[1].ground]


def test_a_paste_of_text_is_left_to_the_browser(page: Any) -> None:
    assert not give(page, "paste")
    assert shown(page, "#refused") == []


def test_what_is_no_picture_is_refused_in_one_sentence(page: Any) -> None:
    give(page, "drop", ("notes.pdf", "application/pdf", b"%PDF"), ("photo.png", "image/png", photo(SCENES[0])))
    until(page, lambda: shown(page, "#attached button") == ["photo.png ×"])
    sentence = "notes.pdf is neither an image (jpeg, png, webp) nor a sound (wav, mp3, flac); choose another file."
    assert shown(page, "#refused") == [sentence]
    assert page.find_element(By.ID, "status").get_attribute("textContent") == sentence
    assert asked(page) == [SCENES[0].colour, SCENES[0].ground]
    assert shown(page, "#refused") == []


def test_a_damaged_picture_is_refused_in_one_sentence(page: Any) -> None:
    give(page, "paste", ("photo.png", "image/png", photo(SCENES[0])[:60]))
    until(page, lambda: shown(page, "#attached button"))
    page.find_element(By.ID, "text").send_keys(QUESTION)
    page.find_element(By.ID, "send").click()
    until(page, lambda: shown(page, ".assistant .error"))
    (error,) = shown(page, ".assistant .error")
    assert "image" in error
    assert "\n" not in error
    page.find_element(By.ID, "new").click()
    give(page, "paste", ("photo.png", "image/png", photo(SCENES[0])))
    until(page, lambda: shown(page, "#attached button"))
    assert asked(page) == [SCENES[0].colour, SCENES[0].ground]


def test_too_large_files_are_refused_and_the_largest_fits_a_request(page: Any) -> None:
    """Bytes behind the end of a PNG change nothing but its size."""
    for size, fits in ((12_000_001, False), (12_000_000, True)):
        page.execute_script(
            """const bytes = new Uint8Array(arguments[1]); bytes.set(Uint8Array.from(atob(arguments[0]), (c) => c.charCodeAt(0)));
            attach([new File([bytes], "large.png", {type: "image/png"})]);""",
            base64.b64encode(photo(SCENES[2])).decode(),
            size,
        )
        until(page, lambda: shown(page, "#refused, #attached button"))
        assert shown(page, "#attached button") == (["large.png ×"] if fits else [])
        sentence = "With large.png the chat has more than 12 MB of images and sound; choose a smaller file, or start a new chat."
        assert shown(page, "#refused") == ([] if fits else [sentence])
    assert asked(page) == [SCENES[2].colour, SCENES[2].ground]
    give(page, "drop", ("second.png", "image/png", photo(SCENES[0])))
    until(page, lambda: shown(page, "#refused"))
    assert shown(page, "#attached button") == []
