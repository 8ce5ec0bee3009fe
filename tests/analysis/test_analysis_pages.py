"""Blocks of Markdown pages, and the archives of records that they are filled from."""

import io
import tarfile
import tracemalloc

import pytest
from analysis_runs import write, write_pairs

from analysis.comparison.results import Results
from analysis.errors import AnalysisError
from analysis.reports import pages
from analysis.runs import archives
from analysis.runs.archives import unpack
from analysis.runs.loading import find

PAGE = """# Ours

<!-- facts -->
old
<!-- end -->
Words stay.
<!-- table main ours -->
<!-- end -->
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("pages") / "runs"
    write_pairs(root, seeds=2, guidance=True)
    return root


@pytest.fixture(scope="module")
def archive(runs, tmp_path_factory):
    path = tmp_path_factory.mktemp("archive") / "more.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        tar.add(runs, "runs")
    return path


def block(words):
    return f"<!-- {words} -->\n<!-- end -->\n"


def test_blocks_are_filled_and_words_stay(runs):
    page = pages.fill(PAGE, Results.of(runs))
    assert "old" not in page and "Words stay." in page and "4 finished runs" in page
    assert "dit-T/1" in page
    assert pages.fill(page, Results.of(runs)) == page


@pytest.mark.parametrize(
    ("words", "text", "is_in"),
    [
        ("guidance ours", "routed scale=1.5", True),
        ("main columns=0,3", "| Metric | \u0394 |", True),
        ("main group=mamba", "dit-T/1", False),
        ("main having=rwkv", "dit-T/1", False),
        ("main group=dit", "dit-T/1", True),
        ("summary flat columns=0,3", "\n- digits, edm, scale tiny: route 2-8", True),
    ],
)
def test_options_of_a_table(words, text, is_in, runs):
    assert (text in pages.fill(block(f"table {words}"), Results.of(runs)).partition("-->")[2]) is is_in


def test_a_block_may_take_other_records(runs, archive, tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    (tmp_path / "more.tar.gz").write_bytes(archive.read_bytes())
    study = Results.of(runs)
    empty = Results.of(study.runs.iloc[:0])
    assert "dit-T/1" not in pages.fill(block("table main ours"), empty)
    given = pages.fill(block("table main ours of=more.tar.gz"), empty)
    assert given.replace(" of=more.tar.gz", "") == pages.fill(block("table main ours"), study)
    with pytest.raises(AnalysisError, match="no archive .*none.tar.gz"):
        pages.fill(block("table main of=none.tar.gz"), study)
    # Who reads all runs of this folder reads none of these.
    assert not find(tmp_path / "runs")


@pytest.mark.parametrize(
    ("page", "message"),
    [
        (block("table mian"), "did you mean main"),
        (block("table main all"), "options are `ours`"),
        (block("table main columns=0,99"), "no column '99'"),
        (block("study eqal_macs arms"), "did you mean equal_macs"),
        (block("study muon arm"), "did you mean arms"),
        (PAGE.replace("old\n<!-- end -->", "old"), "opens 2 blocks and ends 1; put <!-- end -->"),
    ],
)
def test_a_block_that_cannot_be_filled_is_refused(page, message, runs):
    with pytest.raises(AnalysisError, match=message):
        pages.fill(page, Results.of(runs))


def test_facts_of_an_environment_that_names_little(tmp_path):
    (write(tmp_path) / "env.json").write_text('{"packages": "x", "python": "3.11"}')
    assert "torch: not recorded" in pages.machine_lines(Results.of(tmp_path).runs)


def test_a_damaged_archive_is_refused_whole(archive, tmp_path):
    whole = archive.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0xFF
    for content in (bytes(flipped), whole[:-4], whole[: len(whole) // 2]):
        (tmp_path / "damaged.tar.gz").write_bytes(content)
        with pytest.raises(AnalysisError, match="damaged.tar.gz holds no records of runs"):
            unpack(tmp_path / "damaged.tar.gz", tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(("count", "size"), [(1, 64 * 2**20), (60, 0)])
def test_an_archive_that_unpacks_to_too_much_is_refused(count, size, tmp_path, monkeypatch):
    with tarfile.open(tmp_path / "bomb.tar.gz", "w:gz", compresslevel=1) as tar:
        for place in range(count):
            member = tarfile.TarInfo(f"runs/{place}/metrics.jsonl")
            member.size = size
            tar.addfile(member, io.BytesIO(bytes(size)))
    monkeypatch.setattr(archives, "MAX_FILES", 50)
    monkeypatch.setattr(archives, "MAX_UNPACKED", 2**20)
    tracemalloc.start()
    try:
        with pytest.raises(AnalysisError, match="unpacks to more than 1 MiB or 50 files"):
            unpack(tmp_path / "bomb.tar.gz", tmp_path / "out")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Decompressed as a whole it would take 64 MiB.
    assert peak < 16 * 2**20
    assert list((tmp_path / "out").iterdir()) == []
