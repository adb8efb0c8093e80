"""Text can be read in all views and all of JupyterLab's themes: the contrast of the colours that the sheets make."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from nbengine.widgets import words
from nbengine.widgets.scripts import STATIC, stylesheet

LAB = Path(sys.prefix) / "share" / "jupyter" / "lab"
THEMES = sorted(LAB.glob("themes/@jupyterlab/theme-*-extension/index.css"))
SHEET = STATIC / "common" / "theme.css"
WIDGETS = ("cells", "dashboard", "playground", "scores", "stop", "tokens")
NAMED = {"white": "#ffffff", "black": "#000000"}
ENOUGH, MUCH = 4.5, 7.0
"""Between text and ground: WCAG 2.1, success criteria 1.4.3 and 1.4.6."""
Color = tuple[float, float, float, float]
"""Red, green, blue from 0 to 1, and opacity."""


def declared(sheet: str) -> dict[str, str]:
    """The custom properties of a sheet, each as it is declared first."""
    found: dict[str, str] = {}
    for name, value in re.findall(r"(--[\w-]+):\s*([^;}]+)", sheet):
        found.setdefault(name, value.strip())
    return found


def split(text: str) -> list[str]:
    """Split at the commas that are in no parentheses."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def resolve(value: str, known: dict[str, str], current: Color | None = None) -> Color:
    """Compute a colour as a browser does: variables, mixtures, notations."""
    if value.startswith("var("):
        name, *fallback = split(value[4:-1])
        return resolve(known.get(name) or ",".join(fallback), known, current)
    if value.startswith("color-mix("):
        space, first, second = split(value[10:-1])
        assert space == "in srgb"
        first, _, share = first.rpartition(" ")
        part = float(share.removesuffix("%")) / 100
        other = (0.0, 0.0, 0.0, 0.0) if second == "transparent" else resolve(second, known, current)
        return mixed(resolve(first, known, current), other, part)
    if value == "currentColor":
        assert current is not None
        return current
    if value.startswith("rgb"):
        numbers = [float(number) for number in re.findall(r"[\d.]+", value)]
        red, green, blue, opacity = [*numbers, 1.0][:4]
        return red / 255, green / 255, blue / 255, opacity
    digits = NAMED.get(value, value).removeprefix("#")
    digits = "".join(2 * digit for digit in digits) if len(digits) == 3 else digits
    red, green, blue = (int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4))
    return red, green, blue, 1.0


def mixed(first: Color, second: Color, part: float) -> Color:
    """Mix two colours, with their opacities as weights."""
    opacity = part * first[3] + (1 - part) * second[3]
    red, green, blue = (
        (part * first[3] * first[at] + (1 - part) * second[3] * second[at]) / opacity for at in range(3)
    )
    return red, green, blue, opacity


def contrast(text: Color, ground: Color, opacity: float = 1.0) -> float:
    strength = text[3] * opacity
    shown = [strength * text[at] + (1 - strength) * ground[at] for at in range(3)]
    darker, lighter = sorted((luminance(shown), luminance(list(ground[:3]))))
    return (lighter + 0.05) / (darker + 0.05)


def luminance(color: list[float]) -> float:
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in color
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.fixture(params=THEMES, ids=lambda path: path.parent.name)
def theme(request: pytest.FixtureRequest) -> dict[str, str]:
    """The variables of a theme, and the views' own; the colours that themes name are in JupyterLab's script."""
    (core,) = LAB.glob("static/jlab_core.*.js")
    named = dict(re.findall(r"(--md-[a-z]+-\d+): (#[0-9a-f]+)", core.read_text()))
    return named | declared(request.param.read_text()) | declared(SHEET.read_text())


def test_there_are_themes_light_and_dark_and_with_high_contrast() -> None:
    names = {path.parent.name for path in THEMES}
    assert names >= {f"theme-{kind}-extension" for kind in ("light", "dark", "dark-high-contrast")}


def test_text_can_be_read_on_every_ground(theme: dict[str, str]) -> None:
    text = resolve(theme["--jp-content-font-color1"], theme)
    quiet, alarm = (resolve(of.removeprefix("color:"), theme, text) for of in (words.QUIET, words.ALARM))
    own, muted, error = (resolve(f"var(--nbe-{name})", theme) for name in ("text", "muted", "error"))
    plain = [resolve(f"var({name})", theme) for name in ("--jp-layout-color0", "--nbe-ground")]
    # Buttons, fields, and every second row of a table.
    raised = ("--nbe-raised", "--jp-input-background", "--jp-rendermime-table-row-background")
    for ground in plain:
        for color in (own, muted, quiet):
            assert contrast(color, ground) >= MUCH
        for color in (error, alarm):
            assert contrast(color, ground) >= ENOUGH
    for ground in (resolve(f"var({name})", theme) for name in raised):
        for color in (own, muted, quiet):
            assert contrast(color, ground) >= ENOUGH


def test_what_is_paler_and_what_has_the_focus_can_be_seen(theme: dict[str, str]) -> None:
    ground = resolve("var(--nbe-ground)", theme)
    fade = float(theme["--nbe-fade"])
    assert contrast(resolve("var(--nbe-text)", theme), ground, fade) >= ENOUGH
    assert contrast(resolve("var(--nbe-accent)", theme), ground) >= 3


@pytest.mark.parametrize("ground", ["#ffffff", "#1e1e1e"])
def test_quiet_text_can_be_read_on_pages_without_a_theme(ground: str) -> None:
    text = resolve("#000000" if ground == "#ffffff" else "#d4d4d4", {})
    for quiet in (words.QUIET, words.ALARM):
        assert contrast(resolve(quiet.removeprefix("color:"), {}, text), resolve(ground, {})) >= ENOUGH


@pytest.mark.parametrize("name", WIDGETS)
def test_a_view_takes_the_colours_of_text_from_the_shared_sheet(name: str) -> None:
    own = "".join(path.read_text() for path in (STATIC / name).glob("*.css"))
    assert stylesheet(name).endswith(SHEET.read_text().strip() + "\n")
    assert not re.findall(r"(?:^|[\s;{])color:\s*(?:#|rgb|var\(--jp)", own)
    assert set(re.findall(r"var\((--nbe-(?!own|request)[\w-]+)", own)) <= set(
        declared(SHEET.read_text())
    ) | set(declared(own))
