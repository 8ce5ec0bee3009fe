"""Costs against built models, torch's counter, hand counts and the papers' numbers."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import backbones
from backbones.cost import cost
from backbones.ops import native
from backbones.sizes import SIZES
from routing.route import Route
from routing.routed_pass import Routing

VARIANTS = [(name, {}) for name in backbones.names()] + [
    ("dit", {"rope": True, "qk_norm": True, "learn_sigma": True}),
    ("dit", {"text": (7, 24)}),
    ("mamba", {"scan": "bidirectional", "state": 16}),
    ("mamba", {"conv": "none", "attention": 4}),
    ("mamba", {"mixer": "mamba1", "scan": "bidirectional"}),
    ("rwkv", {"ratio": 4, "key_norm": True, "attention": [1, 5]}),
    ("lightningdit", {"qk_norm": False, "attention": 2}),
    ("dit", {"condition": "prefix", "skips": True, "text": (7, 24)}),
    ("mamba", {"mixer": "mamba1", "mixers": 1, "scan": "zigzag"}),
    ("mamba", {"mixers": 1, "scan": "raster", "condition": "prefix", "skips": True}),
    ("rwkv", {"ratio": 4, "wkv": "rank", "skips": True, "num_classes": 0}),
    ("lightningdit", {"context_tokens": 32, "bottleneck": 128}),
    ("mamba", {"context_tokens": 8, "context_start": 0}),
    ("dit", {"decoder": {}}),
    ("dit", {"fuse": "1-2@0.75"}),
    ("dit", {"decoder": {"depth": 2, "width": 16, "heads": 2}, "align": {"block": 0}, "text": (3, 5)}),
]


def meta(name, size="S/2", **options):
    with torch.device("meta"):
        return backbones.create(name, size, **options)


def parameters(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_parameters_are_exact(name, options):
    model = meta(name, depth=6, **options)
    assert parameters(model) == cost(name, depth=6, **options).params == cost(**model.config).params


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["dit", "mamba", "rwkv"])
def test_parameters_at_every_size(name, size):
    count = cost(name, f"{size}/2").params
    if size in ("T", "S"):
        assert parameters(meta(name, f"{size}/2")) == count
    # One size table serves all three: a table may compare them row by row.
    assert abs(count / cost("dit", f"{size}/2").params - 1) < 0.06


def test_published_parameter_counts():
    for size, millions in (("S", 32.87), ("B", 130.3), ("L", 457.8), ("XL", 674.8)):
        assert cost("dit", f"{size}/2").params / 1e6 == pytest.approx(millions, abs=0.06)
    # LightningDiT's 675M at XL/1 on VA-VAE's 32 channels of 16x16.
    lightning = cost("lightningdit", "XL/1", in_channels=32, input_size=16)
    assert lightning.params == pytest.approx(675e6, rel=2e-3)


def test_published_macs():
    """PAPER: "GFLOPs" of DiT, TREAD and Sparse Guidance are MACs."""
    giga = 1e9
    xl = cost("dit", "XL/2", route="2-24")
    assert xl.macs_dense / giga == pytest.approx(118.6, rel=1e-3)
    assert xl.macs_dense_no_attention / giga == pytest.approx(114.42, rel=1e-3)
    # A guided step by two routed passes of the same weights costs their sum.
    guided = sum(cost("dit", "XL/2", route=f"2-24@{g}").macs_routed_no_attention for g in (0.5, 0.9))
    assert guided / giga == pytest.approx(97.67, rel=1e-3)
    two = cost("dit", "B/2", route="0-4+6-9")
    assert two.macs_dense_no_attention / giga == pytest.approx(21.81, rel=1e-3)
    assert two.macs_routed_no_attention / giga == pytest.approx(13.65, rel=1e-3)
    # 77 text tokens in context, never routed, with their embedding of 768 channels.
    text = cost("dit", "B/2", route="0-4+6-9", text=(77, 768), num_classes=0)
    assert text.macs_dense_no_attention / giga == pytest.approx(28.47, rel=4e-3)
    assert text.macs_routed_no_attention / giga == pytest.approx(20.31, rel=6e-3)


@pytest.mark.parametrize(
    ("name", "options"), [("mamba", {"scan": "bidirectional"}), ("mamba", {"mixer": "mamba1"}), ("rwkv", {})]
)
def test_linear_layers_of_the_others_agree_with_torch(name, options, monkeypatch):
    """Scans are counted by hand; without them only linear layers are left."""
    monkeypatch.setattr(
        "backbones.ops.mixer.ssd",
        lambda x, dt, a, d, gap, width, **k: x[..., : dt.shape[2] * width].unflatten(-1, (-1, width)),
    )
    monkeypatch.setattr("backbones.mamba.selective_scan", lambda x, *a, **k: x)
    monkeypatch.setattr("backbones.ops.mixer.causal_conv", lambda x, *a, **k: x)
    monkeypatch.setattr("backbones.rwkv.biwkv", lambda k, v, *a, **n: v)
    model = backbones.create(name, "T/2", in_channels=2, input_size=8, num_classes=3, **options)
    x, time, label = torch.zeros(1, 2, 8, 8), torch.zeros(1), torch.zeros(1, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(x, time, label)
    expected = cost(**{**model.config, "size": "T/2"}).macs_dense_no_attention
    assert counter.get_total_flops() == 2 * expected


def test_scans_by_hand():
    """At width 64: inner 128, 4 heads of 32, state 8, convolution over 144 channels, two mixers."""
    token = 2 * (128 * 8 * 3 + 2 * 128 + 4 * 144)
    one = cost("mamba", "T/1", depth=1, input_size=8)
    assert one.macs_dense - one.macs_dense_no_attention == 64 * token
    # bi-WKV: two directions of a numerator and a denominator, the bonus twice; five mixtures.
    one = cost("rwkv", "T/1", depth=1, input_size=8)
    assert one.macs_dense - one.macs_dense_no_attention == 64 * 64 * (2 * 2 + 2 + 5)


def test_everything_adds_up():
    for name in ("dit", "mamba", "rwkv"):
        dense, half = cost(name, "S/2"), cost(name, "S/2", route="2-8")
        assert dense.macs_routed == dense.macs_dense == half.macs_dense
        assert half.macs_routed < half.macs_dense
        assert half.activation_bytes < dense.activation_bytes
        saved = sum(a - b for a, b in zip(dense.per_block, half.per_block, strict=True))
        assert saved == half.macs_dense - half.macs_routed
        assert half.per_block[1] == dense.per_block[1] and half.per_block[2] < dense.per_block[2]
    assert cost("dit", "XL/2", route="2-24").speedup == pytest.approx(1.72, abs=0.01)


@pytest.mark.parametrize("name", backbones.names())
def test_activations_are_what_autograd_saves(name, monkeypatch):
    """Bytes of the distinct storages that autograd keeps for the backward pass, within 15 %.

    Of a scan the count lies between what the CPU's own kernels keep and what plain formulas do.
    """
    route, depth = "1-2", 3
    model = backbones.create(name, "S/2", depth=depth, input_size=32)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    batch = 1
    x, t, y = torch.randn(batch, 4, 32, 32), torch.rand(batch), torch.zeros(batch, dtype=torch.long)
    ids = torch.arange(0, 256, 2)
    plan = Routing(Route.parse(route), ids=ids)

    def measured():
        kept = {}

        def pack(t):
            storage = t.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = model(x, t, y, routing=plan)
        saved = sum(s.nbytes() for s in kept.values())
        del out
        return saved

    predicted = batch * cost(name, "S/2", depth=depth, route=route).activation_bytes
    least = measured()
    monkeypatch.setattr(native, "bypassed", lambda: True)
    if native.library()[0]:
        monkeypatch.setattr(torch.ops.tread, "takes", lambda tensors: False)
    most = measured()
    assert least < 1.15 * predicted and most > 0.85 * predicted
    if name not in ("mamba", "rwkv"):
        assert most == pytest.approx(predicted, rel=0.15)


def test_training_memory_grows_with_the_batch():
    one = cost("dit", "S/2")
    assert one.training_bytes(0) == one.params * 20
    assert one.training_bytes(8) - one.training_bytes(0) == 8 * one.activation_bytes
    assert one.training_bytes(0, ema=False) == one.params * 16
