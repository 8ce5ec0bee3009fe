"""SSD, the selective scan and RWKV-7: against libraries' plain versions, loops, each other, and at hard inputs."""

import importlib
import importlib.util
import inspect
import math
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from backbones.ops import dispatch, matrix_state
from backbones.ops import selective_scan as ss
from backbones.ops import ssd as dual


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def ssd_inputs(batch, tokens, heads, width, state, dtype=torch.float64, seed=0, fast=1.0):
    """Mamba-2's own initialisation: A in -16..-1, dt log-uniform in 1e-3..1e-1 (times `fast`)."""
    g = generator(seed)
    draw = lambda *s: torch.randn(*s, generator=g, dtype=torch.float64)  # noqa: E731
    unit = lambda *s: torch.rand(*s, generator=g, dtype=torch.float64)  # noqa: E731
    dt = torch.exp(unit(batch, tokens, heads) * math.log(100) + math.log(1e-3)) * fast
    x, A = draw(batch, tokens, heads, width), -(1 + 15 * unit(heads))
    B, C = draw(batch, tokens, 1, state), draw(batch, tokens, 1, state)
    return [m.to(dtype).requires_grad_() for m in (x, dt, A, B, C, draw(heads))]


def ssd(x, dt, A, B, C, D=None, decay_gap=None, **how):
    packed = torch.cat((x.flatten(2), B.flatten(2), C.flatten(2)), -1)
    return dual.ssd(packed, dt, A, D, decay_gap, x.shape[3], **how)


def scan_inputs(batch, tokens, width, state, dtype=torch.float64, seed=0, fast=1.0):
    g = generator(seed)
    draw = lambda *s: torch.randn(*s, generator=g, dtype=torch.float64)  # noqa: E731
    dt = torch.exp(torch.rand(batch, tokens, width, generator=g, dtype=torch.float64) * math.log(100) + math.log(1e-3))
    rates = -torch.arange(1.0, state + 1, dtype=torch.float64).expand(width, state)
    x, B, C = draw(batch, tokens, width), draw(batch, tokens, state), draw(batch, tokens, state)
    return [m.to(dtype).clone().requires_grad_() for m in (x, dt * fast, rates, B, C, draw(width))]


def same_gradients(fast, plain, values, rtol=1e-10, atol=1e-12):
    torch.testing.assert_close(fast, plain, rtol=rtol, atol=atol)
    g = torch.randn(fast.shape, generator=generator(9), dtype=torch.float64)
    ours = torch.autograd.grad(fast, values, g.to(fast.dtype), materialize_grads=True)
    for a, b in zip(ours, torch.autograd.grad(plain, values, g, materialize_grads=True), strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol * max(1.0, b.abs().max().item()))


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


# --- against plain versions of other projects


def fla_naive():
    """fla-core's own reference, loaded by its path: the package itself wants a GPU."""
    pytest.importorskip("einops")
    found = importlib.util.find_spec("fla")
    if found is None:
        pytest.skip("fla-core is not installed")
    path = Path(found.submodule_search_locations[0]) / "ops" / "simple_gla" / "naive.py"
    spec = importlib.util.spec_from_file_location("fla_naive_simple_gla", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.naive_recurrent_simple_gla


@pytest.mark.parametrize("implementation", ["torch", "reference"])
def test_ssd_equals_flas_recurrence(implementation):
    x, dt, A, B, C, _ = ssd_inputs(2, 37, 4, 8, 16, torch.float32)
    expected, _ = fla_naive()(
        C.expand(-1, -1, 4, -1), B.expand(-1, -1, 4, -1), x * dt[..., None], dt * A, scale=1.0
    )
    assert relative(ssd(x, dt, A, B, C, chunk=16, kernel=implementation), expected) < 1e-6


def test_ssd_inside_transformers_mamba2_mixer():
    """The mixer's projections around our op give what the mixer's own torch path gives."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    config = transformers.Mamba2Config(
        hidden_size=32, state_size=8, num_heads=4, head_dim=16, expand=2, n_groups=1, chunk_size=16, num_hidden_layers=1
    )
    torch.manual_seed(0)
    mixer = Mamba2Mixer(config, 0)
    hidden = torch.randn(2, 24, 32)
    inner, groups, state, heads = 64, 1, 8, 4
    z, xbc, dt = mixer.in_proj(hidden).split((inner, inner + 2 * groups * state, heads), -1)
    xbc = F.silu(mixer.conv1d(xbc.mT)[..., :24].mT)
    x, B, C = xbc.split((inner, groups * state, groups * state), -1)
    y = ssd(
        x.unflatten(-1, (heads, 16)),
        F.softplus(dt + mixer.dt_bias),
        -mixer.A_log.exp(),
        B.unflatten(-1, (groups, state)),
        C.unflatten(-1, (groups, state)),
        mixer.D,
        chunk=16,
    )
    ours = mixer.out_proj(mixer.norm(y.flatten(2), z))
    assert relative(ours, mixer(hidden)) < 1e-5


def test_selective_scan_inside_transformers_mamba_mixer():
    transformers = pytest.importorskip("transformers")
    from transformers.models.mamba.modeling_mamba import MambaMixer

    config = transformers.MambaConfig(hidden_size=16, state_size=8, num_hidden_layers=1)
    torch.manual_seed(0)
    mixer = MambaMixer(config, 0)
    hidden = torch.randn(2, 12, 16)
    u, gate = mixer.in_proj(hidden).chunk(2, -1)
    u = F.silu(mixer.conv1d(u.mT)[..., :12].mT)
    dt, B, C = mixer.x_proj(u).split((mixer.time_step_rank, 8, 8), -1)
    dt = F.softplus(mixer.dt_proj(dt))
    y = ss.selective_scan(u, dt, -mixer.A_log.exp(), B, C, mixer.D)
    assert relative(mixer.out_proj(y * F.silu(gate)), mixer(hidden)) < 1e-5


# --- against the recurrence, values and gradients, in float64


def of_gap(gap, tokens):
    """Distances to the previous token: none, those of all samples, or one row for each."""
    shape = {"none": None, "shared": (tokens,), "own": (2, tokens)}[gap]
    return None if shape is None else torch.randint(1, 5, shape, generator=generator(1))


@settings(max_examples=15, deadline=None)
@given(
    tokens=st.integers(1, 40),
    chunk=st.sampled_from([1, 8, 16, 64]),
    gap=st.sampled_from(["none", "shared", "own"]),
    fast=st.sampled_from([1.0, 50.0]),
)
def test_both_scans_equal_the_recurrence(tokens, chunk, gap, fast):
    gaps = of_gap(gap, tokens)
    values = ssd_inputs(2, tokens, 4, 3, 5, fast=fast)
    fast_path = ssd(*values, chunk=chunk, decay_gap=gaps, kernel="torch")
    same_gradients(fast_path, dual.reference(*values, gaps), values, rtol=1e-8, atol=1e-9)
    values = scan_inputs(2, tokens, 3, 4, fast=fast)
    fast_path = ss.selective_scan(*values, decay_gap=gaps, kernel="torch")
    same_gradients(fast_path, ss.reference(*values, gaps), values)


def test_gradcheck_where_some_inputs_need_no_gradient():
    values = scan_inputs(1, 2 * ss.SPAN + 3, 2, 2)  # the state is handed on twice
    some = [m.detach().requires_grad_(i % 2 == 0) for i, m in enumerate(values)]
    assert torch.autograd.gradcheck(lambda *a: ss.selective_scan(*a, kernel="torch"), some)


NAMES = "qgkvab"  # in the order of `matrix_state.rwkv7`


def rwkv7_inputs(tokens, dtype=torch.float64, strength=1.0):
    g = generator()
    draw = lambda *s: torch.randn(*s, generator=g, dtype=torch.float64)  # noqa: E731
    shape = 2, tokens, 2
    unit, rate = F.normalize(draw(*shape, 8), dim=-1), torch.sigmoid(draw(*shape, 8))
    values = {
        "q": draw(*shape, 8), "g": -strength * torch.exp(draw(*shape, 8)), "k": draw(*shape, 8),
        "v": draw(*shape, 6), "a": -unit, "b": unit * rate,
    }  # fmt: skip
    return [values[name].to(dtype).requires_grad_() for name in NAMES]


def rwkv7_reference(q, g, k, v, a, b):
    return matrix_state.reference(q, k, v, g, a, b)


@pytest.mark.parametrize(("tokens", "chunk"), [(1, 16), (16, 16), (37, 16), (7, 1), (7, 5)])
@pytest.mark.parametrize("strength", [0.01, 1.0, 30.0])
def test_chunks_of_rwkv7_equal_the_recurrence(tokens, chunk, strength):
    values = rwkv7_inputs(tokens, strength=strength)
    same_gradients(matrix_state.rwkv7(*values, chunk=chunk), rwkv7_reference(*values), values, 1e-7, 1e-8)


# --- hard inputs in float32 and below


@pytest.mark.parametrize("strength", [0.01, 1.0, 1000.0])
def test_float32_error_of_rwkv7(strength):
    """Decays far below the floor too: nothing overflows, forward or backward."""
    values = rwkv7_inputs(64, torch.float32, strength)
    y = matrix_state.rwkv7(*values)
    assert relative(y, rwkv7_reference(*(x.double() for x in values))) < 1e-4
    for grad in torch.autograd.grad(y.square().sum(), values):
        assert torch.isfinite(grad).all()


def test_large_steps_have_exact_gradients():
    """Mamba-2's A = -16 and dt = 0.1 reach exp(100) in a chunk of 64: masking after exp gives NaN."""
    x, dt, A, B, C, D = ssd_inputs(1, 32, 2, 4, 4)
    dt = torch.full_like(dt, 6.0).requires_grad_()
    A = torch.full_like(A, -16.0).requires_grad_()
    # exp(6 * 16 * 15) is infinite even in float64.
    values = (x, dt, A, B, C, D)
    same_gradients(ssd(*values, chunk=16, kernel="torch"), dual.reference(*values), values, 1e-9, 1e-10)


@pytest.mark.parametrize(("fast", "bound"), [(1.0, 2e-6), (50.0, 4e-5)])
def test_float32_error_of_ssd(fast, bound):
    """Relative to float64, the output and the gradients of x, dt, B, C and D."""
    values = ssd_inputs(2, 256, 4, 16, 16, torch.float32, fast=fast)
    exact = [m.detach().double().requires_grad_() for m in values]
    y, plain = ssd(*values, kernel="torch"), dual.reference(*exact)
    assert relative(y, plain) < bound
    g = torch.randn(y.shape, generator=generator(5))
    ours, theirs = torch.autograd.grad(y, values, g), torch.autograd.grad(plain, exact, g.double())
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        # A's gradient is a sum of terms that cancel where everything has decayed already.
        assert relative(a, b) < (bound if i != 2 else 100 * bound)


def test_float32_error_of_the_selective_scan():
    values = scan_inputs(1, 128, 8, 16, torch.float32, fast=50.0)
    exact = [m.detach().double().requires_grad_() for m in values]
    y, plain = ss.selective_scan(*values, kernel="torch"), ss.reference(*exact)
    assert relative(y, plain) < 1e-6
    for a, b in zip(torch.autograd.grad(y.sum(), values), torch.autograd.grad(plain.sum(), exact), strict=True):
        assert relative(a, b) < 3e-6


def test_bfloat16_inputs_are_summed_in_float32():
    """2.9e-3 is the rounding of the inputs themselves; sums in bfloat16 would give 1.3e-2."""
    x, dt, A, B, C, D = (m.detach() for m in ssd_inputs(2, 256, 4, 16, 16, torch.float32))
    exact = dual.reference(x, dt, A, B, C, D)
    half = ssd(x.bfloat16(), dt, A, B.bfloat16(), C.bfloat16(), D, kernel="torch")
    assert half.dtype == torch.bfloat16
    assert relative(half, exact) < 6e-3
    u, dt, A, B, C, D = (m.detach() for m in scan_inputs(1, 128, 8, 16, torch.float32))
    half = ss.selective_scan(u.bfloat16(), dt, A, B.bfloat16(), C.bfloat16(), D, kernel="torch")
    assert relative(half, ss.reference(u, dt, A, B, C, D)) < 6e-3


@pytest.mark.parametrize("op", ["ssd", "scan"])
def test_autocast_changes_nothing(op):
    if op == "ssd":
        values = ssd_inputs(1, 64, 2, 8, 8, torch.float32)
        run = lambda: ssd(*values, chunk=16, kernel="torch")  # noqa: E731
    else:
        values = scan_inputs(1, 20, 4, 4, torch.float32)
        run = lambda: ss.selective_scan(*values, kernel="torch")  # noqa: E731
    plain = torch.autograd.grad(run().sum(), values)
    with torch.autocast("cpu", torch.bfloat16):
        total = run().sum()
        # The formula's way back is torch's own: autocast reaches into it, where it is still on.
        inside = torch.autograd.grad(total, values, retain_graph=True) if op == "scan" else plain
    for cast in (inside, torch.autograd.grad(total, values)):
        assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))


# --- what the kernels are fed (they themselves need a GPU)


@pytest.mark.parametrize("gap", [False, True])
@pytest.mark.parametrize("kernel", ["mamba-ssm", "fla"])
def test_the_ssd_kernels_are_fed_what_they_document(monkeypatch, kernel, gap):
    skips = []

    def mamba(x, dt, A, B, C, chunk_size, D=None):
        assert dt.dtype == A.dtype == torch.float32
        assert x.dtype == B.dtype == C.dtype
        assert chunk_size & (chunk_size - 1) == 0
        assert chunk_size >= 16
        skips.append(D)
        return dual.reference(x, dt, A, B, C, D)

    def fla(q, k, v, g, scale=None):
        assert scale == 1.0
        assert q.shape == k.shape
        assert g.dtype == torch.float32
        naive, state = fla_naive()(q, k, v, g, scale=scale)
        return naive.to(v.dtype), state

    fakes = {"mamba-ssm": mamba, "fla": fla}
    monkeypatch.setattr(dual, "kernel_function", lambda op, name: fakes[name])
    monkeypatch.setattr(dual, "choose", lambda *a: kernel)
    values = ssd_inputs(2, 24, 4, 8, 8, torch.float32)
    gaps = torch.randint(1, 5, (2, 24), generator=generator(2)) if gap else None
    assert relative(ssd(*values, decay_gap=gaps), dual.reference(*values, gaps)) < 1e-5
    # mamba-ssm adds the skip in the same pass over x, where x has not been scaled.
    assert [skip is not None for skip in skips] == ([] if kernel == "fla" else [not gap])


@pytest.mark.parametrize("gap", [False, True])
def test_the_selective_scan_kernel_is_fed_what_it_documents(monkeypatch, gap):
    def kernel(u, delta, A, B, C, D=None):
        assert u.dtype == delta.dtype == B.dtype == C.dtype
        assert all(m.stride(-1) == 1 for m in (u, delta, B, C))
        return ss.reference(u.mT, delta.mT, A, B.mT, C.mT, D).mT

    monkeypatch.setattr(ss, "kernel_function", lambda op, name: kernel)
    monkeypatch.setattr(ss, "choose", lambda *a: "mamba-ssm")
    values = scan_inputs(2, 12, 4, 4, torch.float32)
    gaps = torch.randint(1, 5, (12,), generator=generator(2)) if gap else None
    assert relative(ss.selective_scan(*values, decay_gap=gaps), ss.reference(*values, gaps)) < 1e-5


@pytest.mark.slow
def test_flas_rwkv7_takes_what_we_pass(monkeypatch):
    """The call for a GPU, on a stand-in with fla's signature: order of arguments, scale, first result."""
    pytest.importorskip("fla")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It says that it has no GPU.
        published = importlib.import_module("fla.ops.rwkv7").chunk_rwkv7
    signature = inspect.signature(published)
    letters = {"q": "r", "g": "w"}

    def stand_in(*args, **options):
        bound = signature.bind(*args, **options).arguments
        assert bound.pop("scale") == 1.0
        return rwkv7_reference(*(bound[letters.get(name, name)] for name in NAMES)), None

    monkeypatch.setattr(matrix_state, "choose", lambda *a, **k: "fla")
    monkeypatch.setattr(matrix_state, "kernel_function", lambda *a: stand_in)
    values = rwkv7_inputs(5, torch.float32)
    torch.testing.assert_close(matrix_state.rwkv7(*values), rwkv7_reference(*values))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*does not support float32 on some platforms")
def test_flas_rwkv7_on_a_gpu():
    torch.manual_seed(0)
    shape = (2, 100, 2, 64)
    q, k, v = torch.randn(3, *shape, device="cuda")
    g = -0.5 * torch.rand(shape, device="cuda")
    a = -F.normalize(torch.randn(shape, device="cuda"), dim=-1)
    values = [q, g, k, v, a, -a * torch.rand(shape, device="cuda")]
    assert relative(matrix_state.rwkv7(*values, kernel="fla"), matrix_state.rwkv7(*values, kernel="torch")) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("version", "chip", "refused"),
    [("3.7.0+git1", 9, True), ("3.7.1", 9, False), ("3.3.1", 9, False), ("3.6.0", 8, False)],
)
def test_flas_wrong_gradient_on_hopper_is_never_chosen(monkeypatch, version, chip, refused):
    triton = pytest.importorskip("triton")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tilelang" else find(name))
    monkeypatch.setattr(triton, "__version__", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (chip, 0))
    monkeypatch.setattr(dispatch, "_import", lambda *a: print)
    assert (dispatch._probe("ssd", "fla")[0] is None) is refused
