"""Colours that stay apart: on light and dark ground, and for eyes that lack a kind of cone."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

import numpy as np
import pytest
from numpy.typing import NDArray

from nbengine.widgets.dashboard import palette
from nbengine.widgets.scripts import STATIC

SCRIPT = STATIC / "dashboard" / "palette.js"
STYLES = STATIC / "dashboard" / "dashboard.css"
BLOCK = "block"
"""The style sheet's name of what `cached` and `free` are, at their opacities."""

VISION = {
    "usual": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
"""Matrices that turn linear RGB into what each kind of eyes sees (Machado, Oliveira and Fernandes, 2009)."""


def linear(color: str) -> NDArray[np.float64]:
    channels = np.array([int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def oklab(color: NDArray[np.float64]) -> NDArray[np.float64]:
    """Find the place of a linear RGB colour in a space in which distances are what eyes see."""
    to_cones = np.array(
        [
            [0.4122214708, 0.5363325363, 0.0514459929],
            [0.2119034982, 0.6806995451, 0.1073969566],
            [0.0883024619, 0.2817188376, 0.6299787005],
        ]
    )
    to_lab = np.array(
        [
            [0.2104542553, 0.7936177850, -0.0040720468],
            [1.9779984951, -2.4285922050, 0.4505937099],
            [0.0259040371, 0.7827717662, -0.8086757660],
        ]
    )
    result: NDArray[np.float64] = to_lab @ np.cbrt(to_cones @ np.clip(color, 0, 1))
    return result


def distance(first: str, second: str, vision: str) -> float:
    matrix = np.array(VISION[vision])
    return float(np.linalg.norm(oklab(matrix @ linear(first)) - oklab(matrix @ linear(second))))


def contrast(first: str, second: str) -> float:
    weights = np.array([0.2126, 0.7152, 0.0722])
    dark, light = sorted(float(weights @ linear(color)) for color in (first, second))
    return (light + 0.05) / (dark + 0.05)


def test_the_script_has_the_same_colours() -> None:
    assert SCRIPT.read_text() == palette.script(), "run: python -m nbengine.widgets.dashboard.palette"


def test_the_style_sheet_has_the_same_colours() -> None:
    styles = STYLES.read_text()
    named = dict(re.findall(r"--nbe-(\w+): (#[0-9a-f]{6});", styles))
    del named["warning"]
    expected = {name: color for name, color in palette.ROLES.items() if name not in ("cached", "free")}
    assert palette.ROLES["cached"] == palette.ROLES["free"]
    assert named == expected | {BLOCK: palette.ROLES["free"]}


def test_the_legends_swatches_are_requests_colours() -> None:
    rules = dict(
        re.findall(r"^\.nbe-mark\.nbe-([\w:-]+) \{\n(.*?)\}", STYLES.read_text(), re.DOTALL | re.MULTILINE)
    )
    swatches = {name: re.findall("#[0-9a-f]{6}", rule) for name, rule in rules.items()}
    first = palette.REQUESTS[0]
    assert {name: colors for name, colors in swatches.items() if colors} == {
        "held": list(palette.REQUESTS[:3]),
        "shared": [first],
        "shared::after": [palette.ink_on(first) + "000"],
    }
    for name, opacity in (("cached", palette.CACHED_OPACITY), ("free", palette.FREE_OPACITY)):
        assert f"opacity: {opacity};" in rules[name]


@pytest.mark.parametrize("vision", VISION)
def test_requests_stay_apart_for_every_eye(vision: str) -> None:
    for first, second in itertools.combinations(palette.REQUESTS, 2):
        assert distance(first, second, vision) > 0.07, (first, second)


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize(
    "names",
    [("prefill", "decode", "recompute", "hit", "preempted"), ("running", "waiting", "preempted")],
    ids=["steps", "scheduler"],
)
def test_what_is_drawn_together_stays_apart_for_every_eye(names: tuple[str, ...], vision: str) -> None:
    for first, second in itertools.combinations(names, 2):
        assert distance(palette.ROLES[first], palette.ROLES[second], vision) > 0.1, (first, second)


@pytest.mark.parametrize("ground", ["#ffffff", "#111111"])
def test_colours_show_on_light_and_on_dark(ground: str) -> None:
    for color in (*palette.REQUESTS, *palette.ROLES.values()):
        assert contrast(color, ground) > 1.6, color


def substitutes(colors: Iterable[str], ground: int) -> list[str]:
    """The colours that stand in for others, on light ground (0) or dark (1)."""
    return [palette.MORE_CONTRAST[color][ground] for color in colors]


def test_each_colour_has_substitutes_that_stand_out_on_the_grounds_of_high_contrast_themes() -> None:
    assert set(palette.MORE_CONTRAST) == {*palette.REQUESTS, *palette.ROLES.values()}
    # JupyterLab's themes, and Windows' contrast themes: Desert; Night sky, Aquatic, Dusk.
    grounds = (["#ffffff", "#f0f0f0", "#fffaef"], ["#000000", "#111111", "#212121", "#202020", "#2d3236"])
    for number, alike in enumerate(grounds):
        for color, ground in itertools.product(substitutes(palette.MORE_CONTRAST, number), alike):
            assert contrast(color, ground) >= 3, (color, ground)


@pytest.mark.parametrize("ground", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("vision", VISION)
def test_substitutes_stay_apart_for_every_eye(vision: str, ground: int) -> None:
    for first, second in itertools.combinations(substitutes(palette.REQUESTS, ground), 2):
        assert distance(first, second, vision) > 0.07, (first, second)
    for names in (
        ("prefill", "decode", "recompute", "hit", "preempted"),
        ("running", "waiting", "preempted"),
    ):
        shown = substitutes([palette.ROLES[name] for name in names], ground)
        for first, second in itertools.combinations(shown, 2):
            assert distance(first, second, vision) > 0.1, (first, second)


def test_a_picture_has_rules_for_what_is_drawn_in_it_alone() -> None:
    hit, decode = palette.ROLES["hit"], palette.ROLES["decode"]
    drawn = f'<rect fill="{hit}" fill-opacity="0.16"/><path stroke="{decode}"/>'
    alone, part = (palette.contrast_sheet(drawn, standalone=standalone) for standalone in (True, False))
    light, dark = palette.MORE_CONTRAST[hit]
    assert f'[fill="{hit}"]{{fill:light-dark({light},{dark})}}' in alone
    assert re.findall(r'\[([\w-]+="[^"]+)"\]\{', alone) == [
        f'stroke="{decode}',
        f'fill="{hit}',
        'fill-opacity="0.16',
    ]
    # A page's other pictures stay as they are.
    rules = re.sub("@media[^{]*", "", part.removeprefix("<style>").removesuffix("</style>"))
    assert len(re.findall(r"\.nbe-picture \[", rules)) == len(re.findall(r"\{\w", rules)) == 6
    assert part.count("High Contrast") == 3
    assert "High Contrast" not in alone


def test_a_request_keeps_its_colour_and_its_neighbours_have_others() -> None:
    colors = [palette.request_color(number) for number in range(40)]
    assert colors[:8] == list(palette.REQUESTS)
    assert all(first != second for first, second in itertools.pairwise(colors))
    assert colors[3] == colors[11] == palette.request_color(8_000_003)
