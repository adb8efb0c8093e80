"""The picture of a process tree in JupyterLab in a real browser; `test_examples.py` has a real engine's."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from chromium import needs_chromium
from notebook_support.desk import OpenLab
from notebook_support.lab import run_cell, run_command, screenshot
from playwright.sync_api import Page

from nbengine.widgets.dashboard.palette import MORE_CONTRAST, ROLES
from tests.unit.widgets.trees import make_tree

THEMES = ("JupyterLab Light", "JupyterLab Dark", "JupyterLab Dark High Contrast")
WIDTHS = (1280, 800)
CORE = ROLES["dummy"]
"""The colour of an engine core, which is that of its dummy steps."""
SMALLEST_LETTERS = 9.0
"""Pixels."""
SMALLEST_CONTRAST = 4.5
"""Between text and ground: WCAG 2.1, success criterion 1.4.3."""
PLACES = """() => {
    const svg = document.querySelector('.jp-OutputArea-output svg[role=img]');
    const of = (element) => {
        const {left, top, right, bottom} = element.getBoundingClientRect();
        return {left, top, right, bottom, text: element.textContent};
    };
    const ground = getComputedStyle(document.querySelector('.jp-Notebook')).backgroundColor;
    const boxes = [...svg.querySelectorAll('g')].map((group) => ({
        box: of(group.querySelector('rect')), texts: [...group.querySelectorAll('text')].map(of)}));
    return {
        picture: of(svg), area: of(svg.closest('.jp-OutputArea-output')), ground, boxes,
        labels: [...svg.querySelectorAll(':scope > text')].map(of),
        colors: [...svg.querySelectorAll('text')].map((text) => {
            const style = getComputedStyle(text);
            return {color: style.fill, opacity: Number(style.opacity)};
        }),
        letters: 12 * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width,
    };
}"""
Place = dict[str, Any]


def overlap(first: Place, second: Place) -> bool:
    """Return whether two boxes overlap by more than the pixel that a browser may round up to."""
    return (
        min(first["right"], second["right"]) - max(first["left"], second["left"]) > 1
        and min(first["bottom"], second["bottom"]) - max(first["top"], second["top"]) > 4
    )


def is_inside(inner: Place, outer: Place) -> bool:
    return inner["left"] >= outer["left"] - 1 and inner["right"] <= outer["right"] + 1


def rgb(color: str) -> list[float]:
    return [float(part) for part in color.partition("(")[2].rstrip(")").split(",")[:3]]


def luminance(color: list[float]) -> float:
    """Compute the relative luminance of a colour, as WCAG 2.1 defines it."""
    red, green, blue = (
        part / 12.92 if (part := value / 255) <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4
        for value in color
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(text: list[float], ground: list[float]) -> float:
    darker, lighter = sorted((luminance(text), luminance(ground)))
    return (lighter + 0.05) / (darker + 0.05)


def check_legible(page: Page) -> None:
    places = page.evaluate(PLACES)
    texts = places["labels"] + [text for box in places["boxes"] for text in box["texts"]]
    assert len(texts) > 20
    for first, second in itertools.combinations(texts, 2):
        assert not overlap(first, second), (first, second)
    for box in places["boxes"]:
        assert all(is_inside(text, box["box"]) for text in box["texts"]), box
    for label in places["labels"]:
        assert not any(overlap(label, box["box"]) for box in places["boxes"]), label
    assert is_inside(places["picture"], places["area"])
    assert places["letters"] >= SMALLEST_LETTERS
    ground = rgb(places["ground"])
    for text in places["colors"]:
        mixed = [
            text["opacity"] * ink + (1 - text["opacity"]) * paper
            for ink, paper in zip(rgb(text["color"]), ground, strict=True)
        ]
        assert contrast(mixed, ground) >= SMALLEST_CONTRAST, text


@needs_chromium
@pytest.mark.timeout(240)
def test_the_picture_is_legible_in_all_themes_and_in_a_narrow_window(
    open_lab: OpenLab,
) -> None:
    shown = f"from IPython.display import display\ndisplay({make_tree(2, 2).bundle()!r}, raw=True)"
    page = open_lab("tree.ipynb", [shown])
    run_cell(page, 0)
    page.wait_for_selector(".jp-OutputArea-output svg[role=img]")
    run_command(page, "application:toggle-left-area")
    for theme, width in itertools.product(THEMES, WIDTHS):
        page.set_viewport_size({"width": width, "height": 1100})
        page.evaluate(
            "(theme) => window.jupyterapp.commands.execute('apputils:change-theme', {theme})", theme
        )
        page.wait_for_selector(f'body[data-jp-theme-name="{theme}"]', state="attached")
        page.wait_for_selector("#jupyterlab-splash", state="detached")
        page.locator(".jp-OutputArea-output svg[role=img]").scroll_into_view_if_needed()
        screenshot(page, f"process-tree-{theme.removeprefix('JupyterLab ').replace(' ', '-')}-{width}")
        check_legible(page)
        strokes = page.locator(f'svg.nbe-picture [stroke="{CORE}"]').evaluate_all(
            "(nodes) => nodes.map((node) => getComputedStyle(node).stroke)"
        )
        shown = MORE_CONTRAST[CORE][1] if theme.endswith("Contrast") else CORE
        assert set(strokes) == {f"rgb({', '.join(str(int(shown[at : at + 2], 16)) for at in (1, 3, 5))})"}
