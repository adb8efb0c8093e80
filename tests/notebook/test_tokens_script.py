"""The script that shows tokens, in a page without a notebook: what a person sees, clicks and types."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from answers import Word, token_id, tree_of
from chromium import needs_chromium
from dashboard_page import DARK, LIGHT
from notebook_support.bare import BarePages
from playwright.sync_api import expect
from tokens_page import TokensPage

from nbengine.errors import EngineDeadError
from nbengine.magics.answers.kept_view import Listed, list_html
from nbengine.magics.tokens.view import shaded
from nbengine.sampling_params import SamplingParams, StructuredOutputsParams
from nbengine.widgets.grid.grid import GridCell, layout_of
from nbengine.widgets.grid.html import GridHtml

HOSTILE = "<img src=x onerror='document.title=\"hurt\"'>"
WORDS: list[Word] = [
    ("The", 0.9, {"A": 0.05, "In": 0.02}),
    (" capital", 0.97, {" city": 0.02}),
    (" is", 0.8, {",": 0.1, "\n": 0.05}),
    (" Paris", 0.55, {" Lyon": 0.2, " located": 0.1, HOSTILE: 0.05, " the": 0.01, " in": 0.005}),
    ("\n", 0.3, {" ": 0.3, "\n\n": 0.2}),
    ("", 0.4, {}),
    ("🙂", 0.7, {"x": 0.1}),
    ("</span><b>bold</b>", 0.05, {'"': 0.04}),
    (" \u202eturned\x07", 0.5, {}),
    ("<|end|>", 0.88, {" and": 0.1}),
]
TEXT = "".join(word[0] for word in WORDS[:-1])

pytestmark = needs_chromium


@pytest.fixture
def widget(bare_pages: BarePages) -> Iterator[TokensPage]:
    """A page on which no script may fail."""
    page = TokensPage(bare_pages.take())
    yield page
    failures = page.failures()
    bare_pages.give_back(page.page)
    assert failures == []


def test_tokens_are_shaded_marked_and_never_html(widget: TokensPage) -> None:
    tree, _ = tree_of(WORDS, text=TEXT)
    widget.mount(tree)
    assert widget.greetings == 1
    page = widget.page
    expect(page.locator(".nbt-token")).to_have_count(len(WORDS))
    shades = [widget.token(index).get_attribute("data-shade") for index in range(5)]
    assert shades == [None, None, "1", "4", "7"]
    marks = page.locator(".nbt-mark")
    assert [mark.get_attribute("data-mark") for mark in marks.all()] == ["⏎", "◌", "⟨U+202E⟩", "⟨U+0007⟩"]
    assert marks.all_text_contents() == ["\n", "", "", ""]
    assert widget.token(7).text_content() == "</span><b>bold</b>"
    assert widget.token(8).text_content() == " turned"
    assert page.locator(".nbt-outside").all_text_contents() == ["<|end|>"]
    expect(page.locator(".nbt-tabs")).to_be_hidden()
    assert "10 tokens" in page.inner_text(".nbt-footer")
    widget.token(3).hover()
    expect(page.locator(".nbt-row")).to_have_count(5)
    widget.exchange()
    rows = page.locator(".nbt-row")
    assert rows.locator(".nbt-label").all_text_contents() == [
        "·Paris",
        "·Lyon",
        "·located",
        HOSTILE.replace(" ", "·"),
        "·the",
        "·in",
    ]
    assert rows.locator(".nbt-share").all_text_contents() == [
        "55 %",
        "20 %",
        "10 %",
        "5.0 %",
        "1.0 %",
        "0.50 %",
    ]
    assert rows.first.get_attribute("aria-current") == "true"
    assert page.title() == "test"
    assert page.locator(".nbt img, .nbt b").count() == 0
    page.mouse.move(5, 400)
    expect(page.locator(".nbt-popover")).to_be_hidden()


def test_a_click_on_an_alternative_branches_into_a_tab_that_streams_and_can_be_stopped(
    widget: TokensPage,
) -> None:
    tree, client = tree_of(WORDS, text=TEXT)
    widget.mount(tree)
    widget.choose(token=3, alternative=0)
    assert client.requests[0][3] == [token_id(text) for text in ("The", " capital", " is", " Lyon")]
    page = widget.page
    tabs = page.get_by_role("tab")
    expect(tabs).to_have_text(["1", "2 ↳ ·Lyon"])
    expect(tabs.nth(1)).to_have_attribute("aria-selected", "true")
    expect(page.get_by_role("tabpanel")).to_have_attribute("aria-busy", "true")
    caret = "getComputedStyle(document.querySelector('.nbt-text'), '::after').content"
    assert "▍" in page.evaluate(caret)
    assert page.locator(".nbt-token").all_text_contents() == ["The", " capital", " is", " Lyon"]
    client.write([(",", 0.5, {"!": 0.2})], text="The capital is Lyon,", cached=3)
    widget.wait_for(".nbt-text", "Lyon,")
    expect(page.locator(".nbt-chosen")).to_have_text(" Lyon")
    page.get_by_role("button", name="Stop").click()
    widget.exchange()
    assert client.aborted == ["branch-1"]
    assert tree[1].result(60).finish_reason == "abort"
    widget.wait_for(".nbt-footer", "ended early")
    assert page.evaluate(caret) == "none"
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    assert "3 of 7 prompt tokens reused" in page.inner_text(".nbt-footer")
    tabs.first.click()
    expect(page.locator(".nbt-forked")).to_have_text(" Paris")
    assert page.locator(".nbt-token").count() == len(WORDS)
    page.mouse.move(5, 400)
    page.evaluate("document.activeElement.blur()")
    page.wait_for_function("models[0].sent.some((message) => message.kind === 'rest')")
    widget.exchange()
    assert widget.rests == 1
    # One that was begun elsewhere is marked where it branches off, and the tab that is open stays open.
    tree.branch(1, " city").cancel()
    widget.exchange()
    expect(page.locator(".nbt-forked")).to_have_text([" capital", " Paris"])
    expect(tabs.first).to_have_attribute("aria-selected", "true")
    tree[2].result(60)


def test_everything_can_be_done_with_the_keyboard(widget: TokensPage) -> None:
    tree, client = tree_of(WORDS, text=TEXT)
    widget.mount(tree)
    page = widget.page
    page.keyboard.press("Tab")
    for key in ("ArrowRight", "ArrowRight", "End", "Home", "ArrowRight", "ArrowLeft", "ArrowRight"):
        page.keyboard.press(key)
    expect(widget.token(1)).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(widget.token(7)).to_be_focused()
    page.keyboard.press("ArrowUp")
    expect(widget.token(1)).to_be_focused()
    assert page.locator(".nbt-token[tabindex='0']").count() == 1
    # A notebook's shortcuts leave alone what has this itself.
    assert widget.token(1).get_attribute("data-lm-suppress-shortcuts") == "true"
    page.keyboard.press("Enter")
    expect(page.locator(".nbt-popover button")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator(".nbt-popover")).to_be_hidden()
    expect(widget.token(1)).to_be_focused()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    widget.exchange()
    assert client.requests[0][3][-1] == token_id("\n")
    expect(page.get_by_role("tab")).to_have_count(2)
    page.get_by_role("tab").nth(1).focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab").first).to_be_focused()
    expect(page.get_by_role("tab").first).to_have_attribute("aria-selected", "true")
    page.keyboard.press("End")
    expect(page.get_by_role("tab").nth(1)).to_be_focused()
    assert client.aborted == []
    tree[1].cancel()
    tree[1].result(60)


def test_a_button_leads_from_one_uncertain_token_to_the_next_and_back_to_the_first(
    widget: TokensPage,
) -> None:
    widget.mount(tree_of(WORDS, text=TEXT)[0])
    button = widget.page.get_by_role("button", name="next uncertain token")
    # Those that had a probability of one half or less. Nothing that opens may lie over the button.
    for index in (4, 5, 7, 8, 4):
        button.click()
        expect(widget.token(index)).to_be_focused()
    sure = [("The", 0.9, {"A": 0.05}), (" end", 0.97, {})]
    widget.mount(tree_of(sure, text="The end")[0])
    button.last.click()
    said = widget.page.get_by_text("No token here had a probability of 50 % or less.")
    expect(said).to_be_visible()


def test_the_focus_stays_where_somebody_works(widget: TokensPage) -> None:
    tree, client = tree_of(WORDS, text=TEXT)
    widget.mount(tree)
    page = widget.page
    page.keyboard.press("Tab")
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "Enter", "ArrowDown"):
        page.keyboard.press(key)
    # The rest of the alternatives comes.
    row = page.locator(".nbt-popover button", has_text="·located")
    expect(row).to_be_focused()
    widget.exchange()
    expect(page.locator(".nbt-row")).to_have_count(6)
    expect(row).to_be_focused()
    # The branch that was begun takes the answer's place.
    page.keyboard.press("Enter")
    widget.exchange()
    assert client.requests[0][3][-1] == token_id(" located")
    expect(page.locator(".nbt-chosen")).to_be_focused()
    # Everything comes again.
    page.keyboard.press("ArrowLeft")
    expect(widget.token(2)).to_be_focused()
    widget.send({"kind": "node", "id": 1, "parent": 0, "position": 3, "start": 9, "tokens": []})
    widget.exchange()
    assert widget.greetings == 2
    expect(widget.token(2)).to_be_focused()
    # The button that was pressed goes.
    stop = page.get_by_role("button", name="Stop")
    stop.focus()
    page.keyboard.press("Enter")
    widget.exchange()
    tree[1].result(60)
    widget.wait_for(".nbt-footer", "ended early")
    expect(stop).to_be_hidden()
    expect(widget.token(2)).to_be_focused()


@pytest.mark.parametrize(
    ("width", "height", "theme"), [(800, 300, DARK), (1280, 240, LIGHT), (320, 240, LIGHT)]
)
def test_alternatives_stay_inside_the_page(
    bare_pages: BarePages, width: int, height: int, theme: dict[str, str]
) -> None:
    many = {f" alternative number {number}": 0.02 for number in range(20)}
    tree, _ = tree_of([(f"word {number} ", 0.5, many) for number in range(40)])
    widget = TokensPage(bare_pages.take(), width=width, height=height, theme=theme)
    widget.mount(tree)
    for index in (0, 39, 20, 9):
        widget.token(index).click()
        widget.exchange()
        expect(widget.page.locator(".nbt-row")).to_have_count(21)
        box = widget.page.locator(".nbt-popover").bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["y"] >= 0
        assert box["x"] + box["width"] <= width
        assert box["y"] + box["height"] <= height
        token = widget.token(index).bounding_box()
        assert token is not None
        assert (
            box["y"] >= token["y"] + token["height"] / 2
            or box["y"] + box["height"] <= token["y"] + token["height"] / 2
        )
        widget.page.keyboard.press("Escape")
    assert widget.page.evaluate("document.documentElement.scrollWidth") <= width
    bare_pages.give_back(widget.page)


STYLES = """(nodes) => nodes.map((node) => {
    const { color, backgroundColor, borderBottomColor, textDecorationLine, fontStyle } = getComputedStyle(node);
    return { color, ground: backgroundColor, edge: borderBottomColor, line: textDecorationLine, slant: fontStyle };
})"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_forced_colours_leave_shades_and_say_which_tab_is_open(widget: TokensPage, scheme: str) -> None:
    tree, _ = tree_of(WORDS, text=TEXT)
    widget.page.emulate_media(forced_colors="active", color_scheme=scheme)
    widget.mount(tree)
    widget.choose(token=3, alternative=0)
    widget.page.get_by_role("tab").first.click()

    def styles(selector: str) -> list[dict[str, str]]:
        found: list[dict[str, str]] = widget.page.locator(selector).evaluate_all(STYLES)
        return found

    tokens = styles(".nbt-token")
    grounds = {styled["ground"] for styled in styles(".nbt-scale > .nbt-swatch")}
    assert len(grounds) == 10
    assert len({styled["ground"] for styled in tokens} & grounds) >= 5
    assert {styled["color"] for styled in tokens} == {styles(".nbt-text")[0]["color"]}
    # No shade alone says that a token is uncertain, and no opacity that it is outside of the answer.
    shades = [
        int(token.get_attribute("data-shade") or 0) for token in widget.page.locator(".nbt-token").all()
    ]
    assert ["underline" in styled["line"] for styled in tokens] == [shade >= 5 for shade in shades]
    assert [styled["slant"] for styled in styles(".nbt-outside")] == ["italic"]
    chosen, other = styles("[role=tab]")
    assert chosen["ground"] == chosen["edge"] != other["ground"]
    assert chosen["color"] != chosen["ground"]


def test_forced_colours_leave_what_pages_without_a_script_show(bare_pages: BarePages) -> None:
    tree, _ = tree_of(WORDS, text=TEXT)
    grid = GridHtml(layout_of([("temperature", ["0", "1"])], 0))
    cells = [GridCell(answers=(text,)) for text in "ab"]
    rows = [Listed(number, "", "why?", "because", ("now",)) for number in (1, 2)]
    page = bare_pages.take()
    page.emulate_media(forced_colors="active")
    page.set_content(
        shaded(tree.roots[0], 5) + grid.live("1 of 2", 0.5, cells) + list_html(("#", "ASKED"), rows)
    )

    def styles(selector: str, name: str) -> list[str]:
        found: list[str] = page.locator(selector).evaluate_all(
            "(nodes, name) => nodes.map((node) => getComputedStyle(node)[name])", name
        )
        return found

    shades = styles("span[title]", "backgroundColor")
    assert len(shades) == len(WORDS)
    assert len(set(shades)) >= 6
    assert set(styles("span[title]", "color")) == {"rgb(0, 0, 0)"}
    assert styles("div[style*='width:50.0%']", "backgroundColor") == ["rgb(38, 132, 255)"]
    # The grounds of every second row are gone: there are lines.
    assert set(styles("tbody td[style*='border-top']", "borderTopColor")) == {"rgb(0, 0, 0)"}
    bare_pages.give_back(page)


def test_what_is_not_possible_is_said(widget: TokensPage) -> None:
    tree, client = tree_of(WORDS, text=TEXT)
    widget.mount(tree)
    client.refusal = EngineDeadError("the engine has <b>ended</b>", "log")
    widget.choose(token=3, alternative=0)
    notice = widget.page.get_by_role("alert")
    expect(notice).to_have_text("EngineDeadError: the engine has <b>ended</b>")
    client.refusal = None
    widget.choose(token=3, alternative=0)
    expect(notice).to_have_text("")
    client.collectors[0].put_error(EngineDeadError("gone", ""))
    widget.wait_for(".nbt-footer", "EngineDeadError: gone")
    expect(widget.page.get_by_role("tab").nth(1)).to_have_attribute("data-state", "failed")


def test_an_answer_that_follows_a_grammar_does_not_branch(widget: TokensPage) -> None:
    grammar = SamplingParams(logprobs=3, structured_outputs=StructuredOutputsParams(regex="x+"))
    tree, _ = tree_of(WORDS, params=grammar)
    widget.mount(tree)
    widget.page.keyboard.press("Tab")
    widget.page.keyboard.press("Enter")
    expect(widget.page.locator(".nbt-hint")).to_contain_text("follows a grammar")
    assert widget.page.locator(".nbt-popover button").count() == 0
    # Nothing in it can be chosen: it is read out as a whole.
    dialog = widget.page.get_by_role("dialog")
    expect(dialog).to_be_focused()
    expect(dialog).to_have_accessible_description(re.compile(r"^The · 90 % · rank 1 no branches: .*grammar"))
    widget.page.keyboard.press("ArrowDown")
    widget.page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(widget.token(0)).to_be_focused()


def test_a_kernel_that_nothing_can_be_sent_to_is_said_not_to_answer(widget: TokensPage) -> None:
    tree, client = tree_of(WORDS, None)
    widget.mount(tree)
    widget.push(tree)
    page = widget.page
    # As in a notebook whose kernel was restarted.
    page.evaluate("() => { Model.prototype.send = () => { throw new Error('Cannot send'); }; }")
    notice = page.get_by_role("alert")
    widget.choose(token=3, alternative=0)
    expect(notice).to_have_text("The kernel does not answer.")
    assert client.requests == []
    widget.send({"kind": "notice", "node": 0, "text": ""})
    widget.exchange()
    page.get_by_role("button", name="Stop").click()
    expect(notice).to_have_text("The kernel does not answer.")
    # A view made now leaves nothing.
    page.evaluate(
        """() => {
            window.listeners = 0;
            const { addEventListener, removeEventListener } = document;
            document.addEventListener = (...args) => { listeners += 1; addEventListener.apply(document, args); };
            document.removeEventListener = (...args) => { listeners -= 1; removeEventListener.apply(document, args); };
        }"""
    )
    widget.mount(None, snapshot=widget.snapshot)
    assert page.evaluate("listeners") == 2
    page.evaluate("cleanups[1]()")
    assert page.evaluate("[listeners, models[1].listeners.length]") == [0, 0]


def test_a_saved_state_is_shown_without_a_kernel_and_folded_tokens_unfold(widget: TokensPage) -> None:
    tree, _ = tree_of(WORDS, text=TEXT)
    widget.mount(tree)
    widget.push(tree)
    snapshot = widget.snapshot
    widget.page.evaluate(
        "cleanups[0](); models.length = 0; document.getElementById('cells').replaceChildren()"
    )
    widget.mount(None, folded=True, snapshot=snapshot)
    fold = widget.page.get_by_role("button", name="Tokens and their probabilities")
    expect(fold).to_have_attribute("aria-expanded", "false")
    expect(widget.page.locator(".nbt-text")).to_be_hidden()
    fold.click()
    expect(widget.page.locator(".nbt-token")).to_have_count(len(WORDS))
    widget.token(3).click()
    expect(widget.page.locator(".nbt-row")).to_have_count(5)


def test_a_gap_is_filled_and_a_long_answer_is_drawn_piece_by_piece(widget: TokensPage) -> None:
    tree, _ = tree_of([("word ", 0.5, {"other ": 0.2})] * 3000, None)
    widget.mount(tree)
    expect(widget.page.locator(".nbt-token")).to_have_count(3000)
    first = widget.page.locator(".nbt-token").first.element_handle()
    widget.send({"kind": "node", "id": 0, "parent": None, "position": 0, "start": 3002, "tokens": []})
    widget.exchange()
    assert widget.greetings == 2
    expect(widget.page.locator(".nbt-token")).to_have_count(3000)
    assert first is not None
    assert not first.evaluate("(element) => element.isConnected")
