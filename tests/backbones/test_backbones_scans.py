"""The chunked scan of RWKV-7 against its recurrence."""

import pytest
import torch

from backbones.ops import matrix_state as scans

B, H, K, V = 2, 2, 8, 6


def drawn(tokens, dtype=torch.float64, strength=1.0):
    torch.manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64)

    q, k = normal(B, tokens, H, K), normal(B, tokens, H, K)
    v, g = normal(B, tokens, H, V), -strength * torch.exp(normal(B, tokens, H, K))
    unit = torch.nn.functional.normalize(normal(B, tokens, H, K), dim=-1)
    rate = torch.sigmoid(normal(B, tokens, H, K))
    given = {"q": q, "k": k, "v": v, "g": g, "a": -unit, "b": unit * rate}
    return {name: x.to(dtype).requires_grad_() for name, x in given.items()}


def plain(q, g, k, v, a, b):
    return scans.reference(q, k, v, g, a, b)


NAMES = "qgkvab"  # in the order of `scans.rwkv7`


@pytest.mark.parametrize("tokens", [1, 16, 37])
@pytest.mark.parametrize("strength", [0.01, 1.0, 30.0])
def test_chunks_equal_the_recurrence(tokens, strength):
    given = [drawn(tokens, strength=strength)[n] for n in NAMES]
    got, want = scans.rwkv7(*given), plain(*given)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    probe = torch.randn_like(got)
    ours = torch.autograd.grad(got, given, probe, allow_unused=True, materialize_grads=True)
    theirs = torch.autograd.grad(want, given, probe, allow_unused=True, materialize_grads=True)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-8)


def test_chunks_of_any_length():
    given = [drawn(7)[n] for n in NAMES]
    for chunk in (1, 2, 5):
        torch.testing.assert_close(scans.rwkv7(*given, chunk=chunk), plain(*given), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("strength", [0.01, 1.0, 1000.0])
def test_float32_is_finite_and_close(strength):
    """Decays far below the floor too: nothing overflows, forward or backward."""
    given = [drawn(64, torch.float32, strength)[n] for n in NAMES]
    got, want = scans.rwkv7(*given), plain(*(x.double() for x in given))
    assert (got - want).norm() < 1e-4 * want.norm()
    for grad in torch.autograd.grad(got.square().sum(), given):
        assert torch.isfinite(grad).all()


def test_masked_tokens_leave_no_trace():
    given = {n: x.detach() for n, x in drawn(24).items()}
    keep = torch.arange(0, 24, 3)
    masked = dict(given)
    for name in "kgab":
        masked[name] = torch.zeros_like(given[name]).index_copy(1, keep, given[name][:, keep])
    short = {n: x[:, keep] for n, x in given.items()}
    whole = scans.rwkv7(*(masked[n] for n in NAMES))[:, keep]
    torch.testing.assert_close(scans.rwkv7(*(short[n] for n in NAMES)), whole, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_flash_linear_attention_takes_what_we_pass(monkeypatch):
    """The call for a GPU, on a stand-in with fla's signature: order of arguments, scale, first result."""
    import importlib
    import inspect
    import warnings

    pytest.importorskip("fla")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It says that it has no GPU.
        published = importlib.import_module("fla.ops.rwkv7").chunk_rwkv7
    signature = inspect.signature(published)
    letters = {"q": "r", "g": "w"}

    def stand_in(*args, **options):
        bound = signature.bind(*args, **options).arguments
        assert bound.pop("scale") == 1.0
        given = [bound[letters.get(n, n)] for n in NAMES]
        return plain(*given), None

    monkeypatch.setattr(scans, "choose", lambda *a, **k: "fla")
    monkeypatch.setattr(scans, "kernel_function", lambda *a: stand_in)
    given = [drawn(5, torch.float32)[n] for n in NAMES]
    torch.testing.assert_close(scans.rwkv7(*given), plain(*given))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*does not support float32 on some platforms")
def test_flash_linear_attention_agrees():
    torch.manual_seed(0)
    shape = (2, 100, 2, 64)
    made = {n: torch.randn(shape, device="cuda") for n in "qkv"}
    made["g"] = -0.5 * torch.rand(shape, device="cuda")
    made["a"] = -torch.nn.functional.normalize(torch.randn(shape, device="cuda"), dim=-1)
    made["b"] = -made["a"] * torch.rand(shape, device="cuda")
    given = [made[n] for n in NAMES]
    want = scans.rwkv7(*given, kernel="torch")
    assert (scans.rwkv7(*given, kernel="fla") - want).norm() < 1e-2 * want.norm()
