"""Causal convolution along a path and token shift on the grid, against plain torch and plain loops."""

import sys

import pytest
import reference
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ops_biwkv import positions

import backbones
from backbones.build import describe_kernels
from backbones.ops import conv, dispatch, native, shift
from backbones.ops.dispatch import KernelError
from routing.layout import Layout


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def draw(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64).to(dtype).requires_grad_()


def same(fast, plain, values):
    torch.testing.assert_close(fast, plain, rtol=0, atol=1e-13)
    g = torch.randn(fast.shape, generator=generator(9), dtype=fast.dtype)
    ours = torch.autograd.grad(fast, values, g, retain_graph=True)
    for a, b in zip(ours, torch.autograd.grad(plain, values, g, retain_graph=True), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


# --- convolution


def conv1d(x, weight, bias):
    tokens = x.shape[1]
    padded = F.conv1d(x.mT, weight[:, None], bias, padding=weight.shape[1] - 1, groups=x.shape[2])
    return padded[..., :tokens].mT


@settings(max_examples=15, deadline=None)
@given(tokens=st.integers(1, 20), width=st.integers(1, 5), with_bias=st.booleans(), silu=st.booleans())
def test_compact_equals_torchs_conv1d(tokens, width, with_bias, silu):
    x, weight = draw(2, tokens, 3), draw(3, width, seed=1)
    bias = draw(3, seed=2) if with_bias else None
    values = [m for m in (x, weight, bias) if m is not None]
    plain = conv1d(x, weight, bias)
    plain = F.silu(plain) if silu else plain
    same(conv.causal_conv(x, weight, bias, silu=silu), plain, values)
    same(conv.reference(x, weight, bias, silu=silu), plain, values)


@settings(max_examples=15, deadline=None)
@given(tokens=st.integers(1, 20), extra=st.integers(0, 12), shared=st.booleans(), seed=st.integers(0, 99))
def test_taps_by_distance_are_the_dense_convolution_of_the_masked_input(tokens, extra, shared, seed):
    length = tokens + extra
    x, weight, bias = draw(2, length, 3), draw(3, 4, seed=1), draw(3, seed=2)
    kept = positions("own", 1 if shared else 2, tokens, length, seed).expand(2, -1)
    rows = torch.arange(2)[:, None]
    mask = torch.zeros(2, length, 1, dtype=torch.float64).index_put((rows, kept), torch.ones(()).double())
    dense = conv1d(x * mask, weight, bias)[rows, kept]
    position = kept[0] if shared else kept
    same(conv.causal_conv(x[rows, kept], weight, bias, position), dense, (x, weight, bias))
    same(conv.reference(x[rows, kept], weight, bias, position), dense, (x, weight, bias))


def test_the_conv_kernel_is_fed_channels_last(monkeypatch):
    def kernel(x, weight, bias=None, activation=None):
        assert x.stride(1) == 1
        assert x.stride(0) % 8 == x.stride(2) % 8 == 0
        assert x.shape[1] % 8 == 0
        assert weight.dtype == bias.dtype == x.dtype
        y = conv1d(x.mT, weight, bias).mT
        return F.silu(y) if activation == "silu" else y

    monkeypatch.setattr(conv, "kernel_function", lambda op, name: kernel)
    monkeypatch.setattr(conv, "choose", lambda *a: "causal-conv1d")
    x, weight, bias = draw(2, 12, 16), draw(16, 4, seed=1), draw(16, seed=2)
    # A slice of a wider projection, as a mixer hands it over.
    wide = torch.cat((x, x[..., :3]), -1)[..., :16]
    y = conv.causal_conv(wide, weight, bias, silu=True)
    torch.testing.assert_close(y, conv.reference(x, weight, bias, silu=True))


# --- token shift


@settings(max_examples=20, deadline=None)
@given(
    grid=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    policy=st.sampled_from(["self", "zero", "nearest"]),
    prefix=st.sampled_from([0, 2]),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_a_subset_shifts_as_the_masked_grid(grid, policy, prefix, seed, data):
    total = grid[0] * grid[1]
    ids = positions("own", 2, data.draw(st.integers(1, total)), total, seed)
    present = torch.ones(2, prefix + total, dtype=torch.bool)
    present[:, prefix:] = torch.zeros(2, total, dtype=torch.bool).scatter(1, ids, True)
    x = draw(2, prefix + total, 8)
    masked = reference.shift(x, present, grid, prefix, policy) + 0 * x  # without neighbours it is 0
    kept = present.nonzero(as_tuple=True)
    rows = x[kept].unflatten(0, (2, -1))
    shifted = shift.grid_shift(rows, Layout(grid, ids, prefix).neighbours(policy))
    same(shifted, masked[kept].unflatten(0, (2, -1)), (x,))


# --- which one runs


def test_auto_never_raises_and_says_why():
    assert dispatch.resolve("shift", "auto", "cuda").name == "torch"
    for op, kernels in dispatch.KERNELS.items():
        choice = dispatch.resolve(op, "auto", "cpu")
        has_native = "native" in kernels and native.library()[0]
        assert choice.name == ("native" if has_native else "torch")
        assert choice.why and str(choice).startswith(f"{op}: {choice.name} (")


@pytest.mark.parametrize(
    ("op", "requested", "device", "message"),
    [
        ("ssd", "mamba-ssm", "cpu", "needs a CUDA device and none is here; type kernel=auto"),
        ("ssd", "native", "cuda", "native is for CPUs; type kernel=auto"),
        ("rwkv7", "kernel", "cpu", "fla needs a CUDA device"),
        ("biwkv", "trition", "cpu", "did you mean triton"),
        ("sdd", "auto", "cpu", "did you mean ssd"),
    ],
)
def test_asking_for_what_is_not_there_is_one_sentence(op, requested, device, message):
    with pytest.raises(KernelError, match=message) as caught:
        dispatch.resolve(op, requested, device)
    assert "\n" not in str(caught.value)


def test_on_a_gpu_without_the_package_the_command_is_named(monkeypatch):
    monkeypatch.setattr(native.ACTIVE, "kernels", {})
    monkeypatch.setattr(native.ACTIVE, "choices", {})
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: None)
    reason = "mamba-ssm is not installed: pip install"
    assert scan_line("cuda").startswith(f"ssd: torch ({reason}")
    with pytest.raises(KernelError, match=f"{reason}.*; type kernel=auto"):
        dispatch.resolve("ssd", "mamba-ssm", "cuda")


def test_a_package_that_fails_without_a_word_is_not_there(monkeypatch, tmp_path):
    (tmp_path / "causal_conv1d.py").write_text("assert False\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = dispatch._probe("conv", "causal-conv1d")
    assert found == (None, "causal-conv1d does not load: AssertionError")


@pytest.fixture
def fake_mamba_ssm(monkeypatch, tmp_path):
    """A package of that name as one built without CUDA: its __init__ raises, its Triton file loads."""
    folder = tmp_path / "mamba_ssm" / "ops" / "triton"
    folder.mkdir(parents=True)
    (tmp_path / "mamba_ssm" / "__init__.py").write_text("import selective_scan_cuda\n")
    (folder.parent / "__init__.py").touch()
    (folder / "__init__.py").touch()
    (folder / "ssd_combined.py").write_text("def mamba_chunk_scan_combined():\n    return 'ran'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(native.ACTIVE, "kernels", {})
    monkeypatch.setattr(native.ACTIVE, "choices", {})
    before = {k for k in sys.modules if k.split(".")[0] == "mamba_ssm"}
    yield
    for key in {k for k in sys.modules if k.split(".")[0] == "mamba_ssm"} - before:
        del sys.modules[key]


def scan_line(device, **options):
    """The line on the scan that the banner and the benchmark show for a Mamba model on a device."""
    model = backbones.create("mamba", "T/2", input_size=8, depth=1, num_classes=0, **options)
    lines = describe_kernels(model.stack.blocks, device)
    return next(line for line in lines if line.startswith("ssd"))


def test_the_banner_names_what_runs(fake_mamba_ssm):
    assert dispatch.kernel_function("ssd", "mamba-ssm")() == "ran"
    assert scan_line("cuda") == "ssd: mamba-ssm (mamba-ssm found)"
    assert scan_line("cuda", kernel="torch") == "ssd: torch (requested)"
    if native.library()[0]:
        assert scan_line("cpu").startswith("ssd: native (built by")
    before = scan_line("cpu"), native.library()
    with dispatch.without_native():
        assert scan_line("cpu") == "ssd: torch (switched off)"
        assert not native.library()[0]
    assert (scan_line("cpu"), native.library()) == before
    choice = dispatch.Choice("conv", "causal-conv1d", "causal-conv1d found", ("triton",))
    expected = "conv: causal-conv1d (causal-conv1d found), triton for inputs that it does not take"
    assert str(choice) == expected
