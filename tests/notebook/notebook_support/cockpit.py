"""A notebook in a browser whose cells a test writes as it goes, and the dashboards in it."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from operator import sub
from typing import Any

import pytest
from chromium import needs_chromium
from notebook_support.lab import (
    DEADLINE_SECONDS,
    POLL_MS,
    output_of,
    run_cell,
    wait_for_prompt,
    wait_for_text,
    wait_until_idle,
)
from playwright.sync_api import Dialog, Locator, Page, expect

from nbengine.widgets.dashboard.palette import REQUESTS

Color = tuple[int, int, int]
OpenCockpit = Callable[..., "Cockpit"]

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
ENGINE = "paced"
"""The engine that all notebooks may attach to."""

WHOLE = 1500
"""A window's height at which all of a dashboard and a cell below it are in sight."""

MARKS = [
    needs_chromium,
    pytest.mark.timeout(180),
]

_APPEND = """(source) => {
    const model = window.jupyterapp.shell.currentWidget.content.model.sharedModel;
    model.insertCell(model.cells.length, { cell_type: 'code', source });
    return model.cells.length - 1;
}"""
_FAULTS = """(root) => {
    const name = (node) => `${node.tagName.toLowerCase()}.${node.getAttribute('class') ?? ''}`;
    const isSeen = (node) => {
        const style = getComputedStyle(node);
        return node.getClientRects().length && style.visibility !== 'hidden' && style.clipPath === 'none';
    };
    const faults = [];
    const whole = root.getBoundingClientRect();
    for (const node of root.querySelectorAll('*')) {
        if (!isSeen(node) || node.closest('svg')) continue;
        const style = getComputedStyle(node);
        const box = node.getBoundingClientRect();
        if (box.left < whole.left - 1 || box.right > whole.right + 1) faults.push(`${name(node)} sticks out`);
        // What is shortened can be read in whole beside the pointer.
        const isShortened = style.textOverflow === 'ellipsis' && (node.title || node.querySelector('[title]'));
        if (!node.title && !node.children.length && node.textContent) {
            for (let around = node.parentElement; around && around !== root; around = around.parentElement) {
                const { overflowX } = getComputedStyle(around);
                if (overflowX === 'visible') continue;
                if (overflowX === 'hidden' && around.getBoundingClientRect().right < box.right - 1)
                    faults.push(`${name(node)} is cut off by ${name(around)}`);
                break;
            }
        }
        if (!isShortened && style.display !== 'inline' && node.scrollWidth > node.clientWidth + 1 && node.clientWidth)
            faults.push(`${name(node)} is cut off: ${node.scrollWidth} > ${node.clientWidth}`);
        if (style.position === 'absolute' || style.position === 'sticky') continue;
        for (let next = node.nextElementSibling; next; next = next.nextElementSibling) {
            const { position, display } = getComputedStyle(next);
            if (!isSeen(next) || position === 'absolute' || position === 'sticky' || display === 'inline') continue;
            const other = next.getBoundingClientRect();
            const across = Math.min(box.right, other.right) - Math.max(box.left, other.left);
            const down = Math.min(box.bottom, other.bottom) - Math.max(box.top, other.top);
            if (style.display !== 'inline' && across > 1 && down > 1) faults.push(`${name(node)} lies on ${name(next)}`);
        }
    }
    return faults;
}"""

# A row is found by its number each time: it may be drawn again, and may not say "running" the next time.
_OUTPUT_OF = """([root, name, tokens]) => {
    const row = [...root.querySelectorAll('tbody tr')].find((row) => row.querySelector('b')?.textContent === name);
    const seen = Number(row?.querySelector('.nbe-cell-output .nbe-bar')?.getAttribute('aria-valuenow') ?? -1);
    return seen >= tokens && { tokens: seen };
}"""
_SETTLE = """async (root) => {
    const widths = () => [root, ...root.querySelectorAll('canvas')].map((node) => node.getBoundingClientRect().width).join();
    for (let same = 0, last = ''; same < 10; same = widths() === last ? same + 1 : 0) {
        last = widths();
        await new Promise(requestAnimationFrame);
    }
}"""


class Cockpit:
    """A notebook that is open in a page.

    `dialogs` are the texts of all questions and alerts that any script has opened.
    """

    def __init__(self, page: Page) -> None:
        self.page = page
        self.dialogs: list[str] = []
        page.on("dialog", self._note)
        self.run("%load_ext nbengine\nimport time")

    def _note(self, dialog: Dialog) -> None:
        self.dialogs.append(dialog.message)

    def start(self, code: str) -> int:
        """Append a cell and begin to run it; returns its number."""
        cell: int = self.page.evaluate(_APPEND, code)
        run_cell(self.page, cell)
        return cell

    def finish(self, cell: int) -> str:
        """Wait for the end of a cell; returns what it shows."""
        wait_for_prompt(self.page, cell)
        return output_of(self.page, cell)

    def run(self, code: str) -> str:
        """Run a cell to its end; returns what it shows."""
        return self.finish(self.start(code))

    def output(self, cell: int) -> Locator:
        """Find the element with a cell's output."""
        return self.page.locator(".jp-CodeCell").nth(cell).locator(".jp-Cell-outputArea")

    def wait_for_text(self, cell: int, text: str) -> None:
        """Wait until a cell shows a text."""
        wait_for_text(self.page, text, cell)

    def dashboard(self, line: str = "%dashboard") -> DashboardView:
        """Show a dashboard and wait until it is live."""
        cell = self.start(line)
        self.finish(cell)
        view = self.board(cell)
        view.wait_until_live()
        return view

    def board(self, cell: int) -> DashboardView:
        """The dashboard that a cell has shown."""
        return DashboardView(self.page, self.output(cell).locator(".nbe-dash"))

    def close(self) -> None:
        """Wait until the kernel has come to an end with everything, if the page is open; the page stays."""
        if self.page.is_closed():
            return
        self.page.remove_listener("dialog", self._note)
        wait_until_idle(self.page)


class DashboardView:
    """A dashboard in a page."""

    def __init__(self, page: Page, root: Locator) -> None:
        self.page = page
        self.root = root

    def wait_until_live(self) -> None:
        """Wait until the kernel has said how the engine is."""
        expect(self.root, "not shown").to_be_attached()
        self.look()
        expect(self.root.locator(".nbe-banner")).to_be_hidden()
        expect(self.root.locator(".nbe-name")).not_to_be_empty()

    def look(self) -> None:
        """Bring it into sight: what nobody sees is not drawn."""
        self.root.evaluate("(node) => node.scrollIntoView({ block: 'start' })")

    def wait_until_settled(self) -> None:
        """Wait until everything has the width that the page has now."""
        self.root.evaluate(_SETTLE)

    @property
    def state(self) -> Locator:
        """The engine's state."""
        return self.root.locator(".nbe-state")

    def tile(self, label: str) -> str:
        """A figure of the header."""
        return self.root.locator(".nbe-tile", has_text=label).locator(".nbe-value").inner_text()

    def running(self) -> Locator:
        """The notebook's own requests that are running."""
        state = self.page.locator(".nbe-request-state[data-state=running]")
        return self.root.locator("tbody tr[data-own=true]").filter(has=state)

    def row(self, number: int) -> Locator:
        """A request."""
        name = self.page.locator("b", has_text=re.compile(f"^#{number}$"))
        return self.root.locator("tbody tr").filter(has=name)

    def expect_state(self, number: int, state: str) -> None:
        """Wait until a request is in a state; of one that has ended the state is the reason."""
        expect(self.row(number).locator(".nbe-request-state")).to_have_text(state)

    @property
    def place(self) -> str:
        """Read which step is at the right edge of the timeline."""
        return self.root.locator(".nbe-place").inner_text()

    @property
    def num_steps(self) -> int:
        """Read how many steps there are to scrub through."""
        return int(self.root.locator(".nbe-slider").get_attribute("max") or 0)

    @property
    def counts(self) -> dict[str, int]:
        """Blocks by kind, as the block map says."""
        text = self.root.locator(".nbe-blocks .nbe-now").inner_text()
        return {kind: int(number.replace(",", "")) for number, kind in re.findall(r"([\d,]+) (\w+)", text)}

    def wait_for_output(self, row: Locator, tokens: int) -> int:
        """Wait until a request has `tokens` tokens; return how many it has."""
        arg = [self.root.element_handle(), f"#{number_of(row)}", tokens]
        found: dict[str, int] = self.page.wait_for_function(_OUTPUT_OF, arg=arg, polling=POLL_MS).json_value()
        return found["tokens"]

    def colors(self, panel: str) -> Counter[Color]:
        """Count the pixels of each colour on a canvas, "map" (of the blocks) or "timeline"."""
        found: list[list[int]] = self.root.locator(f".nbe-{panel} canvas").evaluate(
            """(canvas) => {
                const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
                const pixels = new Uint32Array(data.buffer);
                const counts = new Map();
                for (const pixel of pixels) if (pixel >>> 24 === 255) counts.set(pixel, (counts.get(pixel) ?? 0) + 1);
                return [...counts].map(([p, n]) => [p & 255, (p >> 8) & 255, (p >> 16) & 255, n]);
            }"""
        )
        return Counter({(red, green, blue): number for red, green, blue, number in found})

    @property
    def ground(self) -> Color:
        """The colour behind everything."""
        text = self.root.evaluate("(node) => getComputedStyle(node).backgroundColor")
        red, green, blue = (int(part) for part in re.findall(r"\d+", text))
        return red, green, blue

    def wait_for_color(self, panel: str, wanted: Color) -> None:
        """Wait until a canvas has a colour, up to rounding."""
        end = time.monotonic() + DEADLINE_SECONDS
        while not any(max(map(abs, map(sub, seen, wanted))) <= 2 for seen in self.colors(panel)):
            assert time.monotonic() < end, f"{panel} has no {wanted}"

    def pixels_of_request(self, number: int) -> int:
        """Count the pixels of the block map that are in a request's colour."""
        return self.colors("map")[color(REQUESTS[number % len(REQUESTS)])]

    def tip(self) -> str:
        """Read the text beside the pointer or the keyboard's cursor."""
        return self.page.locator(".nbe-tip:not([hidden])").inner_text()


def color(text: str) -> Color:
    """Red, green and blue of `#rrggbb`."""
    return int(text[1:3], 16), int(text[3:5], 16), int(text[5:7], 16)


def mixed(text: str, opacity: float, ground: Color) -> Color:
    """A colour over a ground."""
    red, green, blue = (
        round(opacity * top + (1 - opacity) * below) for top, below in zip(color(text), ground, strict=True)
    )
    return red, green, blue


def number_of(row: Locator) -> int:
    """The engine core's number of a request in the table."""
    return int(row.locator("b").inner_text().removeprefix("#"))


def faults_of_layout(root: Locator) -> list[str]:
    """List what sticks out of an element, is cut off in it, or lies on something else."""
    found: list[Any] = root.evaluate(_FAULTS)
    return [str(fault) for fault in found]


def timeline_pixels(board: DashboardView) -> str:
    """The timeline's picture."""
    picture: str = board.root.locator(".nbe-timeline canvas").evaluate("(canvas) => canvas.toDataURL()")
    return picture
