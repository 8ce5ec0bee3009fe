"""Draws: the published generator, and independence of everything but (seed, step, index, stream)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from routing import Draws
from routing.rng import philox

# Random123's known answers for philox4x32-10: counter, key, result.
KNOWN = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def words(counters, key):
    return torch.stack(philox(torch.tensor(counters).T, key), -1).tolist()


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_known_answers(counter, key, result):
    assert philox(counter, key) == result
    assert words([counter], key) == [list(result)]


word = st.integers(0, 2**32 - 1)


@given(st.lists(st.tuples(word, word, word, word), min_size=1, max_size=5), st.tuples(word, word))
def test_tensors_agree_with_integers(counters, key):
    assert words(counters, key) == [list(philox(counter, key)) for counter in counters]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**63), st.integers(0, 2**31), st.integers(1, 12), st.data())
def test_any_split_of_the_batch(seed, step, batch, data):
    index = torch.tensor(data.draw(st.lists(st.integers(0, 2**40), min_size=batch, max_size=batch)))
    cut = data.draw(st.integers(0, batch))
    whole = Draws(seed, step, index)
    parts = [Draws(seed, step, piece) for piece in (index[:cut], index[cut:])]
    for draw in (
        lambda d: d.uniform("route.0", 7),
        lambda d: d.normal("noise", (2, 3)),
        lambda d: d.integers("label", 3, 10),
    ):
        assert torch.equal(draw(whole), torch.cat([draw(part) for part in parts]))


def test_streams_steps_seeds_and_samples_differ():
    index = torch.arange(4)
    rows = [
        Draws(0, 0, index).uniform("sigma", 64),
        Draws(0, 0, index).uniform("noise", 64),
        Draws(0, 1, index).uniform("sigma", 64),
        Draws(1, 0, index).uniform("sigma", 64),
        Draws(0, 0, index + 2**33).uniform("sigma", 64),
    ]
    flat = torch.cat(rows)
    agree = (flat.unsqueeze(0) == flat.unsqueeze(1)).float().mean(2).fill_diagonal_(0)
    assert agree.max() < 0.05
    assert torch.equal(Draws(0, 0, index).uniform("sigma", 5), rows[0][:, :5])  # more numbers begin as fewer do


def test_distributions():
    draws = Draws(0, 0, torch.arange(256))
    u, z = draws.uniform("u", 1024), draws.normal("z", (32, 32))
    assert u.dtype == torch.float32 and u.min() >= 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 2e-3 and abs(u.var() - 1 / 12) < 1e-3
    assert z.shape == (256, 32, 32) and abs(z.mean()) < 6e-3 and abs(z.std() - 1) < 6e-3
    assert abs((z**4).mean() - 3) < 0.06
    pairs = z.flatten(1)
    assert abs((pairs[:, 0::2] * pairs[:, 1::2]).mean()) < 6e-3
    assert draws.integers("i", 1000, 3).unique().tolist() == [0, 1, 2]


def test_the_extremes_of_a_word_stay_finite(monkeypatch):
    draws = Draws(0, 0, torch.arange(1))
    for value in (0, 2**32 - 1):
        monkeypatch.setattr(draws, "_words", lambda _, n, v=value: torch.full((1, n), v))
        assert draws.uniform("u", 4).min() >= 0 and draws.uniform("u", 4).max() < 1
        assert draws.uniform("u", 4, torch.float64).max() < 1
        assert draws.normal("z", 4).abs().max() < 7


def test_a_uniform_number_is_its_word_in_float64_and_the_words_upper_24_bits_in_float32():
    key = (0xA4093822, 0x299F31D0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("routing.rng._key", lambda seed, stream: key)
        draws = Draws(0, 0x03707344, torch.tensor([0x85A308D3 + (0x13198A2E << 32)]))
        wide, narrow = draws.uniform("u", 4, torch.float64), draws.uniform("u", 4)
    expected = philox((0, 0x85A308D3, 0x13198A2E, 0x03707344), key)
    assert wide.dtype == torch.float64 and wide.tolist() == [[word / 2**32 for word in expected]]
    assert narrow.tolist() == [[(word >> 8) / 2**24 for word in expected]]


def test_shared_is_one_row_for_all():
    shared = Draws(5, 2, torch.tensor([7, 8, 9])).shared().uniform("a", 6)
    assert shared.shape == (3, 6) and torch.equal(shared, shared[:1].expand(3, 6))
    assert torch.equal(Draws(5, 2, torch.tensor([100])).shared().uniform("a", 6), shared[:1])


def test_a_scalar_is_of_the_step_alone():
    values = [Draws(0, step, torch.arange(1)).scalar("end.0") for step in range(400)]
    assert all(0 <= value < 1 for value in values)
    assert abs(sum(values) / 400 - 0.5) < 0.06
    assert Draws(0, 3, torch.arange(5)).scalar("end.0") == values[3]


@pytest.mark.gpu
def test_a_gpu_draws_what_the_cpu_draws():
    index = torch.tensor([0, 3, 2**33])
    here, there = Draws(7, 90001, index), Draws(7, 90001, index, "cuda")
    assert torch.equal(there.uniform("a", 1000).cpu(), here.uniform("a", 1000))
    assert torch.equal(there.integers("b", 9, 10).cpu(), here.integers("b", 9, 10))
    torch.testing.assert_close(there.normal("c", (3, 64)).cpu(), here.normal("c", (3, 64)), rtol=0, atol=3e-7)
