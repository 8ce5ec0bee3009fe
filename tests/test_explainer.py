"""docs/explainer.html: its data are the code's, and what it shows in Chromium is what the code says."""

import json
import re
import runpy

import analysis_browser
import pytest
import torch
from small import ROOT

from backbones.cost import cost
from backbones.mamba import paths
from experiments import config
from routing.layout import Layout
from routing.rng import Draws
from routing.route import Route, keep_count
from routing.routed_pass import Selection

PAGE = ROOT / "docs" / "explainer.html"
READY = "document.documentElement.dataset.ready === 'yes'"


def test_the_page_holds_what_the_code_says_today():
    script = runpy.run_path(str(PAGE.with_suffix(".py")))
    (embedded,) = script["MARK"].findall(PAGE.read_text(encoding="utf-8"))[:1]
    assert json.loads(embedded) == json.loads(script["text"]()), "type python docs/explainer.py"
    assert len(embedded) < 40_000


def test_the_page_asks_for_nothing_outside_itself():
    text = PAGE.read_text(encoding="utf-8")
    assert set(re.findall(r'(?:src|href)="([^"]*)"', text)) == {"data:,", "method.html"}
    assert not re.search(r"url\(|@import|fetch|https?:", text)
    assert "default-src 'none'" in text and len(text.splitlines()) <= 600


def in_browser(test):
    return pytest.mark.slow(analysis_browser.needed(test))


@pytest.fixture(scope="module")
def browser():
    browser = analysis_browser.Browser()
    browser.open(PAGE, ready=READY)
    yield browser
    assert browser.errors == []
    assert {url.split(":")[0] for url in browser.requests} <= {"file", "data"}
    browser.close()


def show(browser, **setting):
    """Set the address, as a link would."""
    words = "&".join(f"{key}={value}" for key, value in setting.items())
    browser.run(f"new Promise(done => {{ location.hash = '{words}&x=' + Math.random(); setTimeout(done, 50); }})")


def texts(browser, selector):
    return browser.run(f"[...document.querySelectorAll('{selector}')].map(e => e.textContent)")


def shown_value(browser, name):
    return float(browser.run(f"document.getElementById('{name}').dataset.value"))


@in_browser
@pytest.mark.parametrize(
    ("backbone", "size", "depth", "route", "tokens"),
    [("mamba", "B", 12, "2-8@0.5", 256), ("dit", "XL", 28, "2-24@0.5", 256), ("rwkv", "L", 24, "5-5@0.15", 1024), ("dit", "L", 17, "none", 256)],
)  # fmt: skip
def test_browser_shows_the_macs_of_the_cost_model(browser, backbone, size, depth, route, tokens):
    show(browser, backbone=backbone, size=size, depth=depth, route=route, tokens=tokens)
    side = 2 * round(tokens**0.5)
    expected = cost(backbone, f"{size}/2", depth=depth, route=route, input_size=side)
    linear, whole = expected.macs_routed_no_attention, expected.macs_dense_no_attention
    for name, value, text in (
        ("dense", expected.macs_dense, f"{expected.macs_dense / 1e9:.3f} G"),
        ("routed", expected.macs_routed, f"{expected.macs_routed / 1e9:.3f} G"),
        ("speedup", expected.speedup, f"{expected.speedup:.2f}x"),
        ("keep", min(expected.tokens), f"{min(expected.tokens)}"),
        ("linear", linear, f"{linear / 1e9:.3f} of {whole / 1e9:.3f}"),
    ):
        assert shown_value(browser, name) == value, name
        assert text in texts(browser, f"#{name}")[0].replace("\u00a0", " "), name
    config.load(texts(browser, "#typed")[0].split()[2:])
    bars = """[...document.querySelectorAll('#columns rect[fill="var(--on)"]')].map(e => +e.getAttribute('height'))"""
    full = max(cost(backbone, f"{size}/2", depth=depth, input_size=side).per_block)
    assert [bar / 64 for bar in browser.run(bars)] == pytest.approx([macs / full for macs in expected.per_block])


TOKENS = [
    # selection, route, depth, block, sample, more
    ("random", "2-8@0.5", 12, 4, 0, {"backbone": "mamba"}),
    ("rows", "2-8@0.7", 12, 8, 3, {"backbone": "mamba", "scan": "zigzag", "mixer": 1}),
    ("unsorted", "2-8@0.6", 12, 2, 5, {"backbone": "mamba", "mixer": 1}),
    ("stride", "1-3@0.85", 5, 2, 2, {"backbone": "rwkv", "missing": "nearest"}),
    ("blocks", "2-8@0.5", 12, 3, 4, {"backbone": "rwkv", "missing": "zero"}),
    ("quad", "2-8@0.75", 12, 3, 1, {"backbone": "dit"}),
]


@in_browser
@pytest.mark.parametrize("setting", TOKENS, ids=lambda setting: setting[0])
def test_browser_shows_the_tokens_paths_gaps_and_neighbours_of_the_code(browser, setting):
    selection, route, depth, block, sample, more = setting
    setting = {"selection": selection, "route": route, "depth": depth, "block": block, "sample": sample} | more
    show(browser, **setting)
    draws, chosen = Draws(0, 0, torch.arange(8)), Selection(selection)
    keep = keep_count(64, Route.parse(route).segments[0].rate)
    tokens, shuffle = chosen.ids(draws, 0, (8, 8), keep)[sample], chosen.shuffle(draws, 0, keep)
    layout = Layout((8, 8), tokens, shuffle=None if shuffle is None else shuffle[sample])
    path = "raster"
    if more["backbone"] == "mamba":
        path = paths(more.get("scan", "alternate"), block)[more.get("mixer", 0)]
    filled = "[...document.querySelectorAll('#grid [data-in=\"1\"]')].map(e => +e.dataset.id)"
    assert browser.run(filled) == tokens.tolist()
    order = tokens[layout.permutation(path).flatten()].tolist()
    assert list(map(int, texts(browser, "#strip span"))) == order
    has_gaps = selection != "unsorted" and more["backbone"] != "dit"
    gaps = layout.gaps(path).flatten().tolist() if has_gaps else []
    assert list(map(int, texts(browser, "#strip small"))) == gaps
    if more["backbone"] != "rwkv":
        return
    for local in range(0, len(tokens), 4):
        show(browser, token=int(tokens[local]), **setting)
        table = layout.neighbours(more["missing"])[..., local].flatten().tolist()
        for text, neighbour in zip(texts(browser, "#shift li"), table, strict=True):
            expected = "0" if neighbour == len(tokens) else "the token itself"
            if neighbour not in (len(tokens), local):
                expected = f"token {tokens[neighbour]}"
            assert text.endswith(f" {expected}"), (text, expected)


KEYS = {"ArrowRight": 39, "ArrowDown": 40}


def press(browser, *keys):
    for key in keys:
        for kind in ("rawKeyDown", "keyUp"):
            browser.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key])


@in_browser
def test_browser_works_by_keyboard_and_its_address_holds_the_setting(browser):
    show(browser, backbone="mamba", route="2-6@0.5", block=5)
    browser.run("document.querySelector('[name=rate]').focus()")
    press(browser, "ArrowRight", "ArrowRight", "ArrowRight")
    browser.run("document.getElementById('grid').focus()")
    press(browser, "ArrowDown", "ArrowRight")
    address = browser.run("location.hash")
    assert address == "#backbone=mamba&route=2-6@0.65&block=5&token=28"
    expected = cost("mamba", "B/2", route="2-6@0.65").macs_routed
    assert shown_value(browser, "routed") == expected
    browser.call("Page.navigate", url="about:blank")
    browser.open(PAGE, ready=READY, fragment=address)
    assert shown_value(browser, "routed") == expected
    assert texts(browser, "#say")[0].startswith("Block 5 of Mamba is inside")
