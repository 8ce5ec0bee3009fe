"""`python -m analysis publish`: a folder whose every number can be made again from its archive."""

import io
import tarfile
import tracemalloc

import pytest
from analysis_runs import write, write_pairs

from analysis import command
from analysis.comparison.results import Results
from analysis.errors import AnalysisError
from analysis.reports import pages, publish
from analysis.reports.machines import machine_lines
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
<!-- finding placement -->
<!-- end -->
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("publish") / "runs"
    write_pairs(root, seeds=2, samples=True, guidance=True, paths__runs=str(root))
    return root


@pytest.mark.slow
def test_a_folder_with_everything_and_again_from_its_archive(runs, tmp_path, capsys):
    out = tmp_path / "results"
    out.mkdir()
    (out / "README.md").write_text(PAGE)
    other = tmp_path / "front.md"
    blocks = (
        "guidance ours", "main columns=0,3", "main group=mamba", "main having=rwkv", "summary flat columns=0,3",
    )  # fmt: skip
    other.write_text("".join(f"<!-- table {words} -->\n<!-- end -->\n" for words in blocks))
    assert command.main(["publish", str(runs), "--out", str(out), "--pages", str(other)]) == 0
    assert "main" in capsys.readouterr().out
    page = (out / "README.md").read_text()
    assert "old" not in page and "Words stay." in page and "4 finished runs" in page
    assert "dit-T/1" in page and "Paper, FID-50K" in page
    assert "do not answer" in page.partition("<!-- finding placement -->")[2]
    assert "| Metric | \u0394 |" in other.read_text()
    assert "| dit-T/1 | " in other.read_text() and "\n- digits, edm, scale tiny: route 2-8" in other.read_text()
    assert other.read_text().count("dit-T/1") > page.count("dit-T/1") > 0
    assert (out / "figures" / "samples.png").is_file() and (out / "tables" / "main.csv").is_file()
    assert len((out / "runs.csv").read_text().splitlines()) == 5

    with tarfile.open(out / publish.ARCHIVE) as tar:
        assert not [name for name in tar.getnames() if name.endswith(".safetensors")]
        assert [name for name in tar.getnames() if name.endswith("final.png")]
    again = Results.of(unpack(out / publish.ARCHIVE, tmp_path / "again"))
    assert publish.fill(page, again) == page
    assert publish.fill(other.read_text(), again) == other.read_text()
    assert "routed scale=1.5" in other.read_text()
    files = {name: path.read_bytes() for name, path in publish.records(again).items()}
    assert publish.archive(files) == (out / publish.ARCHIVE).read_bytes()
    # Where the runs lay on one machine is nobody else's business.
    assert str(tmp_path.parent) not in (out / "runs.csv").read_text()
    assert not [name for name, content in files.items() if str(runs).encode() in content]


def test_the_archive_holds_every_run_and_benchmark(tmp_path):
    for place in ("a", "b"):
        folder = write(tmp_path / place, route="2-8")
        (folder / "env.json").write_text('{"packages": "x", "python": "3.11"}')
    alone = write(tmp_path, route="none")
    timed = tmp_path / ".sweeps" / "bench" / "outputs" / "bench-0123456789ab.json"
    timed.parent.mkdir(parents=True)
    for path in (timed, tmp_path / "bench.json"):
        path.write_text("{}")
    study = Results.of(tmp_path)
    names = publish.records(study)
    held = {name.removeprefix("runs/").removesuffix("/summary.json") for name in names if "summary" in name}
    assert held == {f"a/{folder.name}", f"b/{folder.name}", alone.name}
    assert {name for name in names if "bench" in name} == {"runs/bench.json", f"runs/{timed.relative_to(tmp_path)}"}
    # Whatever an environment file holds.
    assert "torch: not recorded" in machine_lines(study.runs)


def test_a_block_may_take_other_records(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    study = Results.of(runs)
    page = "<!-- table main ours{0} -->\n<!-- end -->\n<!-- finding placement{0} -->\n<!-- end -->"
    (tmp_path / "more.tar.gz").write_bytes(
        publish.archive({name: path.read_bytes() for name, path in publish.records(study).items()})
    )
    empty = Results.of(study.runs.iloc[:0])
    assert "dit-T/1" not in publish.fill(page.format(""), empty)
    given = publish.fill(page.format(" of=more.tar.gz"), empty)
    assert given.replace(" of=more.tar.gz", "") == publish.fill(page.format(""), study)
    with pytest.raises(AnalysisError, match="no archive .*none.tar.gz"):
        publish.fill(page.format(" of=none.tar.gz"), study)
    # Who reads all runs of this folder reads none of these.
    assert not find(tmp_path / "runs")


def test_a_damaged_archive_is_refused_whole(runs, tmp_path):
    study = Results.of(runs)
    whole = publish.archive({name: path.read_bytes() for name, path in publish.records(study).items()})
    flipped = bytearray(whole)
    flipped[2000] ^= 0xFF
    for content in (bytes(flipped), whole[:-4], whole[: len(whole) // 2]):
        (tmp_path / "damaged.tar.gz").write_bytes(content)
        with pytest.raises(AnalysisError, match="damaged.tar.gz holds no records of runs"):
            unpack(tmp_path / "damaged.tar.gz", tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_what_cannot_be_published_is_said_before_anything_is_written(runs, tmp_path, capsys):
    out = tmp_path / "results"
    out.mkdir()
    (tmp_path / "empty").mkdir()
    assert command.main(["publish", str(tmp_path / "empty"), "--out", str(out)]) == 2
    assert "no finished run" in capsys.readouterr().err
    (out / "README.md").write_text("<!-- table mian -->\n<!-- end -->")
    assert command.main(["publish", str(runs), "--out", str(out)]) == 2
    assert "did you mean main" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["README.md"]
    results = Results.of(runs)
    for words, message in (("all", "options are `ours`"), ("columns=0,99", "no column '99'")):
        with pytest.raises(AnalysisError, match=message):
            publish.fill(f"<!-- table main {words} -->\n<!-- end -->", results)
    with pytest.raises(AnalysisError, match="opens 3 blocks and ends 2; put <!-- end -->"):
        publish.fill(PAGE.replace("old\n<!-- end -->", "old"), results)


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
