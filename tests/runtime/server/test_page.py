"""The chat page in headless Chromium: on the reference pair, on scripted servers, and with images on the trained picture pair."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("selenium", reason="needs edge-mtp[dev]")

from selenium.webdriver.common.by import By

from chat_server import Child, scripted_server
from chromium import chromium, fresh, shown, until
from pictures import SCENES, colours, photo, picture_bundle


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with chromium(tmp_path_factory.mktemp("chromium"), size=(390, 844)) as driver:
        yield driver


def say(browser: Any, text: str) -> None:
    browser.find_element(By.ID, "text").send_keys(text)
    browser.find_element(By.ID, "send").click()


def idle(browser: Any) -> bool:
    visible: bool = browser.find_element(By.ID, "send").is_displayed()
    return visible


def test_a_chat_on_the_reference_pair(browser: Any, several: str, exported_pair: Path) -> None:
    fresh(browser, several)
    browser.get_log("browser")  # discards the entries of other tests
    until(browser, lambda: browser.find_element(By.ID, "model").text == exported_pair.name)
    for text in ("def add(a, b):", "class Stack:"):
        say(browser, text)
        until(browser, lambda: idle(browser) and any(shown(browser, ".figures")))
        assert shown(browser, ".user .text") == [text]
        assert all(shown(browser, ".assistant .text"))
        assert "tok/s" in shown(browser, ".figures")[0]
        browser.find_element(By.ID, "new").click()
    assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth"), "it fits a phone's width"
    complaints = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE" and "favicon" not in entry["message"]]
    assert complaints == []


def test_the_first_screen_says_what_the_model_is_and_what_to_try(browser: Any, several: str) -> None:
    fresh(browser, several)
    until(browser, lambda: len(shown(browser, ".introduction button")) == 3)
    assert not browser.find_element(By.ID, "attach").is_displayed(), "this model takes no images"
    text = shown(browser, ".introduction")[0]
    browser.find_element(By.CSS_SELECTOR, ".introduction button").click()
    until(browser, lambda: idle(browser) and bool(shown(browser, ".figures")))
    assert shown(browser, ".user .text")[0] in text
    assert shown(browser, ".introduction") == []


@pytest.mark.parametrize(("answers", "offered", "tokens"), [(False, "def fibonacci(n):", 200), (True, "What is a stack?", 300)])
def test_a_shipped_example_is_asked_what_it_can(browser: Any, answers: bool, offered: str, tokens: int) -> None:
    with scripted_server("w" * 300, description="an example", answers=answers) as server:
        fresh(browser, server.url)
        until(browser, lambda: len(shown(browser, ".introduction button")) == 3)
        assert shown(browser, ".introduction button")[0] == offered
        browser.find_element(By.CSS_SELECTOR, ".introduction button").click()
        until(browser, lambda: idle(browser) and bool(shown(browser, ".figures")))
        written = shown(browser, ".assistant .text")[0]
        assert len(written) == tokens, "what continues text would go on until the context is full"


def test_stop_ends_the_answer_and_keeps_what_was_said(browser: Any) -> None:
    with scripted_server(lambda turn, before: "w" * 1800 if turn == 0 else f"{before.count('w')} letters") as server:
        server.batch.before_forward = lambda: time.sleep(0.005)
        fresh(browser, server.url)
        say(browser, "long")
        until(browser, lambda: "www" in "".join(shown(browser, ".assistant .text")))
        browser.find_element(By.ID, "stop").click()
        until(browser, lambda: idle(browser))
        text = shown(browser, ".assistant .text")[0]
        assert 0 < len(text) < 1800
        until(browser, lambda: "stopped" in shown(browser, ".figures")[0])
        until(browser, lambda: server.worker.load() == (0, 0))
        say(browser, "go on")
        until(browser, lambda: idle(browser) and f"{len(text)} letters" in shown(browser, ".assistant .text"))


def test_text_is_shown_as_text_and_thoughts_apart(browser: Any) -> None:
    with scripted_server("<|channel>thought\nsecret<channel|><b>bold</b> <img src=x onerror=alert(1)>") as server:
        fresh(browser, server.url)
        say(browser, "<i>me</i>")
        until(browser, lambda: idle(browser) and bool(shown(browser, ".figures")[0]))
        assert shown(browser, ".assistant .text") == ["<b>bold</b> <img src=x onerror=alert(1)>"]
        assert shown(browser, ".user .text") == ["<i>me</i>"]
        assert browser.find_element(By.CSS_SELECTOR, "details .thoughts").get_attribute("textContent") == "secret"
        browser.find_element(By.ID, "new").click()
        assert shown(browser, "article:not(.introduction)") == []


def test_errors_are_shown_and_a_key_can_be_typed(browser: Any) -> None:
    with scripted_server("ok", keys=["secret"]) as server:
        fresh(browser, server.url)
        until(browser, lambda: browser.find_element(By.ID, "key").is_displayed())
        say(browser, "hi")
        until(browser, lambda: "API key" in "".join(shown(browser, ".error")))
        browser.find_element(By.ID, "key").send_keys("secret")
        say(browser, "hi")
        until(browser, lambda: "ok" in shown(browser, ".assistant .text"))


MARKDOWN = """# Plan

Some **bold**, *slanted* and `code`, a [link](https://example.org) and <b>none</b>.

1. one
2. two
   - inner

| a | b |
|---|---|
| 1 | **2** |

> quoted

```python
def add(a, b):
    return a + b
```

[bad](javascript:alert(1))"""


def test_markdown_is_elements_and_code_can_be_copied(browser: Any) -> None:
    with scripted_server(MARKDOWN) as server:
        fresh(browser, server.url)
        say(browser, "hi")
        until(browser, lambda: idle(browser) and bool(shown(browser, "figure code")))
        assert shown(browser, ".text h2") == ["Plan"]
        assert (shown(browser, ".text strong"), shown(browser, ".text em"), shown(browser, "p code")) == (
            ["bold", "2"],
            ["slanted"],
            ["code"],
        )
        assert [link.get_attribute("href") for link in browser.find_elements(By.CSS_SELECTOR, ".text a")] == ["https://example.org/"]
        assert (shown(browser, "ol > li > ul > li"), shown(browser, "td")) == (["inner"], ["1", "2"])
        assert shown(browser, "blockquote") == ["quoted"]
        assert shown(browser, "figure code") == ["def add(a, b):\n    return a + b"]
        assert "monospace" in browser.find_element(By.CSS_SELECTOR, "figure code").value_of_css_property("font-family")
        assert "<b>none</b>" in browser.find_element(By.CSS_SELECTOR, ".text p").text
        browser.execute_script("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
        browser.find_element(By.CSS_SELECTOR, "button.copy").click()
        until(browser, lambda: browser.execute_script("return window.copied") == "def add(a, b):\n    return a + b")


# What becomes of Markdown: text, and the elements' names. A script that takes the driver's 30 seconds fails.
DRAWN = """
const parent = document.createElement('div');
markdown(parent, arguments[0], arguments[1] ?? []);
return [parent.textContent, [...parent.querySelectorAll('*')].map((e) => e.tagName)];
"""


@pytest.mark.parametrize("piece", ["_", "*", "`", "[", "[a](", "**a ", "_a ", "~~~ ", "| ", "- "])
def test_a_very_long_line_is_shown_as_it_is(browser: Any, piece: str) -> None:
    with scripted_server("yes") as server:
        fresh(browser, server.url)
        line = f"a {piece * (256_000 // len(piece))} b"
        for before in ("", "- item\n", "| a |\n| - |\n", "```\n", "> quoted\n"):
            text, _ = browser.execute_script(DRAWN, before + line)
            assert line in text
        text, names = browser.execute_script(DRAWN, line, [0, 1, 1])
        assert (text, names) == (line, ["P", "MARK"])


def test_a_long_paragraph_is_markdown(browser: Any) -> None:
    with scripted_server("yes") as server:
        fresh(browser, server.url)
        text, names = browser.execute_script(DRAWN, "word " * 300 + "**bold** and `code`")
        assert (text, names) == ("word " * 300 + "bold and code", ["P", "STRONG", "CODE"])


def test_regenerate_edit_and_reload(browser: Any) -> None:
    with scripted_server(lambda turn, before: f"{turn}: {before.count('<|turn>user')} asked, {'ho' in before}") as server:
        fresh(browser, server.url)
        say(browser, "hi")
        until(browser, lambda: idle(browser) and shown(browser, ".assistant .text") == ["0: 1 asked, False"])
        say(browser, "more")
        until(browser, lambda: idle(browser) and shown(browser, ".assistant .text")[1:] == ["1: 2 asked, False"])
        press(browser, "Regenerate")
        until(browser, lambda: idle(browser) and shown(browser, ".assistant .text")[1:] == ["1: 2 asked, False"])
        browser.refresh()
        assert shown(browser, ".text") == ["hi", "0: 1 asked, False", "more", "1: 2 asked, False"]
        press(browser, "Edit")
        text = browser.find_element(By.ID, "text")
        assert text.get_attribute("value") == "hi"
        text.clear()
        say(browser, "ho")
        until(browser, lambda: idle(browser) and shown(browser, ".text") == ["ho", "0: 1 asked, True"])


def test_talks_are_kept_opened_again_and_removed(browser: Any) -> None:
    with scripted_server(lambda turn, before: f"{before.count('<|turn>user')} asked") as server:
        fresh(browser, server.url)
        for text in ("first", "second"):
            browser.find_element(By.ID, "new").click()
            say(browser, text)
            until(browser, lambda: idle(browser) and shown(browser, ".assistant .text") == ["1 asked"])
        browser.find_element(By.ID, "talks-button").click()
        assert shown(browser, "#kept li button:first-child") == ["second", "first"]
        press(browser, "first")
        assert shown(browser, ".user .text") == ["first"]
        say(browser, "more")
        until(browser, lambda: idle(browser) and shown(browser, ".assistant .text") == ["1 asked", "2 asked"])
        browser.find_element(By.ID, "talks-button").click()
        assert shown(browser, "#kept li button:first-child") == ["first", "second"], "the newest answer is on top"
        press(browser, "Remove")
        browser.refresh()
        browser.find_element(By.ID, "talks-button").click()
        assert shown(browser, "#kept li button:first-child") == ["second"]


def test_talks_are_kept_only_if_the_settings_say_so(browser: Any) -> None:
    with scripted_server("yes") as server:
        fresh(browser, server.url)
        browser.find_element(By.ID, "settings-button").click()
        browser.find_element(By.ID, "keeps").click()
        say(browser, "private")
        until(browser, lambda: idle(browser) and shown(browser, ".assistant .text") == ["yes"])
        assert "private" not in str(browser.execute_script("return {...localStorage}"))


def test_a_theme_is_chosen_and_kept(browser: Any) -> None:
    with scripted_server("yes") as server:
        fresh(browser, server.url)
        browser.find_element(By.ID, "settings-button").click()
        grounds = []
        for theme in ("light", "dark"):
            browser.find_element(By.XPATH, f"//select[@id='theme']/option[text()='{theme}']").click()
            browser.refresh()
            browser.find_element(By.ID, "settings-button").click()
            grounds.append(browser.find_element(By.TAG_NAME, "body").value_of_css_property("background-color"))
        assert grounds[0] != grounds[1]


def test_settings_are_sent_and_kept(browser: Any) -> None:
    with scripted_server(lambda _, before: "yes" if "Be brief." in before else "no") as server:
        fresh(browser, server.url)
        browser.find_element(By.ID, "settings-button").click()
        browser.find_element(By.ID, "system").send_keys("Be brief.")
        browser.find_element(By.ID, "temperature").send_keys("0.5")
        browser.find_element(By.CSS_SELECTOR, "#drafts option[value='0']").click()
        browser.execute_script(
            "window.sent = []; const old = fetch; window.fetch = (url, o) => { sent.push(o?.body); return old(url, o); }"
        )
        say(browser, "hi")
        until(browser, lambda: idle(browser) and shown(browser, ".assistant .text") == ["yes"])
        body = json.loads(browser.execute_script("return sent[0]"))
        assert (body["temperature"], body["draft_length"], body["messages"][0]["role"]) == (0.5, 0, "system")
        browser.refresh()
        assert browser.find_element(By.ID, "system").get_attribute("value") == "Be brief."
        assert browser.find_element(By.ID, "drafts").get_attribute("value") == "0"


def test_accepted_drafts_are_marked(browser: Any, several: str) -> None:
    fresh(browser, several)
    browser.find_element(By.ID, "settings-button").click()
    browser.find_element(By.ID, "temperature").send_keys("0")
    say(browser, "def add(a, b):")
    until(browser, lambda: idle(browser) and bool(shown(browser, ".figures")))
    accepted = int(shown(browser, ".figures")[0].split(" of ")[0].rpartition(" ")[2])
    marked = sum(len(text) for text in shown(browser, "mark"))
    assert accepted > 0
    assert 0 < marked < len(shown(browser, ".assistant .text")[0])
    browser.find_element(By.ID, "marks").click()
    until(browser, lambda: not shown(browser, "mark"))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_contrast_is_at_least_4_5(browser: Any, theme: str) -> None:
    """Of every text in every state: settings open, an error, a message that is edited, a thought unfolded, drafts marked everywhere."""
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": theme}]})
    with scripted_server("<|channel>thought\nhm<channel|>" + MARKDOWN, keys=["secret"]) as server:
        fresh(browser, server.url)
        until(browser, lambda: browser.find_element(By.ID, "key").is_displayed())
        say(browser, "without the key")
        until(browser, lambda: "API key" in "".join(shown(browser, ".error")))
        errors, measured = browser.execute_script(CONTRAST)
        assert (errors, measured > 5) == ([], True)
        browser.find_element(By.ID, "key").send_keys("secret")
        browser.find_element(By.ID, "settings-button").click()
        say(browser, "hi")
        until(browser, lambda: idle(browser) and any(shown(browser, ".figures")))
        browser.find_elements(By.CSS_SELECTOR, "details summary")[-1].click()
        press(browser, "Edit")
        for _ in ("as written", "all of it marked as accepted drafts"):
            low, measured = browser.execute_script(CONTRAST)
            assert low == [], theme
            assert measured > 30
            browser.execute_script(MARK_ALL)
        assert len(shown(browser, "mark")) > 20
        assert any("replaces the message" in text for text in shown(browser, "#editing"))


def test_a_screen_reader_hears_an_answer_once(browser: Any) -> None:
    answer = "The *whole* answer, " + "word by word, " * 8 + "at once."
    with scripted_server(answer) as server:
        server.batch.before_forward = lambda: time.sleep(0.002)
        fresh(browser, server.url)
        browser.execute_script(LISTEN)
        say(browser, "hi")
        until(browser, lambda: idle(browser) and bool(shown(browser, ".figures")))
        assert browser.execute_script("return heard") == ["The model is answering.", "Answer: " + answer.replace("*", "")]
        assert browser.execute_script("return drawn") > 5, "it was streamed"
        assert browser.execute_script("return $('talk').closest('[aria-live], [role=log], [role=status], [role=alert]')") is None


def test_every_control_has_a_name_and_one_place_is_live(browser: Any) -> None:
    """By the tree that the browser gives to screen readers."""
    with scripted_server("yes", keys=["secret"]) as server:
        fresh(browser, server.url)
        browser.find_element(By.ID, "settings-button").click()
        nodes = browser.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
        controls = [node for node in nodes if node["role"]["value"] in ("button", "textbox", "combobox", "checkbox", "spinbutton")]
        assert len(controls) >= 9
        assert [node["role"]["value"] for node in controls if not node["name"]["value"].strip()] == []
        live = [node for node in nodes if node["role"]["value"] in ("status", "alert", "log", "marquee", "timer")]
        assert [node["role"]["value"] for node in live] == ["status"]


def press(browser: Any, text: str) -> None:
    browser.find_element(By.XPATH, f"//button[text()='{text}' or @aria-label='{text}']").click()


# Counts how often the conversation is drawn, and keeps what the live region says.
LISTEN = """
window.heard = []; window.drawn = 0;
new MutationObserver(() => heard.push($('status').textContent)).observe($('status'), {childList: true, characterData: true, subtree: true});
new MutationObserver(() => drawn++).observe($('talk'), {childList: true, characterData: true, subtree: true});
"""
MARK_ALL = """
const walker = document.createTreeWalker(document.querySelector('.assistant:last-of-type .text') ?? $('talk'), NodeFilter.SHOW_TEXT);
const found = []; while (walker.nextNode()) found.push(walker.currentNode);
for (const text of found) { const mark = document.createElement('mark'); text.replaceWith(mark); mark.append(text); }
"""
# The lowest contrast of each text to its background (WCAG 2.2, 1.4.3), where it is below 4.5.
CONTRAST = """
const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
const rgba = (color) => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data]; };
const light = ([r, g, b]) => [r, g, b].map((v) => v / 255).map((v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
const back = (e) => { for (; e; e = e.parentElement) { const c = rgba(getComputedStyle(e).backgroundColor); if (c[3] === 255) return c; }
  return [255, 255, 255]; };
const ratio = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + .05) / (y + .05); };
const found = [];
let measured = 0;
for (const e of document.body.querySelectorAll('*')) {
  const written = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
  if (!e.checkVisibility() || !(written || e.matches('input, textarea, select'))) continue;
  measured++;
  for (const color of [getComputedStyle(e).color, ...(e.placeholder ? [getComputedStyle(e, '::placeholder').color] : [])]) {
    const r = ratio(rgba(color), back(e));
    if (r < 4.5) found.push([e.tagName, e.id, e.className, r]);
  }
}
return [found, measured];
"""


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
    for library in ("llama_cpp", "gguf", "PIL"):
        pytest.importorskip(library)
    child = Child(picture_bundle(), "--backend", "llama", "--context", "1024")
    yield child.url
    assert child.end() == 0, child.lines


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
    say(page, text)
    until(page, lambda: idle(page) and len(shown(page, ANSWERED)) > before)
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
    say(page, QUESTION)
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
