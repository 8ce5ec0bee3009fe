"""Nothing is unpickled, nothing is run, nothing listens: the source says so, and so does every reader."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import hostile
import pytest
import yaml

from routing.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("routing", "backbones", "experiments", "sweeps", "analysis")

# Calls that can run what a file or a user holds, and calls that open a door.
ALWAYS = {
    "pickle.load": "unpickles", "pickle.loads": "unpickles", "pickle.Unpickler": "unpickles",
    "joblib.load": "unpickles", "shelve.open": "unpickles", "marshal.loads": "unpickles",
    "marshal.load": "unpickles", "dill.load": "unpickles", "dill.loads": "unpickles",
    "cloudpickle.load": "unpickles", "cloudpickle.loads": "unpickles", "pd.read_pickle": "unpickles",
    "pandas.read_pickle": "unpickles", "np.lib.format.read_array": "see allow_pickle",
    "os.system": "shell", "os.popen": "shell", "subprocess.getoutput": "shell",
    "subprocess.getstatusoutput": "shell", "pty.spawn": "shell",
    "eval": "runs text", "exec": "runs text", "compile": "runs text", "__import__": "runs text",
    "yaml.unsafe_load": "runs text", "yaml.full_load": "runs text", "yaml.load_all": "runs text",
    "socket.socket": "opens a socket", "socket.create_server": "listens",
    "HTTPServer": "listens", "ThreadingHTTPServer": "listens", "http.server.HTTPServer": "listens",
    "socketserver.TCPServer": "listens", "asyncio.start_server": "listens",
    "tarfile.TarFile.extractall": "leaves its folder",
}  # fmt: skip
METHODS = {"extractall": "leaves its folder", "extract": "leaves its folder", "listen": "listens", "bind": "listens"}  # fmt: skip
SAFE_LOADERS = {"SafeLoader", "CSafeLoader"}

# (file, what is called): why it may stand. submitit pickles the arguments of a job into the sweep's own
# logs folder and unpickles them in the job: written by us, for us; the suite itself calls no pickle there.
ALLOWED: dict[tuple[str, str], str] = {
    ("analysis/archives.py", "packed.extractall"): "our own records, with tarfile's filter for data",
    ("backbones/parsing.py", "yaml.load"): "a loader made of CSafeLoader, without its numbers of base sixty",
}


def name_of(node):
    """Return `a.b.c` for a chain of names, "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = name_of(node.value)
        return f"{head}.{node.attr}"  # of a call's result: ".eval"
    return ""


def constant(call, key):
    """Return the literal that a call passes as a keyword, None if it passes none."""
    for word in call.keywords:
        if word.arg == key:
            return word.value.value if isinstance(word.value, ast.Constant) else "not a literal"
    return None


def trouble(call):
    """Return why a call is refused, or None."""
    name = name_of(call.func)
    last = name.rsplit(".", 1)[-1]
    if name in ALWAYS:
        return ALWAYS[name]
    if isinstance(call.func, ast.Attribute) and last in METHODS:
        return METHODS[last]
    if constant(call, "shell") not in (None, False):
        return "shell"
    if name == "torch.load" and constant(call, "weights_only") is not True:
        return "torch.load without weights_only=True"
    if constant(call, "allow_pickle") not in (None, False):
        return "allow_pickle"
    if name in ("np.load", "numpy.load") and constant(call, "allow_pickle") is not False:
        return "np.load without allow_pickle=False said aloud"
    if constant(call, "trust_remote_code") not in (None, False):
        return "code from a hub"
    if name == "yaml.load":
        loader = next((w.value for w in call.keywords if w.arg == "Loader"), None)
        names = {n.attr for n in ast.walk(loader) if isinstance(n, ast.Attribute)} if loader else set()
        texts = {n.value for n in ast.walk(loader) if isinstance(n, ast.Constant)} if loader else set()
        loaders = {n for n in names | texts if isinstance(n, str) and n.endswith("Loader")}
        return None if loaders and loaders <= SAFE_LOADERS else "yaml.load without a safe loader"
    return None


def findings(source, file="x.py"):
    """Return (file, call, line, why) for every call that is refused."""
    tree = ast.parse(source)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (why := trouble(node)):
            found.append((file, name_of(node.func), node.lineno, why))
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module]
            found += [
                (file, m, node.lineno, "unpickles")
                for m in modules
                if m in ("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal")
            ]
    return found


def test_the_source_calls_nothing_that_runs_what_a_file_holds():
    found, files = [], 0
    for part in PARTS:
        for path in sorted((ROOT / part).rglob("*.py")):
            files += 1
            file = path.relative_to(ROOT).as_posix()
            found += findings(path.read_text(encoding="utf-8"), file)
    assert files > 100
    refused = [f for f in found if f[:2] not in ALLOWED]
    assert not refused, "\n".join(f"{f}:{line}: {call}: {why}" for f, call, line, why in refused)
    unused = [key for key in ALLOWED if key not in {f[:2] for f in found}]
    assert not unused, f"exceptions that nothing needs any more: {unused}"


@pytest.mark.parametrize(
    "line",
    [
        "pickle.load(f)", "import pickle", "from pickle import load", "torch.load(p)", "torch.load(p, weights_only=False)",
        "torch.load(p, weights_only=flag)", "np.load(p)", "np.load(p, allow_pickle=True)", "np.load(p, allow_pickle=flag)",
        "yaml.load(t)", "yaml.load(t, Loader=yaml.Loader)", "yaml.load(t, Loader=yaml.UnsafeLoader)", "yaml.unsafe_load(t)",
        "subprocess.run(t, shell=True)", "os.system(t)", "os.popen(t)", "eval(t)", "exec(t)", "archive.extractall(p)",
        "s.listen()", "s.bind(('', 0))", "socket.socket()", "AutoModel.from_pretrained(n, trust_remote_code=True)",
    ],
)  # fmt: skip
def test_the_search_finds(line):
    assert findings(line)


def test_our_yaml_loader_makes_what_the_safe_one_makes():
    from backbones.parsing import _loader

    assert issubclass(_loader(), yaml.CSafeLoader)
    assert _loader().yaml_constructors == yaml.CSafeLoader.yaml_constructors
    assert _loader().yaml_multi_constructors == yaml.CSafeLoader.yaml_multi_constructors


@pytest.mark.parametrize(
    "line",
    [
        "torch.load(p, weights_only=True)", "np.load(p, allow_pickle=False)", "yaml.safe_load(t)", "model.eval()",
        "yaml.load(t, Loader=getattr(yaml, 'CSafeLoader', yaml.SafeLoader))", "subprocess.run(['a'])", "re.compile(t)",
    ],
)  # fmt: skip
def test_the_search_passes(line):
    assert not findings(line)


@pytest.mark.slow
def test_the_bombs_go_off_where_they_are_unpickled(tmp_path):
    """A harmless bomb would prove nothing: each content fires under its careless loader."""
    careless = {
        "pickle": "import pickle; pickle.load(open(p, 'rb'))",
        "torch": "import torch; torch.load(p, weights_only=False)",
        "npy": "import numpy; numpy.load(p, allow_pickle=True)",
        "npz": "import numpy; numpy.load(p, allow_pickle=True)['mu']",
        "yaml": "import yaml; yaml.unsafe_load(open(p))",
    }
    words, markers = [], []
    for name, content in hostile.pickles(tmp_path / "marker-%").items():
        marker = tmp_path / f"marker-{name}"
        content = hostile.pickles(marker)[name]
        (tmp_path / name).write_bytes(content)
        words.append(f"p = {str(tmp_path / name)!r}\ntry:\n {careless[name.split('-')[0]]}\nexcept Exception: pass")
        markers.append(marker)
    subprocess.run([sys.executable, "-W", "ignore", "-c", "\n".join(words)], check=True, timeout=120)
    assert [m.name for m in markers if not m.exists()] == []


@pytest.mark.parametrize("name", hostile.READERS)
def test_pickles_are_refused(name, tmp_path):
    one, marker = hostile.READERS[name], tmp_path / "marker"
    folder = tmp_path / "files"
    folder.mkdir()
    one.make(folder)
    one.read(folder)  # a valid input is read
    contents = {p: p.read_bytes() for p in hostile.damage_targets(folder, one.files)}
    for path in {path.name: path for path in contents}.values():  # one of each name
        for kind, content in hostile.pickles(marker).items():
            path.write_bytes(content)
            try:
                one.read(folder)
            except UserError as error:
                assert "\n" not in str(error).strip(), f"more than one line about {path.name}: {error}"
            assert not marker.exists(), f"{name}: {kind} in {path.name} ran"
            # Readers that set damaged files aside have moved things: each content meets whole files.
            for other, whole in contents.items():
                other.parent.mkdir(parents=True, exist_ok=True)
                other.write_bytes(whole)


@pytest.mark.parametrize("field", ["latent.npy", "cls", "latent.pickle"])
def test_pickles_inside_of_tars_are_refused(field, tmp_path):
    import tarfile

    from data_tools import add, latents, npy

    from experiments.data.latent_store import open_store

    marker = tmp_path / "marker"
    for kind, content in hostile.pickles(marker).items():
        folder = tmp_path / kind
        folder.mkdir()
        with tarfile.open(folder / "a.tar", "w") as archive:
            if field == "cls":
                add(archive, "0.latent.npy", npy(latents(1, side=2)[0]))
            add(archive, f"0.{field}", content)
        with pytest.raises(UserError):
            open_store(folder)
        assert not marker.exists(), f"{kind} as {field} ran"


def test_a_run_folder_whose_config_has_a_python_tag_is_listed_as_damaged(tmp_path):
    import analysis

    hostile.make_runs(tmp_path)
    path = next(p for p in tmp_path.glob("*/config.yaml") if (p.parent / "summary.json").exists())
    path.write_bytes(hostile.pickles(tmp_path / "marker")["yaml"])
    with pytest.warns(UserWarning, match="1 damaged run folders were left out"):
        analysis.load(tmp_path)
    assert not (tmp_path / "marker").exists()
    problems = analysis.problems(tmp_path)
    damaged = problems[problems["status"] == "damaged"]
    assert list(damaged["run"]) == [path.parent.name]
