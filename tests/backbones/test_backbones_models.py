"""Registry, sizes, initialisation and what a model returns."""

import pytest
import torch
from small import random_backbone

import backbones
from backbones.mamba import Conv
from backbones.ops import conv, ssd
from backbones.sizes import SIZES, BackboneError, Size, parse_size
from routing.route import Route
from routing.routed_pass import Routing
from routing.stack import prepare

TINY = {"in_channels": 1, "input_size": 4, "num_classes": 3, "depth": 4, "width": 32, "heads": 2}


def tiny(name, size="T/1", **options):
    return backbones.create(name, size, **{**TINY, **options})


def inputs(model, batch=2):
    g = torch.Generator().manual_seed(0)
    shape = (batch, model.in_channels, *model.config["input_size"])
    y = torch.arange(batch) % model.num_classes if model.num_classes else None
    return torch.randn(shape, generator=g), torch.rand(batch, generator=g), y


@pytest.fixture
def empty_is_nan():
    """`torch.empty` is filled with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", backbones.names())
def test_every_parameter_is_initialised(name, empty_is_nan):
    missing = [key for key, parameter in tiny(name).named_parameters() if not parameter.isfinite().all()]
    assert not missing, f"{name}: initialise() leaves {missing} as torch.empty made them"


def test_a_parameter_that_nobody_initialises_is_one_sentence(monkeypatch, empty_is_nan):
    monkeypatch.setattr(Conv, "initialise", lambda self: None)
    message = r"backbone mamba: parameter 0.one.conv.weight of the blocks has values up to nan after initialisation"
    with pytest.raises(BackboneError, match=message):
        tiny("mamba")


def test_words_that_yaml_reads_as_truth_values_are_words_again():
    config = tiny("mamba", conv=True, gap=False).config
    assert (config["conv"], config["gap"]) == ("true", "off")
    assert tiny("mamba", conv=False).config["conv"] == "none"
    assert tiny("rwkv", wkv=True).config["wkv"] == "true"


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("mmaba", {}, "did you mean mamba"),
        ("mamba", {"scna": "zigzag"}, "did you mean scan"),
        ("dit", {"rope": "no"}, "dit: rope=no: expected true or false"),  # a word counts as true
        ("mamba", {"mixer": "mamba1", "kernel": "fla"}, "kernel=fla: expected one of .* mixer=mamba1"),
        ("rwkv", {"ratio": float("nan")}, r"ratio=\S+: expected"),
        ("mamba", {"gap": True}, "expected one of"),
        ("mamba", {"attention": [9]}, "expected blocks of 0..3"),
        ("mamba", {"mixers": 1, "attention": 4}, "attention=4: expected 0 for blocks of 1"),
        ("mamba", {"decoder": {"dept": 1}}, "did you mean depth"),
        ("mamba", {"decoder": {"width": 32, "heads": 5}}, "decoder: heads=5: expected a divisor of width=32, such as 4"),
        ("mamba", {"align": {"block": 4}}, "0..3"),
        ("mamba", {"num_classes": -1}, "num_classes=-1: expected an integer >= 0"),
        ("mamba", {"text": (0, 8)}, "text=.*: expected a list of 2"),
        ("dit", {"skips": True, "fuse": "1-2"}, "skips=true: expected false with SPRINT's"),
        ("dit", {"context_tokens": 4, "num_classes": 0}, "context_tokens=4: expected 0 in a model without classes"),
        ("dit", {"context_tokens": 4, "skips": True}, "context_tokens=4: expected 0 with skips=true"),
        ("dit", {"context_tokens": 4, "context_start": 4}, "context_start=4: expected a block, 0 to 3, or null"),
        ("dit", {"context_start": 2}, "context_start=2: expected null without context_tokens"),
        ("rwkv7", {"context_tokens": 4}, "context_tokens=4: expected 0 for rwkv7"),
        ("dit", {"size": "Q/2"}, "S/2"),
        ("dit", {"width": 100}, "width=100"),
        ("dit", {"heads": 7}, "heads=7: expected a divisor of width=32"),
        ("dit", {"depth": 2.5}, "depth=2.5: expected an integer >= 1"),
        ("dit", {"width": 0}, "width=0: expected an integer >= 1"),
        ("dit", {"size": Size("own", 4, 8, 2), "width": None, "heads": None}, "width=8: expected an integer >= 16"),
        ("dit", {"size": "T/2", "input_size": 5}, "patches of side 2"),
    ],
)
def test_options_that_no_model_has(name, wrong, message):
    with pytest.raises(BackboneError, match=message):
        tiny(name, **wrong)


def test_size_overrides():
    assert parse_size("S/2") == SIZES["S"]
    assert parse_size("S").patch == 2
    assert str(parse_size("S/4", depth=3)) == "custom/4"
    assert parse_size("T/1", width=96).heads == 4


@pytest.mark.parametrize("name", backbones.names())
def test_every_block_is_the_identity_and_the_output_zero_at_init(name):
    model = tiny(name)
    x, t, y = inputs(model)
    taps = model(x, t, y, taps=[-1, 3]).taps
    assert torch.equal(taps[-1], taps[3])
    assert not model(x, t, y).any()


@pytest.mark.parametrize("name", backbones.names())
def test_every_parameter_learns(name):
    model = random_backbone(name, text=(2, 5))
    x, t, y = inputs(model)
    text, dropped = torch.randn(2, 2, 5), torch.tensor([True, False])
    model(x, t, y, text=text, text_drop=dropped).square().sum().backward()
    for key, p in model.named_parameters():
        assert p.grad is not None and torch.isfinite(p.grad).all(), key
        assert p.grad.any(), key


def test_a_shape_without_a_letter_is_built_again():
    for more in ({}, {"depth": 4}):
        model = backbones.create("dit", parse_size("T/1", depth=3, width=32), input_size=4, **more)
        again = backbones.create(**model.config)
        assert again.size == model.size and again.config == model.config


@pytest.mark.parametrize("name", backbones.names())
def test_tables_are_made_before_blocks_look_them_up(name):
    """What a block makes itself is compiled in, once for every block and table."""
    model = tiny(name, depth=8)
    layout = model.layout().subset(torch.arange(0, 16, 2).expand(2, -1))
    prepare(model.stack.blocks, layout)
    tables, state = set(layout.tables), {}
    for block, mods in zip(model.stack.blocks, model.modulate(torch.randn(2, 32)), strict=True):
        extra = (state,) if getattr(block, "carries", ()) else ()
        block(torch.randn(2, 8, 32), mods, layout, *extra)
    assert set(layout.tables) == tables


@pytest.mark.parametrize("name", backbones.names())
def test_conditions(name):
    model = random_backbone(name, text=(2, 5))
    x, t, y = inputs(model)
    text = torch.randn(2, 2, 5)
    base = model(x, t, y, text)
    null = torch.full((2,), model.num_classes)
    assert torch.equal(model(x, t, None, text), model(x, t, null, text))
    assert not torch.allclose(base, model(x, t, null, text))
    assert torch.equal(model(x, t, y), model(x, t, y, text, torch.ones(2, dtype=torch.bool)))
    half = model(x, t, y, text, torch.tensor([True, False]))
    torch.testing.assert_close(half[1], base[1])
    assert not torch.allclose(half[0], base[0])
    assert not torch.allclose(base, model(x, t + 1, y, text))


@pytest.mark.parametrize("name", backbones.names())
def test_a_model_in_bf16_runs(name):
    """Weights in bf16, without autocast: for inference on small devices."""
    model = random_backbone(name, text=(2, 5)).bfloat16()
    x, t, y = inputs(model)
    out = model(x.bfloat16(), t, y)
    assert out.dtype == torch.bfloat16 and torch.isfinite(out).all()
    exact = random_backbone(name, text=(2, 5))
    exact.load_state_dict({k: v.float() for k, v in model.state_dict().items()})
    want = exact(x.bfloat16().float(), t, y)
    assert (out.float() - want).norm() < 0.1 * want.norm()


@pytest.mark.parametrize("name", ["dit", "mamba", "rwkv"])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_of_single_samples_by_torch_func(name):
    """A transform comes first: no table that it has seen may be left for the passes after it."""
    model = random_backbone(name, input_size=(2, 6))
    x, t, y = inputs(model)
    weights = {key: p.detach() for key, p in model.named_parameters()}

    def loss(weights, *given):
        given = [one[None] for one in given]
        return torch.func.functional_call(model, weights, (*given,)).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0, 0))(weights, x, t, y)
    for i in range(len(x)):
        model.zero_grad()
        model(x[i : i + 1], t[i : i + 1], y[i : i + 1]).square().sum().backward()
        for key, p in model.named_parameters():
            torch.testing.assert_close(each[key][i], p.grad, rtol=1e-3, atol=1e-3)


def test_learn_sigma_and_patches():
    model = tiny("dit", "T/2", in_channels=3, input_size=(8, 4), learn_sigma=True)
    x, t, y = inputs(model)
    assert model.grid == (4, 2)
    assert model(x, t, y).shape == (2, 6, 8, 4)
    with pytest.raises(BackboneError, match="does not fit"):
        model(x[..., :2], t, y)


def test_positions_are_the_formula():
    from backbones.heads import sincos_2d

    table = sincos_2d(32, (2, 3))
    omega = 1 / 10000 ** (torch.arange(8) / 8)
    row = torch.cat([torch.sin(2 * omega), torch.cos(2 * omega), torch.sin(omega), torch.cos(omega)])
    torch.testing.assert_close(table[1 * 3 + 2], row)


def test_hybrid_stacks():
    kinds = [type(b).__name__ for b in tiny("mamba", attention=2).stack.blocks]
    assert kinds == ["MambaBlock", "DiTBlock", "MambaBlock", "DiTBlock"]
    kinds = [type(b).__name__ for b in tiny("rwkv", attention=[0]).stack.blocks]
    assert kinds == ["DiTBlock", "RWKVBlock", "RWKVBlock", "RWKVBlock"]


@pytest.mark.parametrize("mixer", ["mamba2", "mamba1"])
@pytest.mark.parametrize("size", SIZES)
def test_kernel_shapes_of_mamba(size, mixer):
    """Kernels load 16 bytes at a time: every width and stride they see is a multiple of 8."""
    with torch.device("meta"):
        mix = backbones.create("mamba", f"{size}/2", mixer=mixer, depth=1).stack.blocks[0].one
    assert conv.kernel_misfit("causal-conv1d", len(mix.conv.weight), 4, True) is None
    widths = [mix.state, mix.inner, mix.in_proj.out_features, len(mix.conv.weight)]
    if mixer == "mamba2":
        for kernel in ("native", "mamba-ssm", "fla"):
            assert ssd.kernel_misfit(kernel, mix.headdim, mix.state) is None
        assert mix.inner == mix.headdim * mix.directions[0].dt_proj.out_features
        widths.append(mix.headdim)
    else:
        widths += [mix.rank, mix.directions[0].project.out_features]
    assert not any(width % 8 for width in widths)


@pytest.mark.parametrize("name", ["dit", "mamba", "rwkv"])
def test_a_bfloat16_residual_stays_so_through_the_route_and_changes_little(name):
    torch.manual_seed(0)
    model = backbones.create(name, "T/2", depth=4, input_size=16, num_classes=3)
    for p in model.parameters():
        p.data.add_(torch.randn_like(p), alpha=0.02)
    x, t, y = torch.randn(2, 4, 16, 16), torch.rand(2), torch.tensor([0, 2])
    routing = Routing(Route.parse("1-2@0.5").resolve(4), ids=[torch.arange(0, 64, 2)])

    def run(residual):
        model.residual = residual
        with torch.autocast("cpu", torch.bfloat16):
            return model(x, t, y, routing=routing, taps=range(-1, 4))

    full, half = run(None), run(torch.bfloat16)
    assert {tap.dtype for tap in full.taps.values()} == {torch.float32}
    assert {tap.dtype for tap in half.taps.values()} == {torch.bfloat16}
    assert (half.sample - full.sample).norm() < 0.03 * full.sample.norm()
    model.eval()  # inference keeps float32
    assert run(torch.bfloat16).taps[0].dtype == torch.float32
