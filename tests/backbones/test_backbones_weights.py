"""Weights in and out: published names and shapes made on the spot, and our own file."""

import argparse
import json

import pytest
import torch
import torch.nn.functional as F
from oracles import loss_map
from published_weights import DEPTH, HEADS, SIDE, C, D, published, rotary
from safetensors import safe_open
from safetensors.torch import save_file
from small import random_backbone

import backbones
from backbones import Backbone, import_weights
from backbones.sizes import BackboneError
from backbones.weights import hub, write
from experiments.diffusion import create_objective


def plain(s, x, t, y):
    """The published networks, written out from their state dicts: DiT, SiT, TREAD and LightningDiT."""
    patch = s["x_embedder.proj.weight"].shape[-1]

    def rms(name, z):
        return z * (z.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * s[f"{name}.weight"]

    def turned(name, z):
        if "feat_rope.freqs_cos" not in s:
            return z
        z = rms(name, z) if f"{name}.weight" in s else z
        half = torch.stack([-z[..., 1::2], z[..., ::2]], dim=-1).flatten(-2)
        return z * s["feat_rope.freqs_cos"] + half * s["feat_rope.freqs_sin"]

    def lin(name, z):
        return F.linear(z, s[f"{name}.weight"], s[f"{name}.bias"])

    def modulated(norm, z, shift, scale):
        z = rms(norm, z) if f"{norm}.weight" in s else F.layer_norm(z, (D,), eps=1e-6)
        return z * (1 + scale[:, None]) + shift[:, None]

    z = F.conv2d(x, s["x_embedder.proj.weight"], s["x_embedder.proj.bias"], stride=patch)
    z = z.flatten(2).transpose(1, 2) + s["pos_embed"]
    rates = torch.exp(-torch.log(torch.tensor(10000.0)) * torch.arange(128) / 128)
    angles = t[:, None] * rates
    c = lin("t_embedder.mlp.0", torch.cat([angles.cos(), angles.sin()], 1))
    c = lin("t_embedder.mlp.2", F.silu(c)) + s["y_embedder.embedding_table.weight"][y]
    for b in range(DEPTH):
        m = lin(f"blocks.{b}.adaLN_modulation.1", F.silu(c)).chunk(6, dim=1)
        q, k, v = (
            p.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for p in lin(f"blocks.{b}.attn.qkv", modulated(f"blocks.{b}.norm1", z, *m[:2])).chunk(3, -1)
        )
        q, k = turned(f"blocks.{b}.attn.q_norm", q), turned(f"blocks.{b}.attn.k_norm", k)
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        z = z + m[2][:, None] * lin(f"blocks.{b}.attn.proj", a)
        h = modulated(f"blocks.{b}.norm2", z, m[3], m[4])
        if f"blocks.{b}.mlp.w12.weight" in s:
            gate, h = lin(f"blocks.{b}.mlp.w12", h).chunk(2, dim=-1)
            h = lin(f"blocks.{b}.mlp.w3", F.silu(gate) * h)
        else:
            h = F.gelu(lin(f"blocks.{b}.mlp.fc1", h), approximate="tanh")
            h = lin(f"blocks.{b}.mlp.fc2", h)
        z = z + m[5][:, None] * h
    shift, scale = lin("final_layer.adaLN_modulation.1", F.silu(c)).chunk(2, dim=1)
    z = lin("final_layer.linear", modulated("final_layer.norm_final", z, shift, scale))
    side = SIDE // patch
    z = z.reshape(len(x), side, side, patch, patch, -1).permute(0, 5, 1, 3, 2, 4)
    return z.reshape(len(x), -1, SIDE, SIDE)


@pytest.mark.parametrize(("patch", "learn_sigma"), [(1, False), (2, True)])
@pytest.mark.parametrize("source", list(import_weights.SOURCES))
def test_published_networks_compute_the_same(source, patch, learn_sigma):
    state = published(source, patch, learn_sigma)
    model = import_weights.load(state, source, heads=HEADS)
    x, t, y = torch.randn(3, C, SIDE, SIDE), torch.rand(3) * 1000, torch.tensor([0, 4, 5])
    want = plain(state, x, t, y)
    if source in ("sit", "lightningdit"):
        want = want.chunk(2, dim=1)[0] if learn_sigma else want  # as their own forward does
    torch.testing.assert_close(model(x, t, y), want, rtol=1e-4, atol=1e-4)
    assert not model.training


@pytest.mark.parametrize("source", ["sit", "lightningdit"])
def test_the_objective_of_weights_that_count_time_towards_data(source):
    """SiT: x_t = t x + (1 - t) noise, the network gets t in [0, 1] and says dx_t/dt = x - noise."""
    state = published(source)
    model = import_weights.load(state, source, heads=HEADS)
    path = create_objective(import_weights.OBJECTIVES[source])
    x, noise = torch.randn(2, 3, C, SIDE, SIDE)
    y = torch.arange(3)
    t = torch.tensor([0.1, 0.5, 0.9])
    part = t[:, None, None, None]
    seen = part * x + (1 - part) * noise
    velocity = plain(state, seen, t, y)[:, :C]
    found = path.predict(model, seen, 1 - t, y=y).x0
    torch.testing.assert_close(found, seen + (1 - part) * velocity, rtol=1e-4, atol=1e-4)
    loss = loss_map(path, model, x, noise, 1 - t, y=y)
    square = (velocity - (x - noise)) ** 2
    if source == "lightningdit":
        square = square + (1 - F.cosine_similarity(velocity, x - noise, dim=1))[:, None]
    torch.testing.assert_close(loss, square, rtol=1e-3, atol=1e-3)


def test_the_sit_experiment_and_the_published_weights_agree():
    from experiments.config import load
    from experiments.options.objective import FlowOptions

    found, theirs = load(["experiment=sit"]).objective, import_weights.OBJECTIVES["sit"]
    assert all(getattr(found, key) == theirs[key] for key in ("name", "time_scale", "reverse"))
    # A saved run that does not say is of the flow as it was.
    assert (FlowOptions().time_scale, FlowOptions().reverse) == (1000.0, False)


def test_a_checkpoint_of_treads_training_gives_its_moving_average(tmp_path):
    """It holds the state of the EDM wrapper around the network, not that of the network."""
    state = published("tread", learn_sigma=False)
    saved = {
        "epoch": 3, "model_state_dict": {f"module.model.{k}": v * 0 for k, v in state.items()},
        "ema_state_dict": {f"model.{k}": v for k, v in state.items()},
        "optimizer_state_dict": {"state": {}, "param_groups": [{"lr": 1e-4}]},
    }  # fmt: skip
    torch.save(saved, tmp_path / "tread.pt")
    model = import_weights.load(tmp_path / "tread.pt", "tread", heads=HEADS)
    x, t, y = torch.randn(3, C, SIDE, SIDE), torch.tensor([0.02, 1.0, 80.0]), torch.arange(3)
    # EDM's preconditioning at sigma_data 0.5, written out.
    sigma, root = t[:, None, None, None], (t**2 + 0.25).sqrt()[:, None, None, None]
    want = 0.25 / root**2 * x + sigma * 0.5 / root * plain(state, x / root, t.log() / 4, y)
    found = create_objective(import_weights.OBJECTIVES["tread"]).predict(model, x, t, y=y).x0
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


def averaged(state):
    """`AveragedModel` of torch.optim.swa_utils saves `module.NAME` beside the count of its updates."""
    return {f"module.{key}": value for key, value in state.items()} | {"n_averaged": torch.tensor(3)}


def raw(state):
    """Other weights than the average of the same names."""
    return {key: value * 0 if key != "pos_embed" else value for key, value in state.items()}


# Checkpoints as scripts save them, from their moving average; the raw weights are beside it.
CHECKPOINTS = {
    "DiT": lambda s: {"model": raw(s), "ema": s, "step": 5, "args": argparse.Namespace(lr=1e-4)},
    "compiled and parallel": lambda s: {"ema": {f"module._orig_mod.{k}": v for k, v in s.items()}},
    "timm": lambda s: {"state_dict": raw(s), "state_dict_ema": s},
    "torch's AveragedModel": averaged,
    "AveragedModel beside the weights": lambda s: {"model": raw(s), "other": averaged(s)},
    "ema-pytorch": lambda s: {
        **{f"online_model.{key}": value for key, value in raw(s).items()},
        **{f"ema_model.{key}": value for key, value in s.items()},
        "initted": torch.tensor(True),
        "step": torch.tensor(2),
    },
}


@pytest.mark.parametrize("script", CHECKPOINTS)
def test_the_moving_average_is_taken_wherever_it_lies(tmp_path, script):
    state = published("dit")
    torch.save(CHECKPOINTS[script](state), tmp_path / "x.pt")
    model = import_weights.load(tmp_path / "x.pt", "dit", heads=HEADS)
    assert torch.equal(model.time.mlp[2].bias, state["t_embedder.mlp.2.bias"])


def test_an_empty_moving_average_is_warned_about(tmp_path):
    torch.save({"ema": {}, "model": published("dit")}, tmp_path / "x.pt")
    with pytest.warns(UserWarning, match="empty moving average at ema: these are the raw weights at model"):
        assert import_weights.load(tmp_path / "x.pt", "dit", heads=HEADS).depth == DEPTH


def test_several_averages_are_not_chosen_from():
    content = {"ema_0.999": published("dit"), "ema_0.9999": published("dit")}
    with pytest.raises(BackboneError, match=r"several averages .*ema_0\.999, ema_0\.9999"):
        import_weights.load(content, "dit", heads=HEADS)


def test_a_model_trained_without_a_null_class(tmp_path):
    """DiT's class_dropout_prob=0: the table has a row for each class and none for no class."""
    state = published("dit")
    key = "y_embedder.embedding_table.weight"
    state[key] = torch.randn(10, D)
    with pytest.raises(BackboneError, match="table of 10 rows; pass num_classes=10 if .*class_dropout_prob=0"):
        import_weights.load(state, "dit", heads=HEADS)
    assert import_weights.load(state, "dit", heads=HEADS, num_classes=9).num_classes == 9
    with pytest.raises(BackboneError, match="num_classes=7: the label table .* has 10 rows; expected 9, or 10"):
        import_weights.load(state, "dit", heads=HEADS, num_classes=7)
    torch.save({"ema": state, "args": argparse.Namespace(num_classes=10)}, tmp_path / "x.pt")
    x, t, y = torch.randn(3, C, SIDE, SIDE), torch.rand(3) * 1000, torch.tensor([0, 4, 9])
    for weights, given in ((state, 10), (tmp_path / "x.pt", None)):
        with pytest.warns(UserWarning, match="no null class"):
            model = import_weights.load(weights, "dit", heads=HEADS, num_classes=given)
        assert model.num_classes == 10 and not model.labels.table.weight[10].any()
        torch.testing.assert_close(model(x, t, y), plain(state, x, t, y), rtol=1e-4, atol=1e-4)


def test_weights_kept_in_half_precision():
    state = {key: value.bfloat16() for key, value in published("lightningdit").items()}
    model = import_weights.load(state, "lightningdit")  # QK-norm says how many heads there are
    assert torch.equal(model.time.mlp[0].bias, state["t_embedder.mlp.0.bias"].float())


def test_wrong_weights_say_what_is_wrong():
    state = published("dit")

    def refuse(weights, message, heads=HEADS, source="dit"):
        with pytest.raises(BackboneError, match=message) as error:
            import_weights.load(weights, source, heads=heads)
        assert len(str(error.value)) < 300

    extra = {"odd.weight": torch.zeros(1), "blocks.0.extra": torch.zeros(1)}
    refuse(state | extra, r"unexpected dit weights: blocks\.0\.extra, odd\.weight")
    refuse({f"a.{k:03d}.w": torch.zeros(2) for k in range(100)}, "a.000.w, .*a.004.w, and 95 more")
    refuse({"transformer_blocks.0.attn1.to_q.weight": torch.zeros(2, 2)}, "these have diffusers' names")
    without = {k: v for k, v in state.items() if k != "blocks.1.mlp.fc1.bias"}
    refuse(without, r"lack, .*stack\.blocks\.1\.fc1\.bias")
    refuse(state | {"t_embedder.mlp.2.bias": torch.zeros(3)}, "do not fit.*time.mlp.2.bias")
    refuse(state | {"pos_embed": torch.zeros(1, 4, D)}, "learned positions, or none of a square grid")
    refuse(state, "pass heads=", heads=None)
    refuse(state, "did you mean sit", source="sitt")
    turned = published("lightningdit", patch=1)
    turned["feat_rope.freqs_sin"] = rotary(D // HEADS, SIDE).mul(16 / SIDE).sin()
    refuse(turned, "other rotary positions.*freqs_sin", source="lightningdit")


def test_sizes_are_recognised():
    with torch.device("meta"):
        state = {
            "x_embedder.proj.weight": torch.empty(1152, 4, 2, 2),
            "pos_embed": torch.empty(1, 256, 1152),
            "final_layer.linear.weight": torch.empty(32, 1152),
            **{f"blocks.{b}.attn.qkv.bias": torch.empty(1) for b in range(28)},
        }
    found = import_weights.describe(state, "dit")
    assert (found["size"], found["heads"], found["input_size"]) == ("XL/2", 16, 32)
    assert found["learn_sigma"] and found["num_classes"] == 0


@pytest.mark.parametrize("name", backbones.names())
def test_save_and_load(name, tmp_path, monkeypatch):
    model = random_backbone(name, depth=2, text=[2, 5], input_size=[4, 6])
    model.save_pretrained(tmp_path / "saved")
    again = Backbone.from_pretrained(tmp_path / "saved")
    assert again.config == model.config and not again.training
    assert list(model.state_dict()) == list(again.state_dict())
    assert all(map(torch.equal, model.state_dict().values(), again.state_dict().values()))
    # One file is enough: the arguments are in its metadata.
    file = tmp_path / "saved" / "model.safetensors"
    with safe_open(file, framework="pt") as handle:
        assert json.loads(handle.metadata()["model"]) == model.config
    (tmp_path / "saved" / "config.json").unlink()
    assert Backbone.from_pretrained(file).config == model.config
    asked = {"repo_id": "user/name", "filename": "model.safetensors", "revision": "v1"}
    monkeypatch.setattr(hub, "hf_hub_download", lambda **given: str(file) if given == asked else "")
    monkeypatch.setattr(hub, "hub_problem", lambda *_: "")
    assert Backbone.from_pretrained("user/name", revision="v1").config == model.config


class NotFound(hub.HfHubHTTPError):
    def __init__(self):
        self.response = type("Response", (), {"status_code": 404})


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ConnectionError("Name or service not known"), r"user/name: the Hugging Face hub cannot be reached \(Name or"),
        (NotFound(), r"gives no model\.safetensors of user/name \(HTTP 404\)"),
    ],
)
def test_a_hub_that_gives_nothing_is_asked_once_and_then_the_cache(tmp_path, monkeypatch, error, message):
    asked, downloads = [], []

    def refuse(url, **options):
        asked.append(url)
        raise error

    def download(**options):
        downloads.append(options)
        if not (tmp_path / "cached").exists():
            raise FileNotFoundError("an error that blames the repository")
        return str(tmp_path / "cached")

    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "get_hf_file_metadata", refuse)
    monkeypatch.setattr(hub, "hf_hub_download", download)
    with pytest.raises(BackboneError, match=message):
        Backbone.from_pretrained("user/name")
    assert len(asked) == 1 and [options["local_files_only"] for options in downloads] == [True]
    # What was downloaded before is there without the hub.
    model = backbones.create("dit", "T/2", input_size=4, in_channels=1, num_classes=2)
    write(tmp_path / "cached", model.state_dict(), model.config)
    assert Backbone.from_pretrained("user/name", force_download=True).config == model.config
    assert downloads[-1]["force_download"] is False


def test_what_is_no_file_is_not_asked_of_a_hub(tmp_path):
    for name in (tmp_path, tmp_path / "none", "runs/a/b", "none.safetensors"):
        with pytest.raises(BackboneError, match="expected a weights file, a folder with model.safetensors"):
            Backbone.from_pretrained(name)


def test_files_that_are_no_weights_of_ours(tmp_path):
    file = tmp_path / "model.safetensors"
    config = {"name": "dit", "size": "T/1", "in_channels": 1, "input_size": 4, "depth": 1}
    weights = {"x": torch.zeros(1)}
    for make, message in (
        (lambda: file.write_bytes(b"not safetensors"), "not a whole safetensors file"),
        (lambda: save_file(weights, file), "import_weights.load"),
        (lambda: write(file, weights, config), "own description"),
        (lambda: write(file, {}, {**config, "naem": "dit"}), "unknown key naem; did you mean name"),
    ):
        make()
        with pytest.raises(BackboneError, match=message):
            Backbone.from_pretrained(file)
    with pytest.raises(BackboneError, match="option 'revison': expected one of .*did you mean revision"):
        Backbone.from_pretrained(file, revison="main")
    pointer = tmp_path / "x.pt"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    with pytest.raises(BackboneError, match="Git LFS pointer"):
        import_weights.load(pointer, "dit")
