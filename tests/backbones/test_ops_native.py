"""The C++ kernels against the float64 references, on odd shapes (their build: test_native_build.py)."""

import shutil

import pytest
import torch
import torch.nn.functional as F
from test_ops_biwkv import positions

import backbones
from backbones.ops import biwkv, conv, dispatch, mixer, native, shift, ssd
from routing.layout import Layout, Order, flat

KERNEL = "CppNode<(anonymous namespace)::Kernel>"  # of a graph: a kernel has run
compiled = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
# Tokens and channels around the widths of vectors (8, 16) and of blocks (16, 32).
SHAPES = [(1, 1, 4), (3, 33, 36), (40, 3, 68)]


def operations():
    return native.OPERATIONS["cpu"]


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def subset(tokens, batch, missing, shared):
    """Neighbours of a routed subset of a grid, one table or one for each sample."""
    grid = (3, tokens)
    rows = positions("own", 1 if shared else batch, tokens, 2 * tokens)
    table = Layout(grid, rows).neighbours(missing)
    return table[0] if shared and table.dim() == 3 else table


def reorder(batch, tokens, how):
    """A scan order shared by the batch, or one for each sample; also as rows (B or 1, T, 1)."""
    if how == "":
        return None, torch.arange(tokens)[None, :, None]
    rows = torch.stack([torch.randperm(tokens) for _ in range(batch if how == "own" else 1)])
    form = (lambda m: flat(m, tokens)) if how == "own" else (lambda m: m[0])
    return Order(form(rows), form(rows.argsort(1))), rows[:, :, None]


def case(name, batch, tokens, channels):
    """Return the operation, its float64 definition, token inputs and parameters."""
    x, y = draw(batch, tokens, channels), draw(batch, tokens, channels, seed=1)
    row = lambda n, seed: draw(n, channels, seed=seed) if n else draw(channels, seed=seed)  # noqa: E731
    kind, _, how = name.partition(" ")
    if kind in ("adaln", "gated_sum"):
        order, rows = reorder(batch, tokens, how)
        cond = draw(batch, 6, 1, channels, seed=2).unbind(1)
        if kind == "adaln":
            unit = lambda x: F.layer_norm(x, x.shape[-1:], eps=1e-6)  # noqa: E731
            return (
                lambda x, a, b: operations().adaln(x, a, b, order),
                lambda x, a, b: (unit(x) * (1 + b) + a).gather(1, rows.expand(x.shape)),
                [],
                [x, *cond[1:3]],
            )
        return (
            lambda x, gate, y: operations().gated_sum(x, gate, y, order),
            lambda x, gate, y: x + (gate * y).gather(1, rows.argsort(1).expand(x.shape)),
            [],
            [x, cond[0], y],
        )
    form = "shared" if how == "shared" else "own"
    place = None if how in ("", "rank") else positions(form, batch, tokens, 2 * tokens)
    if kind == "gelu":
        return operations().gelu, lambda x: F.gelu(x, approximate="tanh"), [x], []
    if kind == "squared_relu":
        return operations().squared_relu, lambda x: x.clamp(min=0).square(), [x], []
    if kind == "sigmoid_gate":
        return operations().sigmoid_gate, lambda x, y: x.sigmoid() * y, [x, y], []
    if kind == "gated_rms_norm":
        plain = lambda y, z, w: F.rms_norm(y * F.silu(z), w.shape, w, 1e-6)  # noqa: E731
        return operations().gated_rms_norm, plain, [x, y], [row(0, 2)]
    if kind == "conv":
        return (
            lambda x, w, b: conv.causal_conv(x, w, b, place, silu=True),
            lambda x, w, b: conv.reference(x, w, b, place, silu=True),
            [x],
            [row(int(how.partition(",")[2] or 4), 2).t(), row(0, 3)],
        )
    if kind == "shift":
        table = subset(tokens, batch, how.split(",")[0], "shared" in how)
        plain = lambda x, mix: torch.stack([shift.grid_shift(x, table).lerp(x, m) for m in mix])  # noqa: E731
        return (lambda x, mix: torch.stack(shift.shift_mix(x, table, mix)), plain, [x], [row(3, 2)])
    if kind == "biwkv":
        length = tokens if place is None else 2 * tokens
        return (
            lambda k, v, w, u: biwkv.biwkv(k, v, w, u, place, length),
            lambda k, v, w, u: biwkv.reference(k, v, w, u, place, length),
            [x, y],
            [4 * row(0, 2), row(0, 3)],
        )
    packed = draw(batch, tokens, 3 * channels + 16)
    dt, rates = F.softplus(draw(batch, tokens, 3, seed=4) - 2), -draw(3, seed=5).exp()
    gap = None if place is None else draw(batch, tokens, seed=6).exp()
    skip = [] if how == "no skip" else [draw(3, seed=7)]
    return (
        lambda p, d, A, D=None: ssd.ssd(p, d, A, D, gap, channels),
        lambda p, d, A, D=None: ssd.ssd(p, d, A, D, gap, channels, kernel="reference"),
        [packed],
        [dt, rates, *skip],
    )


native.library()  # before cases take operations from it
CASES = [
    "gelu", "squared_relu", "sigmoid_gate", "gated_rms_norm", "conv", "conv shared", "conv own", "conv own,7", "shift self", "shift zero", "shift nearest,shared",
    "adaln", "adaln shared", "adaln own", "gated_sum", "gated_sum shared", "gated_sum own", "biwkv rank", "biwkv shared", "biwkv own", "ssd", "ssd no skip", "ssd own",
]  # fmt: skip
# Every operation once, with all of its inputs.
EACH = ["gelu", "squared_relu", "sigmoid_gate", "gated_rms_norm", "conv own", "shift nearest,shared", "adaln own", "gated_sum own", "biwkv own", "ssd own"]


def typed(values, dtype, strided):
    found = []
    for m in values:
        m = m.to(dtype)
        # The same numbers, every second of a longer row.
        found.append((m.repeat_interleave(2, -1)[..., ::2] if strided else m).requires_grad_())
    return found


def run(function, values):
    out = function(*values)
    probe = draw(*out.shape, seed=9).bfloat16().to(out.dtype)
    return [out, *torch.autograd.grad(out, values, probe)]


def close(ours, exact, tolerance):
    """Each tensor as a whole: sums over all samples have no error relative to a single entry."""
    for a, b in zip(ours, exact, strict=True):
        assert torch.isfinite(a).all()
        assert (a.double() - b).norm() <= tolerance * b.norm() + 1e-6, (a.shape, a.double() - b)


@compiled
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_float64_definition(name, shape):
    fast, plain, tokens, parameters = case(name, *shape)
    if name.startswith("ssd") and shape[2] % 8:
        shape = (*shape[:2], 8 * (shape[2] // 16 + 1))
        fast, plain, tokens, parameters = case(name, *shape)
    exact = run(plain, typed([*tokens, *parameters], torch.float64, False))
    for strided in (False, True):
        ours = run(fast, typed([*tokens, *parameters], torch.float32, strided))
        assert KERNEL in calls_of(fast, typed([*tokens, *parameters], torch.float32, strided))
        close(ours, exact, 1e-5)
    # bfloat16 tokens with float32 parameters; the definition gets the same rounded tokens.
    halves = typed(tokens, torch.bfloat16, False)
    given = [*halves, *typed(parameters, torch.float32, False)]
    exact = run(plain, typed([m.detach().double() for m in given], torch.float64, False))
    ours = run(fast, given)
    assert [m.dtype for m in ours[1:]] == [m.dtype for m in given]
    close(ours, exact, 6e-3)


@pytest.mark.parametrize("name", [n for n in CASES if not n.startswith(("ssd", "conv", "biwkv"))])
def test_the_plain_path_is_the_definition(name):
    fast, plain, tokens, parameters = case(name, 3, 5, 12)
    given = typed([*tokens, *parameters], torch.float64, False)
    for ours, exact in zip(run(fast, given), run(plain, given), strict=True):
        torch.testing.assert_close(ours, exact)


@compiled
def test_a_float32_stream_has_bfloat16_branches():
    order, _ = reorder(3, 7, "own")
    x, y = draw(3, 7, 20).float(), draw(3, 7, 20, seed=1).bfloat16()
    shift, scale, gate = draw(3, 6, 1, 20, seed=2).float().unbind(1)[:3]
    given = [m.requires_grad_() for m in (x, y, shift, scale, gate)]

    def both(x, y, shift, scale, gate):
        with torch.autocast("cpu", torch.bfloat16):
            h = operations().adaln(x, shift, scale, order)
        assert h.dtype == (torch.bfloat16 if x.dtype == torch.float32 else x.dtype)
        return operations().gated_sum(x, gate, h + y, order)

    assert both(*given).dtype == torch.float32
    exact = run(both, typed([m.detach().double() for m in given], torch.float64, False))
    close(run(both, given), exact, 6e-3)


def calls_of(function, values):
    """The names of the graph's nodes: which implementation ran."""
    node, seen = function(*values).grad_fn, []
    while node is not None:
        seen.append(node.name())
        node = node.next_functions[0][0] if node.next_functions else None
    return " ".join(seen)


@compiled
@pytest.mark.parametrize("tokens", [17, 1024])
def test_the_gradient_of_ssds_rates_keeps_its_precision_over_tokens(tokens):
    """It is a sum over tokens of running sums: their rounding errors used to grow with T (4e-5)."""
    heads, width, state = 4, 16, 16
    packed = draw(2, tokens, heads * width + 2 * state)
    dt = torch.exp(4.6 * (draw(2, tokens, heads, seed=1) / 2).sigmoid() - 6.9)  # 1e-3 to 1e-1
    rates, skip = -(1 + 15 * draw(heads, seed=2).sigmoid()), draw(heads, seed=3)
    values = typed([packed, dt, rates, skip], torch.float32, False)

    def gradients(values, kernel):
        y = ssd.ssd(*values, None, width, kernel=kernel)
        return torch.autograd.grad(y.square().sum(), values)

    exact = gradients([m.detach().double().requires_grad_() for m in values], "torch")
    for ours, wanted in zip(gradients(values, "native"), exact, strict=True):
        assert (ours.double() - wanted).norm() / wanted.norm() < 1e-6


@compiled
@pytest.mark.parametrize("name", EACH)
def test_threads_change_nothing(name):
    fast, _, tokens, parameters = case(name, 37, 40, 64)
    values = typed([*tokens, *parameters], torch.float32, False)
    alone = run(fast, values)
    torch.set_num_threads(3)
    try:
        together = run(fast, values)
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


@compiled
@pytest.mark.parametrize("name", ["gated_sum own", "shift self", "ssd"])
def test_a_second_derivative_is_refused(name):
    fast, _, tokens, parameters = case(name, 2, 3, 16)
    values = typed([*tokens, *parameters], torch.float32, False)
    first = torch.autograd.grad(fast(*values).square().sum(), values, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first[0].sum().backward()


@compiled
def test_what_else_takes_the_plain_path():
    from torch.utils.flop_counter import FlopCounterMode

    gate, x = operations().sigmoid_gate, draw(2, 5, 16).requires_grad_()

    def runs(*tensors):
        return KERNEL in calls_of(gate, tensors)

    assert runs(x.float(), x.float())
    assert not runs(x, x)
    assert not runs(x.half(), x.half())
    assert not runs(x.float(), x.bfloat16())
    assert not runs(x.float()[:0], x.float()[:0])
    assert not runs(x.float().to("meta"), x.float().to("meta"))
    with FlopCounterMode(display=False):  # It counts operations: they have to be there.
        assert not runs(x.float(), x.float())
        for requested in ("auto", "kernel", "native"):
            assert dispatch.choose("biwkv", requested, [torch.ones(1, 4, 8)]) == "torch"
    with pytest.raises(dispatch.KernelError, match="it has no float64"):
        ssd.ssd(draw(1, 4, 24), draw(1, 4, 1).exp(), -draw(1).exp(), None, None, 8, kernel="native")


@compiled
def test_a_compiler_sees_the_formula():
    seen = []

    def backend(graph, inputs):
        from torch._dynamo.backends.common import aot_autograd

        keep = lambda graph, inputs: seen.append(str(graph.graph)) or graph.forward  # noqa: E731
        return aot_autograd(fw_compiler=keep)(graph, inputs)

    x = draw(2, 5, 16).float()
    ours = torch.compile(lambda x: operations().gelu(x) + 1, backend=backend, fullgraph=True)(x)
    torch.testing.assert_close(ours, F.gelu(x, approximate="tanh") + 1)
    assert "aten.gelu" in seen[0] and "tread" not in seen[0]


@compiled
@pytest.mark.parametrize("name", EACH)
def test_tensors_that_are_not_their_memory(name):
    """Hooks that give back strided views; what is negated by a flag of torch alone."""
    fast, _, tokens, parameters = case(name, 2, 5, 16)
    values = typed([*tokens, *parameters], torch.float32, False)
    out, *plain = run(fast, values)
    apart = lambda t: t.repeat_interleave(2, -1) if t.dim() else t  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(apart, lambda t: t[..., ::2] if t.dim() else t):
        assert all(torch.equal(a, b) for a, b in zip(run(fast, values)[1:], plain, strict=True))
    apart = [torch._neg_view(-v.detach()) for v in values]
    torch.testing.assert_close(fast(*apart), out)


@compiled
@pytest.mark.parametrize("name", EACH)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_of_functions_see_formulas(name):
    fast, _, tokens, parameters = case(name, 2, 5, 16)
    values = typed([*tokens, *parameters], torch.float32, False)
    out, *plain = run(fast, values)
    probe = draw(*out.shape, seed=9).bfloat16().float()
    slope = torch.func.grad(lambda *v: (fast(*v) * probe).sum(), tuple(range(len(values))))
    torch.testing.assert_close(slope(*values), tuple(plain), rtol=1e-4, atol=1e-4)
    both = torch.func.vmap(fast)(*(torch.stack([v, v]) for v in values))
    torch.testing.assert_close(both, torch.stack([out, out]), rtol=1e-4, atol=1e-5)


@compiled
def test_operations_broadcast_and_refuse_as_their_formulas():
    """Smaller operands made kernels read beyond them."""
    x, gate, weight = draw(3, 5, 16).float(), draw(1, 1, 16, seed=1).float(), draw(16).float()
    for ours, plain, given in (
        (operations().sigmoid_gate, native.Plain.sigmoid_gate, (x, gate)),
        (operations().gated_rms_norm, native.Plain.gated_rms_norm, (x, gate, weight)),
    ):
        torch.testing.assert_close(ours(*given), plain(*given))
    with pytest.raises(RuntimeError, match="normalized_shape"):
        operations().gated_rms_norm(x, x, weight[:8])


@compiled
def test_infinite_keys_and_lost_numbers():
    k, v = draw(2, 9, 20).float(), draw(2, 9, 20, seed=1).float()
    w, u = draw(20, seed=2).float(), draw(20, seed=3).float()
    k[:, 4] = -torch.inf
    rest = torch.tensor([0, 1, 2, 3, 5, 6, 7, 8])
    with_key = biwkv.biwkv(k, v, w, u, None, 9)[:, rest]
    torch.testing.assert_close(with_key, biwkv.biwkv(k[:, rest], v[:, rest], w, u, rest, 9))
    for function, given in (
        (operations().gelu, [k]),
        (operations().gated_rms_norm, [k, v, w]),
        (biwkv.biwkv, [k, v, w, u]),
    ):
        given[0] = torch.full_like(given[0], torch.nan)
        for dtype in (torch.float32, torch.bfloat16):
            assert function(*(m.to(dtype) if m.dim() == 3 else m for m in given)).isnan().all()


@compiled
@pytest.mark.parametrize("conv_mode", ["compact", "true"])
def test_a_mixer_calls_the_operators_that_dispatch_would_choose(conv_mode, monkeypatch):
    """A block of Mamba chooses once for all calls where the native operators take its tokens: the same bits."""
    torch.manual_seed(0)
    model = backbones.create("mamba", "T/2", input_size=12, depth=1, num_classes=0, conv=conv_mode)
    block = model.stack.blocks[0]
    layout = Layout((6, 6)).subset(torch.arange(0, 36, 3).expand(2, -1))
    x, cond = draw(2, 12, 64).float(), draw(2, 6, 1, 64, seed=1).float()
    assert mixer.mixer_operations(x, "auto", 64) is operations()
    direct = block(x, cond, layout)
    with torch.autocast("cpu", torch.float16):  # which no kernel has
        torch.testing.assert_close(block(x, cond, layout), direct, rtol=1e-2, atol=1e-2)
    monkeypatch.setattr(mixer, "REQUESTS", ())
    assert mixer.mixer_operations(x, "auto", 64).conv is conv.causal_conv
    assert torch.equal(direct, block(x, cond, layout))
    with dispatch.without_native():
        torch.testing.assert_close(block(x, cond, layout), direct, rtol=1e-4, atol=1e-4)


@compiled
@pytest.mark.parametrize("kept_tokens", [None, 11])
@pytest.mark.parametrize("name", ["dit", "mamba", "rwkv"])
def test_a_block_is_itself_in_float64(name, kept_tokens):
    """Values, gradients, activation checkpointing and bfloat16 branches beside a float32 stream."""
    torch.manual_seed(0)
    block = backbones.create(name, "T/2", input_size=12, depth=2, num_classes=0).stack.blocks[1]
    layout = Layout((6, 6))
    if kept_tokens:
        layout = layout.subset(torch.stack([torch.randperm(36)[:kept_tokens] for _ in range(3)]))
    cond = draw(3, 6, 1, 64, seed=1).float() / 2
    x = draw(3, kept_tokens or 36, 64, seed=5).float().requires_grad_()

    def gradients(x, cond, checkpoint=False, half=False):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            if checkpoint:
                y = torch.utils.checkpoint.checkpoint(block, x, cond, layout, use_reentrant=False)
            else:
                y = block(x, cond, layout)
        return [y, *torch.autograd.grad(y.square().sum(), [x, *block.parameters()])]

    plain, again, half = gradients(x, cond), gradients(x, cond, True), gradients(x, cond, half=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    block.double()
    exact = gradients(x.detach().double().requires_grad_(), cond.double())
    close(plain, exact, 1e-4)
    close(half, exact, 0.1)
