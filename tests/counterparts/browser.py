"""Drives Chromium through the page. Runs in an environment of its own, and prints what it found as JSON.

    python browser.py URL FOLDER SCENARIO…

Each scenario has a fresh page. What it finds is printed under its name, or the error that ended it. `light` and `dark`
take pictures into the folder; `accessibility` finds axe-core there.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, Page, Request, sync_playwright

MARKDOWN = """# Bread
Mix it on <b>one</b> day,
bake it on the next.

1. **Flour**
   - wheat

   - rye, `type 997`
2. Water

## Then
* <img src=x onerror=alert(1)>
+ wait
```sh
# no heading
- no item
```
1999. was a good year"""
DOTS = "() => document.querySelector('#ttft-chart .dots').getAttribute('d').split('M').length - 1"

LONG = "Tell me a story about a lighthouse keeper."
SEEN = ".row .about"  # state and tokens of each sequence
COLOURS = """lanes => new Set(lanes.flatMap(lane => {
    const { data } = lane.getContext('2d').getImageData(0, 0, lane.width, lane.height);
    return [...new Set(new Uint32Array(data.buffer))];
}).filter(Boolean)).size"""


class Watched:
    """A page, and what it says and asks for."""

    def __init__(self, browser: Browser, url: str, **options: Any) -> None:
        options = {"viewport": {"width": 1440, "height": 1040}} | options
        self.context = browser.new_context(**options)
        self.page: Page = self.context.new_page()
        self.url = url
        self.errors: list[str] = []
        self.requests: list[Request] = []
        self.page.on("console", lambda message: message.type == "error" and self.errors.append(message.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request))  # it marks its handlers

    def open(self, is_serving: bool = True) -> Page:
        self.page.goto(self.url)
        if is_serving:
            self.page.wait_for_selector("header .is-serving")
        return self.page

    def ask(self, text: str) -> str:
        """Ask in the chat and return the answer."""
        answers = self.page.locator(".turn:not(.user)")
        before = answers.count()
        self.page.fill("#message", text)
        self.page.keyboard.press("Enter")
        self.page.wait_for_function("n => document.querySelectorAll('.turn:not(.user)').length > n", arg=before)
        answer = answers.nth(before)
        answer.locator(".stats button").wait_for(timeout=60_000)
        return answer.locator(".text").inner_text()

    def requests_to(self, path: str) -> list[Any]:
        return [request.post_data_json for request in self.requests if urlsplit(request.url).path == path]

    def fake(self, *chunks: str) -> None:
        """Let the page get these as the answer to every turn of the chat, or 503 if there are none."""
        events = [{"choices": [{"delta": {"content": chunk}}]} for chunk in chunks]
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        status = 200 if chunks else 503
        self.page.route("**/v1/chat/completions", lambda route: route.fulfill(status=status, body=body))

    def set(self, **fields: str) -> None:
        """Fill in settings of the chat."""
        self.page.click("#settings-button")
        for name, value in fields.items():
            self.page.fill(f"#settings [name={name}]", value)
        self.page.click("#settings-button")

    def states(self) -> list[str]:
        """What the sequences in the batch do, as the page tells it."""
        return self.page.eval_on_selector_all(SEEN, "nodes => nodes.map(node => node.textContent.split(' ·')[0])")


def load(watched: Watched) -> dict[str, Any]:
    page = watched.open()
    page.wait_for_timeout(1500)
    own = urlsplit(watched.url).netloc
    return {
        "errors": watched.errors,
        "elsewhere": [request.url for request in watched.requests if urlsplit(request.url).netloc != own],
        "title": page.title(),
        "model": page.inner_text("#model"),
        "landmarks": page.eval_on_selector_all("header, main, section, nav, h1, h2, h3", "nodes => nodes.length"),
    }


def chat(watched: Watched) -> dict[str, Any]:
    page = watched.open()
    watched.set(temperature="0")
    first = watched.ask("What is the capital of Sweden?")
    stats = page.locator(".stats").inner_text()
    announced = page.inner_text("#announcer")
    second = watched.ask("And of Norway?")
    sent = watched.requests_to("/v1/chat/completions")
    page.reload()
    page.wait_for_selector("header .is-serving")
    reloaded = page.locator(".turn .text").all_inner_texts()
    third = watched.ask("And of Denmark?")
    page.click("#new-chat")
    page.reload()
    sent.append(watched.requests_to("/v1/chat/completions")[-1])
    return {
        "reloaded": reloaded, "third": third,
        "first": first, "stats": stats, "announced": announced, "second": second, "errors": watched.errors,
        "roles": [[message["role"] for message in body["messages"]] for body in sent],
        "turns after a new chat": page.locator(".turn").count(),
    }  # fmt: skip


def eight(watched: Watched) -> dict[str, Any]:
    page = watched.open()
    page.click("#eight")
    page.wait_for_selector(".eight")
    most, seen, names, blocks, rate, colours = 0, set(), set(), 0, 0, 0
    deadline = time.monotonic() + 120
    while page.get_attribute("#eight", "aria-disabled") == "true" and time.monotonic() < deadline:
        states = watched.states()
        seen |= set(states)
        names |= set(page.locator(".row .name").all_text_contents())  # rows of sequences that have ended go in time
        most = max(most, sum(state in ("decode", "prefill") for state in states))
        blocks = max(blocks, number_in(page.inner_text("#cache-count")))
        rate = max(rate, number_in(page.inner_text("#rate")))
        colours = max(colours, page.eval_on_selector_all(".lane", COLOURS))
        page.wait_for_timeout(50)
    page.wait_for_function("() => document.querySelector('#batch-count').textContent === '0 running, 0 waiting'")
    return {
        "most at once": most, "states": sorted(seen | set(watched.states())), "blocks in use": blocks, "tokens/s": rate,
        "colours of steps": colours, "answers": page.locator(".eight .text").all_text_contents(),
        "names": sorted(names), "ttft": page.inner_text("#ttft"),
        "itl": page.inner_text("#itl"), "errors": watched.errors,
    }  # fmt: skip


def formatted(watched: Watched) -> dict[str, Any]:
    """An answer in Markdown, with HTML in it."""
    page = watched.open()
    watched.fake(*re.findall(r".{1,3}", MARKDOWN, re.DOTALL))
    watched.ask("How is bread made?")
    return {
        "tags": page.eval_on_selector(
            ".turn:not(.user) .text",
            """text => [...text.querySelectorAll('*')].map(node => [
                node.tagName.toLowerCase(),
                [...node.childNodes].filter(child => child.nodeType === 3).map(child => child.data).join('').trim(),
            ])""",
        ),
        "errors": watched.errors,
    }  # fmt: skip


def failing(watched: Watched) -> dict[str, Any]:
    """A server that answers nothing, in a chat that is longer than its place."""
    page = watched.open()
    watched.fake()
    hidden = []
    for _ in range(7):
        page.fill("#message", "Hello?\n\nIs there anybody?")
        page.keyboard.press("Enter")
        page.wait_for_selector("#send:visible")
        again, log = page.locator(".trouble button").last.bounding_box(), page.locator("#log").bounding_box()
        assert again is not None
        assert log is not None
        hidden.append(max(0, again["y"] + again["height"] - log["y"] - log["height"]))
    buttons = page.locator(".trouble button").count()
    page.reload()
    return {
        "hidden": hidden, "buttons": buttons, "turns": page.locator(".turn.user").count(),
        "after a reload": page.inner_text(".trouble button"),
    }  # fmt: skip


def settings(watched: Watched) -> dict[str, Any]:
    """What the page asks for, without settings, with them, and after a reload."""
    page = watched.open()
    watched.fake("Aye.")
    watched.ask("Hello?")
    watched.set(system="You are a pirate.", temperature="0.5", top_p="0.9", max_tokens="20", seed="7")
    button = page.inner_text("#settings-button")
    watched.ask("And now?")
    page.reload()
    page.wait_for_selector("header .is-serving")
    watched.ask("Still?")
    watched.set(system="", temperature="", top_p="", max_tokens="", seed="")
    watched.ask("And without?")
    return {"button": button, "sent": watched.requests_to("/v1/chat/completions")}


def themes(watched: Watched) -> dict[str, Any]:
    page = watched.open()
    found = []
    for is_first in (True, False, False):
        if not is_first:
            page.click("#theme-button")
        theme = page.evaluate("getComputedStyle(document.documentElement).colorScheme")
        found.append([theme, page.inner_text("#theme-button")])
    return {"themes": found}


def dots(watched: Watched) -> dict[str, Any]:
    """The times to first token of eight prompts, of which none was asked before."""
    page = watched.open()
    page.wait_for_timeout(2000)
    page.click("#eight")
    page.wait_for_function("() => document.querySelector('#batch-count').textContent.startsWith('8 running')")
    page.wait_for_function("""() => [...document.querySelectorAll('.row .about')]
        .filter(node => / [+] [1-9]/.test(node.textContent)).length === 8""")
    page.wait_for_timeout(2000)
    return {"dots": page.evaluate(DOTS), "count": page.inner_text("#ttft-count")}


def unready(watched: Watched) -> dict[str, Any]:
    """A router without an engine."""
    page = watched.open(is_serving=False)
    page.wait_for_function("() => document.querySelector('#state').textContent.includes('engine')")
    return {"state": page.inner_text("#state"), "count": page.inner_text("#batch-count")}


def stop(watched: Watched) -> dict[str, Any]:
    page = watched.open()
    found = []
    for end in (lambda: page.click("#stop"), lambda: page.keyboard.press("Escape")):
        page.fill("#message", LONG)
        page.keyboard.press("Enter")
        page.wait_for_selector(".turn[aria-busy] .text:not(:empty)")
        page.wait_for_function("() => document.querySelector('#batch-count').textContent.startsWith('1 running')")
        end()
        page.wait_for_selector("#send:visible")
        page.wait_for_function("() => document.querySelector('#batch-count').textContent.startsWith('0 running')")
        found.append({"stats": page.locator(".stats").last.inner_text(), "last": watched.states()[-1]})
        page.click("#new-chat")
    return {"ends": found}


def keyboard(watched: Watched) -> dict[str, Any]:
    """Nothing but keys: from the first link to an answer, to the theme, and to eight prompts."""
    kept = json.dumps({"temperature": "0"})  # as if it had been set before a reload
    watched.page.add_init_script(f"sessionStorage.setItem('pagoda-settings', '{kept}')")
    page = watched.open()
    page.evaluate("document.activeElement.blur()")
    order, outlines = [], []
    for _ in range(16):
        page.keyboard.press("Tab")
        name, outline = page.evaluate(
            """() => {
                const focused = document.activeElement;
                if (focused === document.body) return ["", ""];
                return [focused.id || focused.textContent.trim(), getComputedStyle(focused).outlineStyle];
            }"""
        )
        if name:
            order.append(name)
            outlines.append(outline)
    page.focus("#theme-button")
    page.keyboard.press("Enter")
    theme = page.evaluate("document.documentElement.dataset.theme")
    page.focus("#message")
    page.keyboard.type("What is the capital")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("of Sweden?")
    lines = page.input_value("#message")
    page.keyboard.press("Enter")
    page.wait_for_selector(".stats button", timeout=60_000)
    answer = page.locator(".turn:not(.user) .text").inner_text()
    page.focus("#eight")
    page.keyboard.press("Space")
    page.wait_for_function("() => document.querySelectorAll('.row').length > 4")
    page.focus(".eight summary")
    page.keyboard.press("Enter")
    return {
        "order": order, "outlines": outlines, "theme": theme, "lines": lines, "answer": answer,
        "is open": page.evaluate("document.querySelector('.eight details').open"),
    }  # fmt: skip


def hidden(watched: Watched) -> dict[str, Any]:
    """A page that is not seen, or paused, watches nothing."""
    page = watched.open()
    ended: list[str] = []
    page.on("requestfailed", lambda request: ended.append(urlsplit(request.url).path))
    counts = [live_requests(watched)]
    page.evaluate(
        """() => {
            Object.defineProperty(document, 'hidden', { value: true, configurable: true });
            document.dispatchEvent(new Event('visibilitychange'));
        }"""
    )
    page.wait_for_timeout(1000)
    counts.append(len(ended))
    page.evaluate(
        """() => {
            Object.defineProperty(document, 'hidden', { value: false, configurable: true });
            document.dispatchEvent(new Event('visibilitychange'));
        }"""
    )
    page.wait_for_timeout(1000)
    counts.append(live_requests(watched))
    page.click("#pause")
    page.wait_for_timeout(500)
    counts.append(len(ended))
    return {"counts": counts, "button": page.inner_text("#pause")}


def sizes(watched: Watched) -> dict[str, Any]:
    """The width that is too much, and controls that are too small to hit, by width of the window."""
    page = watched.open()
    page.click("#settings-button")
    found = {}
    for width in (360, 768, 1024, 1600):
        page.set_viewport_size({"width": width, "height": 800})
        page.wait_for_timeout(200)
        found[str(width)] = {
            "too wide by": page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"),
            "too small": page.eval_on_selector_all(
                "button, select, textarea, input",
                """nodes => nodes.filter(node => node.offsetParent && node.getBoundingClientRect().height < 24)
                    .map(node => node.id)""",
            ),
        }
    return found


def guarded(watched: Watched) -> dict[str, Any]:
    """A server that asks for tokens, and on which the tenant `small` has used up its quota."""
    page = watched.open(is_serving=False)
    page.wait_for_selector("#token-dialog[open]")
    trouble = page.inner_text("#trouble")
    asked = page.inner_text("#token-dialog")
    page.fill("#token", "token of nobody")
    page.keyboard.press("Enter")
    page.wait_for_selector("#token-refused:visible")
    refused_token = page.inner_text("#token-dialog")
    page.fill("#token", "token of small")
    page.keyboard.press("Enter")
    page.wait_for_selector("header .is-serving")
    page.click("#eight")
    page.wait_for_function("() => document.querySelectorAll('.eight li').length === 8")
    page.wait_for_function("() => document.querySelector('#eight').ariaDisabled === 'false'")
    refused = page.locator(".eight li", has_text="refused").locator(".tail").all_inner_texts()
    page.fill("#message", "Me too?")
    page.keyboard.press("Enter")
    words = page.wait_for_selector("div.trouble p").inner_text()
    other = watched.context.new_page()
    other.goto(watched.url)
    is_asked_again = other.wait_for_selector("#token-dialog[open]") is not None
    return {
        "asked": asked, "trouble": trouble, "refused token": refused_token, "refused": refused,
        "state": page.inner_text("#state"), "words": words,
        "other tab asks again": is_asked_again,
        "kept for good": page.evaluate("JSON.stringify({...localStorage})"),
        "kept for the tab": page.evaluate("JSON.stringify({...sessionStorage})"),
        "cache": page.inner_text("#cache-caption"), "rows": watched.states(),
    }  # fmt: skip


def picture(watched: Watched, path: Path) -> dict[str, Any]:
    """The page at work on eight prompts."""
    page = watched.open()
    watched.ask("What is the capital of Sweden?")
    page.click("#eight")
    page.wait_for_function("() => document.querySelectorAll('.row:not(.ended)').length >= 7")
    page.wait_for_function("() => document.querySelectorAll('.row.ended').length >= 3")
    page.wait_for_timeout(300)
    page.screenshot(path=path)
    return {"path": str(path)}


def accessibility(browser: Browser, url: str, axe: Path) -> dict[str, Any]:
    """What axe-core finds wrong, in both themes and two widths, with a conversation and a batch on the page."""
    found: dict[str, Any] = {}
    for theme in ("light", "dark"):
        for width in (360, 1440):
            # axe-core is not of this server, so the page's policy would refuse it.
            watched = Watched(
                browser, url, color_scheme=theme, viewport={"width": width, "height": 900}, bypass_csp=True,
                reduced_motion="reduce",
            )  # fmt: skip
            page = watched.open()
            page.click("#settings-button")
            page.fill("#settings [name=temperature]", "0")
            watched.ask("What is the capital of Sweden?")
            page.click("#eight")
            page.wait_for_function("() => document.querySelectorAll('.row').length > 4")
            page.add_script_tag(path=axe)
            report = page.evaluate("axe.run()")
            wrong = [
                {"rule": each["id"], "help": each["help"], "nodes": [node["html"][:160] for node in each["nodes"]]}
                for each in report["violations"]
            ]
            found[f"{theme} {width}"] = {"wrong": wrong, "right": len(report["passes"])}
            watched.context.close()
    return found


def number_in(text: str) -> int:
    found = re.search(r"[\d,]+", text)
    return int(found.group().replace(",", "")) if found else 0


def live_requests(watched: Watched) -> int:
    return sum(urlsplit(request.url).path == "/live" for request in watched.requests)


_SCENARIOS: tuple[Callable[[Watched], dict[str, Any]], ...] = (
    load, chat, eight, formatted, failing, settings, themes, dots, unready, stop, keyboard, hidden, sizes, guarded,
)  # fmt: skip
SCENARIOS = {scenario.__name__: scenario for scenario in _SCENARIOS}


def main(url: str, folder: str, *names: str) -> None:
    found = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        for name in names:
            try:
                if name == "accessibility":
                    found[name] = accessibility(browser, url, Path(folder) / "node_modules/axe-core/axe.min.js")
                    continue
                if name in ("light", "dark"):
                    watched = Watched(browser, url, color_scheme=name, viewport={"width": 1440, "height": 1110})
                    found[name] = picture(watched, Path(folder) / f"page-{name}.png")
                else:
                    watched = Watched(browser, url)
                    found[name] = SCENARIOS[name](watched)
                watched.context.close()
            except Exception:
                found[name] = {"failed": traceback.format_exc()}
        browser.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
