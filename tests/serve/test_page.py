"""The page in a headless Chromium: what it shows, and that a keyboard and a screen reader suffice.

Left out unless asked for by `-m browser`; needs Chromium and the package playwright (the extra `browser`).
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from pyggml_dflash import Engine
from tests.serve.live import PATIENCE_S, STORY, Live, asked, busy, live
from tests.serve.told import telling

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser
NAMES: Final = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
TREE: Final = (
    'link "Skip to the chat"',
    'heading "pico" [level=1]',
    "status: qwen35 on CPU, 1 × 512 tokens",
    'region "Chat"',
    'log "Conversation"',
    'progressbar "Prompt read"',
    'textbox "Message"',
    'spinbutton "Most tokens"',
    'spinbutton "Temperature"',
    'combobox "Thinking"',
    'button "Send"',
    'button "Stop" [disabled]',
    'button "New chat"',
    'region "Slots"',
    'columnheader "Prompt read"',
    'row "0 free 0 0"',
    'region "Memory"',
    'columnheader "Size"',
    'region "Since the start"',
    "term: Cache hits",
    "term: Acceptance",
)
UNNAMED: Final = """
    [...document.querySelectorAll("input, select, textarea, button, progress, meter")]
        .filter((e) => !(e.labels?.length || e.textContent.trim() || e.ariaLabel))
        .map((e) => e.outerHTML)
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    assert path, f"none of {', '.join(NAMES)} is installed; CHROMIUM may name one"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Page]:
    """A page in which nothing goes wrong: no error of a script, nothing that the policy refuses."""
    page = browser.new_page()
    page.set_default_timeout(1000 * PATIENCE_S)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
    yield page
    page.close()
    allowed = getattr(request.node.get_closest_marker("may_say"), "args", ())
    assert [text for text in problems if not any(part in text for part in allowed)] == []


@contextmanager
def visit(page: Page, server: Live) -> Iterator[None]:
    """The page while the block runs; it asks nothing of the server afterwards."""
    page.goto(server.url)
    yield
    page.goto("about:blank")


def shows(page: Page, selector: str, text: str) -> None:
    """Wait until an element's text matches."""
    page.wait_for_function(
        "([s, t]) => new RegExp(t).test(document.querySelector(s).textContent)", arg=[selector, text]
    )


def test_everything_on_it_has_a_role_and_a_name(page: Page, server: Live) -> None:
    with visit(page, server):
        shows(page, "#status", "qwen35")
        shows(page, "#slots-caption", "0 of 1")
        tree = page.locator("body").aria_snapshot()
        for line in TREE:
            assert line in tree, f"{line}\n{tree}"
        unnamed = page.evaluate(UNNAMED)
        assert unnamed == []
        assert not page.get_by_label("API key").is_visible()
        assert page.evaluate("document.documentElement.lang") == "en"


def test_memory_is_shown_by_kind(page: Page, server: Live, pico: Engine) -> None:
    with visit(page, server):
        held = {kind for kinds in pico.memory().values() for kind in kinds}
        page.wait_for_function("() => document.querySelectorAll('#memory tr').length > 0")
        assert set(page.locator("#memory th").all_inner_texts()) == held
        assert page.locator("#memory meter").count() == len(held)


def test_a_keyboard_is_enough_for_a_chat(page: Page, pico: Engine) -> None:
    with live(pico) as server, visit(page, server):
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the chat"
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "message"
        page.keyboard.type(str(STORY[0]["content"]))
        page.keyboard.press("Shift+Enter")
        page.keyboard.press("Enter")
        shows(page, "#log", r"\d+ tokens read, \d+ from the cache, \d+ written at [\d.]+ per second")
        said = page.locator("#log article").nth(1).locator("p").first.text_content()
        assert said == pico.chat(STORY).text
        assert page.evaluate("document.activeElement.id") == "message"
        shows(page, "#answers", "^1$")
        n_prompt = pico.chat(STORY, max_tokens=1).usage.prompt_tokens
        shows(page, "#reading-text", f"^{n_prompt} of {n_prompt} tokens$")
        order = []
        for _ in range(7):
            page.keyboard.press("Tab")
            order.append(page.evaluate("document.activeElement.id"))
        assert order[:5] == ["max-tokens", "temperature", "thinking", "send", "clear"]  # nothing runs to stop


def test_an_answer_can_be_stopped_and_the_next_one_asked_for(page: Page, tmp_path: Path) -> None:
    numbers = "".join(f"{i}, " for i in range(1000)) + "END"
    # However much of it is told before it is stopped, the next prompt has room for that.
    with telling(tmp_path, numbers, n_ctx=8192) as server, visit(page, server):
        page.get_by_label("Message").fill("Count.")
        page.keyboard.press("Enter")
        shows(page, "#log", "3, 4")
        assert page.locator("#log").get_attribute("aria-busy") == "true"
        page.keyboard.press("Escape")
        page.wait_for_function("() => !document.getElementById('send').disabled")
        page.get_by_label("Most tokens").fill("2")
        page.get_by_label("Message").fill("Again.")
        page.get_by_role("button", name="Send").click()
        shows(page, "#log", "2 written")
        page.get_by_role("button", name="New chat").click()
        assert page.locator("#log").inner_text() == ""


def test_text_of_a_model_stays_text(page: Page, tmp_path: Path) -> None:
    answer = "<think>\n<b>Hm</b>\n</think>\n\n<img src=x onerror=alert(1)><script>alert(2)</script>"
    with telling(tmp_path, answer) as server, visit(page, server):
        page.get_by_label("Message").fill("<i>Hi</i>")
        page.keyboard.press("Enter")
        shows(page, "#log", "written")
        assert page.locator("#log img, #log script, #log i, #log b").count() == 0
        assert page.locator("#log details p").text_content() == "<b>Hm</b>"


def test_slots_and_the_queue_are_shown_as_they_are(page: Page, lasting: Engine) -> None:
    with live(lasting) as server, visit(page, server):
        with busy(server), asked(server, "/v1/chat/completions", {"messages": STORY}):
            shows(page, "#slots-caption", "^1 of 1 busy, 1 waiting")
            shows(page, "#slots", "decode")
            label = page.locator("#slots progress").get_attribute("aria-label")
            assert label == "Slot 0: prompt tokens read"
            shows(page, "#slots", r"(\d+) of \1")
        shows(page, "#slots-caption", "^0 of 1 busy, 0 waiting")


@pytest.mark.may_say("401")
def test_a_key_can_be_given(page: Page, pico: Engine) -> None:
    with live(pico, api_key="k3y") as server, visit(page, server):
        shows(page, "#status", "the API key is missing")
        page.get_by_label("API key").fill("k3y")
        page.keyboard.press("Enter")
        shows(page, "#status", "qwen35")
        page.get_by_label("API key").wait_for(state="hidden")


@pytest.mark.may_say("400")
def test_a_refusal_is_told(page: Page, server: Live) -> None:
    with visit(page, server):
        page.get_by_label("Most tokens").fill("100000")
        page.get_by_label("Message").fill("Hi")
        page.keyboard.press("Enter")
        shows(page, "#problem", "exceed the context of 512")
        assert page.get_by_role("alert").count() == 1


def test_it_works_on_a_narrow_screen(page: Page, server: Live) -> None:
    page.set_viewport_size({"width": 360, "height": 640})
    with visit(page, server):
        shows(page, "#status", "qwen35")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        assert re.search("Send", page.locator("#ask").inner_text())
