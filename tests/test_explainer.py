"""docs/explainer.html: its data are the code's, and what it shows in Chromium is what the code says."""

import importlib.util
import itertools
import json
import re

import analysis_browser
import pytest
import torch
from small import ROOT

from backbones.cost import cost
from backbones.mamba import paths
from backbones.sizes import SIZES
from experiments import config
from routing.layout import Layout
from routing.rng import Draws
from routing.route import Route, keep_count
from routing.segment import Selection

PAGE = ROOT / "docs" / "explainer.html"
READY = "document.documentElement.dataset.ready === 'yes'"


def test_the_page_holds_what_the_code_says_today():
    spec = importlib.util.spec_from_file_location("docs_explainer", PAGE.with_suffix(".py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (embedded,) = module.MARK.findall(PAGE.read_text(encoding="utf-8"))[:1]
    assert json.loads(embedded) == json.loads(module.text()), "type python docs/explainer.py"
    assert len(embedded) < 40_000


def test_the_page_asks_for_nothing_outside_itself():
    text = PAGE.read_text(encoding="utf-8")
    assert set(re.findall(r'(?:src|href)="([^"]*)"', text)) == {"data:,", "index.html"}
    assert not re.search(r"url\(|@import|fetch|https?:", text)
    assert "default-src 'none'" in text and len(text.splitlines()) <= 600


def in_browser(test):
    missing = pytest.mark.skipif(analysis_browser.find() is None, reason="no Chromium on PATH")
    return pytest.mark.slow(missing(test))


@pytest.fixture(scope="module")
def browser():
    found = analysis_browser.Browser()
    found.open(PAGE, ready=READY)
    yield found
    assert found.errors == []
    assert {url.split(":")[0] for url in found.requests} <= {"file", "data"}
    found.close()


def show(browser, **setting):
    """Set the address, as a link would."""
    words = "&".join(f"{key}={value}" for key, value in setting.items())
    browser.run(
        f"new Promise(done => {{ location.hash = '{words}&x=' + Math.random(); setTimeout(done, 50); }})"
    )


def texts(browser, selector):
    return browser.run(f"[...document.querySelectorAll('{selector}')].map(e => e.textContent)")


def shown(browser, name):
    return texts(browser, f"#{name}")[0], float(
        browser.run(f"document.getElementById('{name}').dataset.value")
    )


COSTS = [
    # backbone, size, depth, route, tokens
    ("mamba", "B", 12, "2-8@0.5", 256),
    ("dit", "XL", 28, "2-24@0.5", 256),
    ("dit", "S", 12, "0-11@0.95", 64),
    ("rwkv", "L", 24, "5-5@0.15", 1024),
    ("mamba", "XL", 31, "3-30@0.35", 1024),
    ("rwkv", "S", 2, "1-1@0.9", 64),
    ("dit", "L", 17, "none", 256),
    ("rwkv", "B", 12, "2-8@0.55", 256),
]


@in_browser
@pytest.mark.parametrize(("train", "setting"), itertools.product((True, False), COSTS))
def test_browser_shows_the_macs_of_the_cost_model(browser, train, setting):
    backbone, size, depth, route, tokens = setting
    show(
        browser,
        backbone=backbone,
        size=size,
        depth=depth,
        route=route,
        tokens=tokens,
        **{"pass": "train" if train else "inference"},
    )
    want = cost(
        backbone,
        f"{size}/2",
        depth=depth,
        route=route if train else "none",
        input_size=2 * round(tokens**0.5),
    )
    linear, whole = want.macs_routed_no_attention, want.macs_dense_no_attention
    for name, value, text in (
        ("dense", want.macs_dense, f"{want.macs_dense / 1e9:.3f} G"),
        ("routed", want.macs_routed, f"{want.macs_routed / 1e9:.3f} G"),
        ("speedup", want.speedup, f"{want.speedup:.2f}x"),
        ("keep", min(want.tokens), f"{min(want.tokens)}"),
        ("linear", linear, f"{linear / 1e9:.3f} of {whole / 1e9:.3f}"),
    ):
        said, exact = shown(browser, name)
        assert exact == value and text in said.replace("\u00a0", " "), name
    if train:
        config.load(texts(browser, "#typed")[0].split()[2:])
    bars = browser.run(
        "[...document.querySelectorAll('#columns rect[fill=\"var(--on)\"]')].map(e => +e.getAttribute('height'))"
    )
    ratios = [
        m
        / max(cost(backbone, f"{size}/2", depth=depth, input_size=2 * round(tokens**0.5)).per_block)
        for m in want.per_block
    ]
    assert [b / 64 for b in bars] == pytest.approx(ratios)


TOKENS = [
    # selection, route, depth, block, sample, more
    ("random", "2-8@0.5", 12, 4, 0, {"backbone": "mamba"}),
    ("random", "2-8@0.5", 12, 9, 0, {"backbone": "mamba", "mixer": 1}),
    ("rows", "2-8@0.7", 12, 8, 3, {"backbone": "mamba", "scan": "zigzag", "mixer": 1}),
    ("columns", "0-20@0.35", 24, 17, 7, {"backbone": "mamba", "scan": "zigzag"}),
    ("unsorted", "2-8@0.6", 12, 2, 5, {"backbone": "mamba", "mixer": 1}),
    ("stride", "1-3@0.85", 5, 2, 2, {"backbone": "rwkv", "missing": "nearest"}),
    ("blocks", "2-8@0.5", 12, 3, 4, {"backbone": "rwkv", "missing": "zero"}),
    ("random", "2-8@0.3", 12, 3, 6, {"backbone": "rwkv"}),
    ("quad", "2-8@0.75", 12, 3, 1, {"backbone": "dit"}),
]


@in_browser
@pytest.mark.parametrize("setting", TOKENS, ids=lambda s: s[0])
def test_browser_shows_the_tokens_paths_gaps_and_neighbours_of_the_code(browser, setting):
    selection, route, depth, block, sample, more = setting
    show(browser, selection=selection, route=route, depth=depth, block=block, sample=sample, **more)
    segment = Route.parse(route).segments[0]
    ids = shuffle = None
    if segment.start <= block <= segment.end:
        draws, own, keep = (
            Draws(0, 0, torch.arange(8)),
            Selection(selection),
            keep_count(64, segment.rate),
        )
        ids = own.ids(draws, 0, (8, 8), keep)[sample]
        shuffle = own.shuffle(draws, 0, keep)
        shuffle = None if shuffle is None else shuffle[sample]
    layout = Layout((8, 8), ids, shuffle=shuffle)
    tokens = torch.arange(64) if ids is None else ids
    filled = browser.run(
        "[...document.querySelectorAll('#grid [data-in=\"1\"]')].map(e => +e.dataset.id)"
    )
    assert filled == tokens.tolist()
    name = (
        paths(more.get("scan", "alternate"), block)[more.get("mixer", 0)]
        if more["backbone"] == "mamba"
        else "raster"
    )
    assert (
        list(map(int, texts(browser, "#strip span")))
        == tokens[layout.order(name).perm.flatten()].tolist()
    )
    gaps = (
        []
        if selection == "unsorted" or more["backbone"] == "dit"
        else layout.gaps(name).flatten().tolist()
    )
    assert list(map(int, texts(browser, "#strip small"))) == gaps
    for mine in range(0, len(tokens), 4) if more["backbone"] == "rwkv" else ():
        show(
            browser,
            selection=selection,
            route=route,
            depth=depth,
            block=block,
            sample=sample,
            token=int(tokens[mine]),
            **more,
        )
        table = layout.neighbours(more.get("missing", "self"))[..., mine].flatten().tolist()
        for text, local in zip(texts(browser, "#shift li"), table, strict=True):
            want = (
                "0"
                if local == len(tokens)
                else "the token itself"
                if local == mine
                else f"token {tokens[local]}"
            )
            assert text.endswith(f" {want}"), (text, want)


def press(browser, *keys):
    for key in keys:
        for kind in ("rawKeyDown", "keyUp"):
            code = {"Tab": 9, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}[
                key
            ]
            browser.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code
            )


@in_browser
def test_browser_works_by_keyboard_and_its_address_holds_the_setting(browser):
    show(browser, backbone="dit", route="2-8@0.5")
    assert browser.run(
        "[...document.querySelectorAll('input, select')].every(e => e.labels.length === 1)"
    )
    browser.run("document.activeElement.blur(), document.querySelector('header a').focus()")
    press(browser, "Tab", "ArrowRight")  # the backbone's radio buttons: DiT, then Mamba
    for name, key, count in (
        ("end", "ArrowLeft", 2),
        ("rate", "ArrowRight", 3),
        ("block", "ArrowRight", 1),
    ):
        browser.run(f"document.querySelector('[name={name}]').focus()")
        press(browser, *[key] * count)
    browser.run("document.getElementById('grid').focus()")
    press(browser, "ArrowDown", "ArrowRight")
    address = browser.run("location.hash")
    assert address == "#backbone=mamba&route=2-6@0.65&block=5&token=28"
    want = cost("mamba", "B/2", route="2-6@0.65").macs_routed
    assert shown(browser, "routed")[1] == want
    browser.call("Page.navigate", url="about:blank")
    browser.open(PAGE, ready=READY, fragment=address)
    assert shown(browser, "routed")[1] == want and texts(browser, "#say")[0].startswith(
        "Block 5 of Mamba is inside"
    )


@in_browser
def test_browser_settles_an_address_that_cannot_be(browser):
    show(
        browser,
        backbone="%3Cscript%3E",
        size="constructor",
        depth="1e9",
        route="40-3@7",
        token=-5,
        block="x",
    )
    assert texts(browser, "#typed") == [
        "python experiments/run.py backbone=mamba size=B/2 backbone.depth=32 route=31-31@0.95"
    ]
    for name, size in SIZES.items():
        if name in ("S", "B", "L", "XL"):
            show(browser, backbone="dit", size=name)
            assert f"route=2-{size.depth - 4}" in texts(browser, "#typed")[0]


def luminance(colour):
    colour = "#" + "".join(2 * c for c in colour[1:]) if len(colour) == 4 else colour
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@in_browser
@pytest.mark.parametrize("mode", ["light", "dark"])
def test_browser_in_light_and_dark_on_a_phone_and_without_motion(browser, mode):
    screen = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    browser.call("Emulation.setDeviceMetricsOverride", **screen)
    media = [
        {"name": "prefers-color-scheme", "value": mode},
        {"name": "prefers-reduced-motion", "value": "reduce"},
    ]
    browser.call("Emulation.setEmulatedMedia", features=media)
    for backbone in ("dit", "mamba", "rwkv"):
        show(browser, backbone=backbone, depth=32, route="2-28@0.75", size="XL")
        assert browser.run("document.documentElement.scrollWidth") == 390
    assert browser.run("getComputedStyle(document.getElementById('play')).display") == "none"
    read = "getComputedStyle(document.documentElement).getPropertyValue('--{}').trim()"
    for text, ground in (("ink", "bg"), ("ink", "band"), ("ink", "tint"), ("soft", "card"), ("soft", "band"), ("soft", "tint"),
                         ("skip", "card"), ("on", "card"), ("bg", "on")):  # fmt: skip
        pair = sorted(luminance(browser.run(read.format(name))) for name in (text, ground))
        assert (pair[1] + 0.05) / (pair[0] + 0.05) >= 4.5, (text, ground)
    browser.call("Emulation.clearDeviceMetricsOverride")
    browser.call("Emulation.setEmulatedMedia", features=[])
