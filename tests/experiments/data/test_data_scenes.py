import math

import pytest
import torch
from data_tools import refused

from experiments.data import ScenesOptions, create
from experiments.data import probe as reader
from experiments.data import scenes as words
from experiments.data.scenes import Scenes, choose, draw
from routing.rng import Draws


def scenes(task="class", **options):
    return create(ScenesOptions(**options), task=task)


def test_same_index_same_picture_in_any_batch():
    data = scenes()
    whole = data.batch(torch.arange(64))
    parts = [data.batch(index) for index in torch.arange(64).split([1, 30, 33])]
    assert torch.equal(whole.x, torch.cat([p.x for p in parts]))
    assert torch.equal(whole.y, torch.cat([p.y for p in parts]))
    far = data.batch(torch.tensor([3, 2**40, 3]))
    assert torch.equal(far.x[0], far.x[2]) and torch.equal(far.x[0], whole.x[3])


def test_streams_seeds_and_indices_differ():
    def pictures(seed, split):
        return scenes(seed=seed).batch(torch.arange(256), None, split).x

    sets = [pictures(0, "train"), pictures(0, "test"), pictures(1, "train")]
    rows = [{tuple(x.flatten().tolist()) for x in s} for s in sets]
    assert [len(r) for r in rows] == [256] * 3
    assert not (rows[0] & rows[1] or rows[0] & rows[2])


def test_scale_and_pixels():
    data = scenes()
    batch = data.batch(torch.arange(1024))
    assert abs(float(batch.x.mean())) < 1e-5 and abs(float(batch.x.std()) - 0.5) < 1e-5
    pixels = data.to_pixels(batch.x)
    assert torch.equal(data.from_pixels(pixels), batch.x)
    test = data.batch(torch.arange(4096), None, "test").x
    assert abs(float(test.mean())) < 0.02 and abs(float(test.std()) - 0.5) < 0.02


def test_every_quadrant_is_drawn_as_its_attributes_say():
    # An independent check by sampling: the covered area must be that of the shape, within its
    # range of radii.
    attributes, free = choose(Draws(5, 0, torch.arange(3000)))
    pictures = draw(attributes, free).double()
    ground = torch.tensor([0.06, 0.5, 0.94]).double()[attributes.background] + 0.1 * (free[:, 0, 6] - 0.5)
    cells = pictures.unflatten(3, (2, 16)).unflatten(2, (2, 16)).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    ground = (ground * 255).round().clamp(0, 255).view(-1, 1, 1, 1, 1)
    inside = (cells - ground).abs().amax(2) > 1
    assert not inside[attributes.shape == 0].any()
    # Air between quadrants: the outer ring of pixels is at most lightly covered.
    for shape, low, high in ((1, 3.0, 3.3), (2, 2.7, 3.2), (4, 2.0, 2.7), (5, 1.7, 2.4), (3, 1.5, 2.0)):
        for size, radii in ((1, (5.2, 6.8)), (2, (2.8, 4.0))):
            chosen = (attributes.shape == shape) & (attributes.size == size)
            area = inside[chosen].sum((-1, -2)).double()
            # A border of antialiased pixels, about 1.2 times the perimeter at most, counts as
            # inside.
            assert float(area.min()) > 0.9 * low * radii[0] ** 2
            assert float(area.max()) < high * radii[1] ** 2 + 14 * radii[1]
    assert not (inside[..., 0, :] & inside[..., -1, :]).any()


def test_attributes_cover_everything_evenly():
    a = scenes().attributes(torch.arange(20000))
    assert (a.size == 1).sum(1).eq(1).all()
    shares = torch.stack([(a.shape > 0).sum(1).eq(k).double().mean() for k in (1, 2, 3)])
    assert (shares - 1 / 3).abs().max() < 0.02
    labels = a.labels().bincount(minlength=30)
    assert len(labels) == 30 and (labels / 20000 - 1 / 30).abs().max() < 0.006
    assert (a.background.bincount() / 20000 - 1 / 3).abs().max() < 0.02
    places = (a.size == 1).double().mean(0)
    assert (places - 0.25).abs().max() < 0.02


def test_label_names_the_large_shape():
    data = scenes()
    a = data.attributes(torch.arange(100))
    for name, caption in zip([data.class_names[k] for k in data.batch(torch.arange(100)).y], a.captions(), strict=True):
        assert caption.startswith(f"a large {name} at the ")


def test_captions_and_reading_them_are_inverses():
    a = scenes().attributes(torch.arange(500))
    parsed = words.read_captions(a.captions())
    for key in ("shape", "colour", "size", "background"):
        assert torch.equal(getattr(a, key), getattr(parsed, key))
    assert "a large blue circle at the bottom right and a small yellow ring at the top left on a " in a.captions()[0]
    sentences = [
        "a large red circle at the top left, a small blue ring at the top right and "
        "a small green cross at the bottom left on a gray background",
        "a large cyan square at the bottom right on a white background",
    ]
    assert words.read_captions(sentences).captions() == sentences


def test_tokens_are_those_of_the_captions():
    for max_shapes in (1, 2, 3):
        a = scenes(max_shapes=max_shapes).attributes(torch.arange(1000))
        assert torch.equal(a.tokens(), words.tokenize(a.captions()))


def test_text_batches():
    data = scenes("text")
    batch = data.batch(torch.arange(8))
    assert data.text == (32, 64) and batch.text.shape == (8, 32, 64) and batch.y is None
    condition = data.condition(torch.arange(8), "train")
    assert data.num_classes == 0 and len(condition.captions) == 8
    assert torch.equal(batch.text, data.encode_text(condition.captions))
    held_out = data.batch(torch.arange(8), None, "test")
    assert held_out.captions == data.condition(torch.arange(8)).captions != condition.captions
    assert torch.equal(batch.x, scenes().batch(torch.arange(8)).x)
    assert scenes("none").batch(torch.arange(2)).y is None


def test_embedding_is_orthogonal_and_of_unit_variance():
    ids = torch.arange(32).view(1, 32).repeat(2, 1)
    ids[1] = 0
    e = words.embed(ids)
    assert math.isclose(float(e.square().mean()), 1.0, rel_tol=1e-6)
    # Subtracting the shared places leaves words, whose rows are orthogonal.
    word = (e[0] - e[1]) * 2**0.5
    gram = word[1:] @ word[1:].T
    expected = 64 * (torch.eye(31) + 1)
    torch.testing.assert_close(gram, expected)
    assert len(words.WORDS) <= 32 and len(set(words.WORDS)) == len(words.WORDS)


def test_errors_in_one_sentence():
    calls = {
        "did you mean green?": lambda: words.tokenize(["a large gren circle"]),
        "expected sentences like": lambda: words.read_captions(["a large red circle"]),
    }
    for message, call in calls.items():
        refused(call, message)


@pytest.fixture(scope="module")
def sample():
    data = scenes("text")
    index = torch.arange(256) + 10_000
    batch = data.batch(index, None, "test")
    return (data.to_pixels(batch.x), data.attributes(index, "test"), batch.captions)


def shares(*args, **condition):
    return {part: hits / of for part, (hits, of) in reader.adherence(*args, **condition).items()}


def test_probe_reads_pictures_it_never_saw(sample):
    pixels, truth, captions = sample
    by_label = shares(pixels, labels=truth.labels())
    by_caption = shares(pixels, captions=captions)
    assert min(by_label.values()) > 0.97
    assert by_caption["caption"] > 0.95 and min(by_caption.values()) > 0.95
    # The same pictures as floats.
    assert shares(pixels.float() / 127.5 - 1, captions=captions) == by_caption


def test_adherence_is_chance_for_wrong_requests(sample):
    pixels, truth, captions = sample
    rolled = shares(pixels, labels=truth.labels().roll(1))
    assert rolled["class"] < 0.1 and abs(rolled["shape"] - 1 / 5) < 0.08
    assert shares(pixels, captions=captions[1:] + captions[:1])["caption"] < 0.02
    blank = shares(torch.full_like(pixels, 128), captions=captions)
    assert blank["caption"] == 0 and blank["shape"] < 0.05
    assert shares(torch.full_like(pixels, 128), labels=truth.labels())["class"] == 0


@pytest.mark.gpu
def test_gpu_renders_the_same_pictures():
    cpu = Scenes(ScenesOptions(), device="cpu")
    gpu = Scenes(ScenesOptions(), device="cuda")
    index = torch.arange(20000)
    a, b = cpu.batch(index), gpu.batch(index)
    assert torch.equal(a.y, b.y.cpu())
    assert torch.equal(cpu.to_pixels(a.x), gpu.to_pixels(b.x).cpu())
    assert cpu.fingerprint == gpu.fingerprint
