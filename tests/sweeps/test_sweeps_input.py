"""Wrong grids, clusters and words: exit code 2, one sentence, nothing is written (see also tests/test_input_table.py)."""

import pytest

from sweeps import command as sweeps_command


@pytest.fixture
def refused(tmp_path, capsys, monkeypatch):
    """Run a command and return its one line on stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def run(*words):
        assert sweeps_command.main([*words]) == 2
        lines = [line for line in capsys.readouterr().err.splitlines() if "is code: it is executed" not in line]
        assert len(lines) == 1 and lines[0].startswith("error: "), lines
        assert not list(tmp_path.glob("runs/.sweeps/*"))
        return lines[0]

    return run


OVER = "over: {train.lr: [0.1]}"
GRIDS = [
    ("axis: {}", "unknown key axis; did you mean axes"),
    ("axes: {route: none}", "axes.route=none: expected a list of values"),
    ("zip: {a: [1], b: [1, 2]}", "zip columns of one length"),
    ("command: call", "command 'call': expected one of train, evaluate, bench, analysis"),
    ("commands: {x: 'os:system'}", "unknown key commands"),
    ("where: {route: none}", "expected its name in of"),
    ("base: {seed: 3}", "seed: expected in none of base"),
    ("axes: {cluster: [{gpus: 1}]}", "cluster: expected in a stage or in an entry of cells"),
    ("cells: [{route: 2-8, paths.runs: /x}]", "paths.runs: expected in none of"),
    (f"axes: {{a: {list(range(1000))}, b: {list(range(1000))}}}", "more than 10000 cells"),
    ("scales: {tiny: {sed: [1]}}", "unknown key scales.tiny.sed"),
    ("scales: {tiny: {refused: the cells would be one run}}", "has no scale tiny: the cells would be one run"),
    ("stages: [{name: x, of: y}]", "stage x: of 'y': expected one of train"),
    ("stages: [{name: ../x}]", "name=../x: expected a file name"),
    ("stages: [{name: x, after: train, of: train, command: analysis}]", "after=train: expected with a command"),
    ("a: [", "not YAML"),
    # Runs that coincide, with the reason; routes that do not fit.
    ("axes: {route: [auto, 2-8]}", "route=auto seed=0' and 'route=2-8 seed=0' are one run"),
    ("axes: {route: [2-8, 2-20]}", "route=2-20 seed=0: "),
    ("{fits: [route], axes: {route: [2-20]}}", "no cell fits"),
    # Only well-formed routes may be left out.
    ("{fits: [route], axes: {route: [2-4, foo]}}", "route=foo: expected none, auto"),
    ("{fits: [route], axes: {route: [2-4, 8-2]}}", "start must not exceed end"),
    # Resources of cells and stages.
    ("cluster: {memry_gb: 8}", "unknown key cluster.memry_gb; did you mean memory_gb"),
    ("cells: [{route: none, cluster: {gpus: x}}]", "cluster.gpus=x: expected a whole number or TYPE:NUMBER"),
    ("stages: [{name: t, of: train, cluster: {setup: [rm x]}}]", "belongs to the cluster file"),
    ("cells: [{route: 2-8, cluster: {signal_s: 7200}}]", "route=2-8 seed=0: cluster.signal_s=7200: expected less"),
    # Searches.
    (f"search: {{metric: fdd, {OVER}}}", "did you mean fd"),
    ("search: {over: {train.lr: {low: 2, high: 1}}}", "not a range"),
    (f"{{seeds: [0, 1], search: {{{OVER}}}}}", "expected one seed"),
]


@pytest.mark.parametrize(("text", "message"), GRIDS)
def test_a_wrong_grid_is_one_sentence(text, message, refused, tmp_path):
    (tmp_path / "g.yaml").write_text(f"{text}\n")
    assert message in refused("launch", "g.yaml", "--dry-run")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("time: soon", "time=soon: expected minutes"),
        ("time: '1:00'\nsignal_s: 120", "signal_s=120: expected less than time=1:00"),
        ("partition: a; rm -rf /", "no characters but those of sbatch options"),
        ("extra: {wrap: $(x)}", "expected sbatch options"),
        ("extra: {clusters: 'a,b'}", "expected the name of one cluster"),
        ("extra: {job-n: a}", "short for job-name"),
        ("extra: {array: 0-5}", "options that the sweep does not set"),
        ('setup: ["a\\nb"]', "expected a list of lines such as [module load"),
        ("kind: local\nsetup: ['true']", "setup with kind=local: expected only with kind=slurm"),
        # YAML 1.1 reads these as 8, 10, 1 and 10.
        ("nodes: 010", "nodes=010: expected an integer"),
        ("cpus: 1_0", "cpus=1_0: expected an integer"),
    ],
)
def test_a_wrong_cluster_is_one_sentence(text, message, refused, tmp_path):
    (tmp_path / "mine.yaml").write_text(text if "kind" in text else f"kind: slurm\n{text}")
    assert message in refused("launch", "selection_rate", "cluster=mine.yaml", "--dry-run")


PREDICT = "base: {data: digits, eval: digits, train.steps: 400}\naxes: {route: [none, 1-2]}\nseeds: [0, 1]\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("launch route_placement train.lr=1 train.lr=2", "train.lr is given twice; expected train.lr=A,B"),
        ("launch route_placement train.lr=", "expected key=value or key=A,B"),
        ("launch route_placement seeds=0,1", "key of grid files; expected seed=0,1"),
        ("launch route_placement cluster=slrum", "did you mean slurm"),
        ("launch study_jit route=4-8", "expected one of none, 2-8; launch route_placement route=4-8 for other routes"),
        ("launch route_placement scale=paper data.path=/no/where", "/no/where is no folder"),
        ("launch route_placement train.graphs=true cluster=debug", "expected a CUDA GPU, there is none here"),
        ("launch selection_rate cluster=local cluster.gpus=3 --dry-run", "needs 3 GPUs, 0 are visible"),
        ("launch route_placement --trials 3", "has no search section"),
        ("launch search_route train.lr=1", "leave the argument out"),
        ("launch search_route eval=none --dry-run", "search: eval=none computes no metric"),
        ("launch code.yaml", "rename it"),  # its folder would be that of the copies of the code
        ("cancel route_placement dry=true", "dry= belongs to launch"),
        ("retry route_placement", "command 'retry': expected one of launch"),
        ("launch route_placement --retry cluster=debug", "was not launched below"),
        ("launch search_route --retry cluster=debug", "is a search, which resumes its own trials"),
    ],
)
def test_a_wrong_command_is_one_sentence(words, message, refused, tmp_path):
    for name in ("tiny", "code"):
        (tmp_path / f"{name}.yaml").write_text(PREDICT)
    assert message in refused(*words.split())
