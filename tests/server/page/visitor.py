"""Someone at the page, in a real browser."""

import shutil
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
PATIENCE_MS = 60_000
PROMPT = "Write a function that counts the words in a file."
FIGURES, VERDICT = ".figures", "#verdict:not(.running) strong"  # what is there once an answer, or a race, has ended


class Visitor:
    """Notes what the browser complains of, and whatever the page asks of other places."""

    def __init__(self, browser: Any, address: str, **options: Any) -> None:
        self.address = address
        self.context = browser.new_context(**{"viewport": DESKTOP, **options})
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.complaints: list[str] = []
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self._heard)
        self.page.on("request", self._asked)
        self.page.goto(address)

    def _heard(self, said: Any) -> None:
        # Chromium logs every answer that is not a success; those are wanted here.
        if said.type == "error" and "Failed to load resource" not in said.text:
            self.complaints.append(said.text)

    def _asked(self, request: Any) -> None:
        if not request.url.startswith(self.address):
            self.complaints.append(f"asked for {request.url}")

    def send(self, text: str) -> None:
        self.page.fill("#message", text)
        self.page.press("#message", "Enter")

    def chat(self, text: str = PROMPT, turns: int = 1) -> str:
        """Send a message, and give the answer; `turns` counts it and those before."""
        self.send(text)
        self.page.locator(FIGURES).nth(turns - 1).wait_for()
        return str(self.page.locator(".turn.model > .text").last.text_content())

    def race(self, text: str = PROMPT) -> str:
        """Race, and give the verdict."""
        self.page.click("#tab-race")
        self.send(text)
        self.page.wait_for_selector(VERDICT)
        return str(self.page.inner_text("#verdict"))

    def tokens(self, where: str) -> list[tuple[str, str]]:
        """The tokens at a place, each as its text and the class of its origin."""
        script = "found => found.map(one => [one.textContent, one.classList[1]])"
        found = self.page.eval_on_selector_all(f"{where} .token", script)
        return [(text, kind) for text, kind in found]

    def fits(self) -> bool:
        """Whether nothing has to be scrolled sideways."""
        boxes = self.page.locator("html, body, main, #chat, #race, #settings")
        return bool(boxes.evaluate_all("found => found.every(one => one.scrollWidth <= one.clientWidth)"))

    def close(self) -> None:
        self.context.close()
        assert not self.complaints
