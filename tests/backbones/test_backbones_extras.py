"""Learned parts of the baselines: MaskDiT's decoder, REPA's projector, SPRINT's fusion."""

import pytest
import torch
from small import random_backbone

import backbones
from backbones.cost import cost
from backbones.sizes import BackboneError
from routing.errors import UserError
from routing.options import RoutingError, RoutingOptions
from routing.route import Route
from routing.routed_pass import Routing

SHAPE = {"in_channels": 2, "input_size": 4, "num_classes": 3, "depth": 4, "width": 32, "heads": 2}
IDS = torch.tensor([[0, 3, 5, 6, 9, 10, 12, 15], [1, 2, 4, 7, 8, 11, 13, 14]])
DECODER = {"depth": 2, "width": 16, "heads": 2}
ALIGN = {"block": 2, "channels": 7, "hidden": 12}


def given():
    g = torch.Generator().manual_seed(0)
    return torch.randn(2, 2, 4, 4, generator=g), torch.rand(2, generator=g), torch.tensor([0, 2])


def plan(route="1-2", ids=IDS, **options):
    return Routing(Route.parse(route), RoutingOptions(**options), ids=ids)


def present(ids):
    """Mask (B, 1, 4, 4) of the tokens `ids`, which are pixels here."""
    return torch.zeros(2, 16, dtype=torch.bool).scatter(1, ids, True).view(2, 1, 4, 4)


@pytest.mark.parametrize("text", [None, (3, 5)])
def test_tokens_dropped_for_good_are_zero_and_never_seen(text):
    model = random_backbone(text=text)
    x, t, y = given()
    out = model(x, t, y, routing=plan("0-3", reinsert="none"), return_output=True)
    kept = present(IDS).expand_as(out.sample)
    assert torch.equal(out.kept, present(IDS).flatten(1))
    assert not out.sample[~kept].any()
    assert out.sample[kept].ne(0).all()
    changed = torch.where(present(IDS), x, x + 1)
    assert torch.equal(model(changed, t, y, routing=plan("0-3", reinsert="none")), out.sample)
    assert model(x, t, y, return_output=True).kept is None


@pytest.mark.parametrize("name", ["dit", "mamba", "rwkv"])
@pytest.mark.parametrize("text", [None, (3, 5)])
def test_decoder_predicts_every_patch(name, text):
    model = random_backbone(name, decoder=DECODER, text=text).train()
    x, t, y = given()
    out = model(x, t, y, routing=plan("0-3", reinsert="none"), return_output=True)
    assert out.sample.shape == x.shape and out.sample.ne(0).all()
    assert torch.equal(out.kept, present(IDS).flatten(1))
    # The dropped patches themselves are not seen, only predicted.
    changed = torch.where(present(IDS), x, x + 1)
    again = model(changed, t, y, routing=plan("0-3", reinsert="none"))
    assert torch.equal(again, out.sample)
    out.sample.square().sum().backward()
    unused = {k for k, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    assert unused <= {"text.null"}
    # A dense pass goes through the decoder too, without mask tokens.
    model.zero_grad()
    model(x, t, y).square().sum().backward()
    assert not model.decoder.mask.grad.any()
    assert model.head is None


def test_decoder_starts_at_zero():
    model = backbones.create("dit", "T/1", **SHAPE, decoder=DECODER)
    assert not model(*given()).any()


@pytest.mark.parametrize("route", ["none", "1-3", "3-3"])
def test_projected_tokens(route):
    model = random_backbone(align=ALIGN, text=(3, 5))
    out = model(*given(), routing=plan(route), return_output=True)
    inside = route == "1-3"
    assert out.aligned.shape == (2, 8 if inside else 16, 7)
    tokens = model(*given(), routing=plan(route), taps=[2]).taps[2]
    assert torch.equal(out.aligned, model.align(tokens[:, 3:]))
    targets = torch.arange(32.0).view(2, 16, 1)
    picked = out.aligned_layout.take_batched(targets)
    want = targets.gather(1, IDS[..., None]) if inside else targets
    assert torch.equal(picked, want)
    assert model(*given(), return_output=False).shape == (2, 2, 4, 4)


def test_fusion_leaves_the_stream_in_float32_and_has_its_own_reinsertion():
    model, (x, t, y) = random_backbone(fuse="1-2"), given()
    with torch.autocast("cpu", torch.bfloat16):
        taps = model(x, t, y, taps=(-1, 2, 3), return_output=True).taps
    assert {tap.dtype for tap in taps.values()} == {torch.float32}
    with pytest.raises(RoutingError, match="a learned span has its own"):
        model(x, t, y, routing=plan("none", None, reinsert="none"))


def test_text_of_another_shape_is_refused():
    model, (x, t, y) = random_backbone(text=(3, 5)), given()
    for shape in ((2, 2, 5), (1, 3, 5), (2, 3, 4), (2, 15)):
        with pytest.raises(BackboneError, match=r"takes \(batch, 3, 5\)"):
            model(x, t, y, text=torch.zeros(shape))


def test_every_weight_has_a_gradient_in_a_dense_pass_too():
    # Data parallelism waits for one from each, whatever a step drops.
    for options in ({"decoder": DECODER}, {"fuse": "1-2"}):
        model, (x, t, y) = random_backbone(**options).train(), given()
        model(x, t, y).square().sum().backward()
        assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("options", [{"learn_sigma": True}, {"decoder": DECODER}, {"fuse": "1-2@0.75"}, {"text": (3, 5)}])
def test_cost_agrees_with_torch(options):
    from torch.utils.flop_counter import FlopCounterMode

    model, how = random_backbone(**options), {"reinsert": "none"} if "text" in options else {}
    text = torch.zeros(2, *options["text"]) if "text" in options else None
    route, ids = ("1-2@0.75", IDS[:, ::2]) if "fuse" in options else ("1-2", IDS)
    for routing in (None, plan(route, ids, **how)):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(*given(), text, routing=routing)
        want = cost(**model.config, **how, route=route if routing else "none")
        assert counter.get_total_flops() == 2 * 2 * want.macs_routed


def test_cost_of_tokens_that_leave_late_or_for_good():
    options = {**SHAPE, "name": "dit", "size": "T/1", "route": "1-2"}
    assert cost(**options).tokens == (16, 8, 8, 16)
    assert cost(**options, reinsert="none").tokens == (16, 8, 8, 8)
    assert cost(**options, remove="after:1").tokens == (16, 16, 8, 16)
    assert cost(**options, remove="never").tokens == (16, 16, 16, 16)
    gone = cost(**options, reinsert="none")
    assert gone.macs_routed < cost(**options).macs_routed
    for wrong in ({"remove": "later"}, {"remove": "after:²"}, {"reinsert": "never"}):
        with pytest.raises(UserError, match=f"{next(iter(wrong))}.*expected"):
            cost(**options, **wrong)


def test_a_removed_argument_is_ignored_at_its_former_default_and_refused_otherwise():
    """Weights files of earlier versions describe their model with `router`."""
    model = random_backbone()
    assert backbones.create(**model.config, router=None).config == model.config
    assert cost(**model.config, router=None) == cost(**model.config)
    with pytest.raises(BackboneError, match="router=1-2: router was removed; only .* router=None"):
        backbones.create(**model.config, router="1-2")
