"""Slurm with several clusters, wrappers of sbatch, and variables that change what both do."""

import os

import pytest

from sweeps.submission.live_jobs import LiveJobs

# Jobs are seen on the cluster that they were sent to, by sbatch's own line or by its environment.
FAKE_SLURM = {
    "sbatch": """\
for file in "$@"; do [ -f "$file" ] && cp "$file" "$FAKE/script" && stat -c %a "$(dirname "$file")" > "$FAKE/mode"; done
name=$(sed -n "s/^#SBATCH --job-name=//p" "$FAKE/script" | tr -d \\')
cluster=$(sed -n "s/^#SBATCH --clusters=//p" "$FAKE/script")
echo "${SBATCH_JOB_NAME:-$name}|$(sed -n "s/^#SBATCH --chdir=//p" "$FAKE/script")" > "$FAKE/name"
echo "${SBATCH_CLUSTERS:-${SLURM_CLUSTERS:-$cluster}}" > "$FAKE/sent"
echo 1 >> "$FAKE/submissions"
printf "$ANSWER\\n"
""",
    "squeue": """\
cluster=$SLURM_CLUSTERS; [ "$1" = -M ] && cluster=$2
[ "$1" = -M ] && echo "CLUSTER: $2"
[ -n "$SQUEUE_PARTITION" ] && exit 0
[ -f "$FAKE/sent" ] && [ "$(cat "$FAKE/sent")" = "$cluster" ] || exit 0
for task in 0 1; do echo "101_$task|PENDING|Priority|(null)|$(cat "$FAKE/name")"; done
""",
    "sacct": "exit 1\n",
    "scancel": 'echo "$@" > "$FAKE/scancel"\n',
    "scontrol": 'echo "$@" > "$FAKE/scontrol"; echo "MaxArraySize = 1001"\n',
    "srun": "exit 0\n",
}


@pytest.fixture
def fake_slurm(tmp_path, monkeypatch):
    """A Slurm of several clusters, in files; returns the folder that notes what it was told."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    for name, lines in FAKE_SLURM.items():
        (folder / name).write_text(f"#!/bin/bash\n{lines}")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE", str(folder))
    monkeypatch.setenv("ANSWER", "101")
    for name in ("SLURM_CLUSTERS", "SBATCH_CLUSTERS"):
        monkeypatch.delenv(name, raising=False)
    return folder


def submitted_once(cli, folder, *words):
    """Launch, and look whether status, a second launch, a retry and cancel find the jobs."""
    assert "submitted 2 runs as job 101" in cli("launch", *words)
    assert [row.job for row in cli.rows().values()] == ["101_0", "101_1"]
    assert set(cli.states().values()) == {"pending"}
    assert "2 of 2 in the queue or running" in cli("launch", *words)
    assert "nothing has failed or is missing" in cli("launch", *words, "--retry")
    assert "cancelled 2 of 2" in cli("cancel")
    assert (folder / "submissions").read_text() == "1\n"
    return (folder / "scancel").read_text().split(), (folder / "scontrol").read_text().split()


@pytest.mark.parametrize(
    ("by", "answer"),
    [
        ("SLURM_CLUSTERS", "101"), ("SBATCH_CLUSTERS", "101;gpu2"),
        ("extra", "your account 4711 has 12 hours left\\nSubmitted batch job 101 on cluster gpu2\\nquota: job 7 of 9"),
    ],
)  # fmt: skip
def test_the_cluster_of_the_jobs_is_asked_for_them(by, answer, cli, fake_slurm, monkeypatch):
    monkeypatch.setenv("ANSWER", answer)
    words = ["cluster=slurm"]
    if by == "extra":
        words.append("cluster.extra={clusters: gpu2}")
    else:
        monkeypatch.setenv(by, "gpu2")
    cancelled, asked = submitted_once(cli, fake_slurm, *words)
    assert cancelled == ["-M", "gpu2", "101_0", "101_1"] and asked[:2] == ["-M", "gpu2"]
    # Another shell, without the variable.
    monkeypatch.delenv(by, raising=False)
    assert set(cli.states().values()) == {"pending"} and cli.sweep.batches()[0].slurm_cluster == "gpu2"


def test_variables_that_hide_or_rename_jobs_change_nothing(cli, fake_slurm, monkeypatch):
    for name, value in (("SQUEUE_PARTITION", "cpu"), ("SBATCH_JOB_NAME", "mine"), ("SBATCH_EXPORT", "NONE")):
        monkeypatch.setenv(name, value)
    cancelled, _ = submitted_once(cli, fake_slurm, "cluster=slurm")
    assert cancelled == ["101_0", "101_1"] and (fake_slurm / "mode").read_text() == "700\n"


def test_several_clusters_are_refused_before_anything_is_submitted(cli, fake_slurm, monkeypatch):
    for value in ("gpu1,gpu2", "all"):
        monkeypatch.setenv("SLURM_CLUSTERS", value)
        text = cli("launch", "cluster=slurm", code=2)
        assert f"SLURM_CLUSTERS={value}: expected the name of one cluster" in text
    assert not (fake_slurm / "submissions").exists() and not cli.sweep.path.exists()


@pytest.mark.parametrize("cancel", ["works", "fails"])
def test_a_held_array_is_forgotten_only_if_it_could_be_cancelled(cancel, cli, fake_slurm, monkeypatch):
    """sbatch has accepted the array; then scontrol gives no answer to the update of a dependency."""
    monkeypatch.setattr(LiveJobs, "condition", lambda self, run: "afterok:7" if "_s0" in run.name else "")
    scontrol = fake_slurm / "scontrol"
    scontrol.write_text('#!/bin/bash\n[ "$1" != update ] && echo "MaxArraySize = 1001" || exit 1\n')
    works = 'echo "$@" > "$FAKE/scancelled"; rm "$FAKE/sent"'
    (fake_slurm / "scancel").write_text(f"#!/bin/bash\n{works if cancel == 'works' else 'exit 1'}\n")
    text = cli("launch", "cluster=slurm", code=2)
    assert "scontrol: " in text and "Traceback" not in text
    if cancel == "works":
        assert (fake_slurm / "scancelled").read_text() == "101\n" and not cli.sweep.batches()
        return
    assert "it may still be in the queue: type scancel 101 before you launch again" in " ".join(text.split())
    assert len(cli.sweep.batches()) == 1
    assert "2 of 2 in the queue or running" in cli("launch", "cluster=slurm")
    assert (fake_slurm / "submissions").read_text() == "1\n"


def test_an_answer_without_a_job_id_is_one_sentence_and_stays_noted(cli, fake_slurm, monkeypatch):
    monkeypatch.setenv("ANSWER", "thank you for 3 jobs")
    (fake_slurm / "squeue").write_text("#!/bin/bash\nexit 0\n")
    text = cli("launch", "cluster=slurm", code=2)
    assert "error: sbatch printed 'thank you for 3 jobs', expected a job id" in text
    assert "Traceback" not in text and len(cli.sweep.batches()) == 1
    (fake_slurm / "squeue").write_text("#!/bin/bash\n" + FAKE_SLURM["squeue"])
    assert "2 of 2 in the queue or running" in cli("launch", "cluster=slurm")
    assert [*cli.sweep.batches()[0].ids.values()] == ["101_0", "101_1"]
