"""Nothing is unpickled, nothing is run, nothing listens: the source says so, and so does every reader."""

from __future__ import annotations

import ast
import subprocess
import sys
import tarfile
from pathlib import Path

import hostile
import pytest
import yaml
from data_tools import add, latents, npy

from backbones.parsing import _loader
from experiments.data.latent_store import open_store
from routing.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("routing", "backbones", "experiments", "sweeps", "analysis")

# Calls that can run what a file or a user holds, and calls that open a door.
CALLS = {
    "unpickles": "pd.read_pickle pandas.read_pickle np.lib.format.read_array",
    "shell": "os.system os.popen subprocess.getoutput subprocess.getstatusoutput pty.spawn",
    "runs text": "eval exec compile __import__ yaml.unsafe_load yaml.full_load yaml.load_all",
    "opens a socket": "socket.socket socket.create_server HTTPServer ThreadingHTTPServer http.server.HTTPServer "
    "socketserver.TCPServer asyncio.start_server",
}
METHODS = {"extractall": "leaves its folder", "extract": "leaves its folder", "listen": "listens", "bind": "listens"}
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}

# (file, what is called): why it may stand. submitit pickles the arguments of a job into the sweep's own
# logs folder and unpickles them in the job: written by us, for us; the suite itself calls no pickle there.
ALLOWED: dict[tuple[str, str], str] = {
    ("analysis/runs/archives.py", "packed.extractall"): "our own records, with tarfile's filter for data",
    ("analysis/tables/paper.py", "yaml.load"): "a file of the package, with CSafeLoader",
    ("routing/check/__init__.py", "inspect.signature(build).bind"): "compares arguments with a signature, no socket",
    ("backbones/parsing.py", "yaml.load"): "a loader made of CSafeLoader, without its numbers of base sixty",
}


def constant(call, key):
    """Return the literal that a call passes as a keyword, None if it passes none."""
    for word in call.keywords:
        if word.arg == key:
            return word.value.value if isinstance(word.value, ast.Constant) else "not a literal"
    return None


def reason_against(call):
    """Return why a call is refused, or None."""
    name = ast.unparse(call.func)
    for reason, names in CALLS.items():
        if name in names.split():
            return reason
    if isinstance(call.func, ast.Attribute) and call.func.attr in METHODS:
        return METHODS[call.func.attr]
    for key in ("shell", "allow_pickle", "trust_remote_code"):
        if constant(call, key) not in (None, False):
            return key
    if name == "torch.load" and constant(call, "weights_only") is not True:
        return "torch.load without weights_only=True"
    if name in ("np.load", "numpy.load") and constant(call, "allow_pickle") is not False:
        return "np.load without allow_pickle=False said aloud"
    return "yaml.load" if name == "yaml.load" else None


def findings(source, file="x.py"):
    """Return (file, call, line, why) for every call and import that is refused."""
    refused = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and (reason := reason_against(node)):
            refused.append((file, ast.unparse(node.func), node.lineno, reason))
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module]
            refused += [(file, module, node.lineno, "unpickles") for module in MODULES.intersection(modules)]
    return refused


def test_the_source_calls_nothing_that_runs_what_a_file_holds():
    files = [path for part in PARTS for path in sorted((ROOT / part).rglob("*.py"))]
    assert len(files) > 100
    calls = []
    for path in files:
        calls += findings(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix())
    assert [call for call in calls if call[:2] not in ALLOWED] == []
    assert {call[:2] for call in calls} == set(ALLOWED), "an exception that nothing needs any more"


REFUSED = [
    "import pickle", "from pickle import load", "torch.load(p)", "torch.load(p, weights_only=False)",
    "torch.load(p, weights_only=flag)", "np.load(p)", "np.load(p, allow_pickle=True)", "np.load(p, allow_pickle=flag)",
    "yaml.load(t, Loader=yaml.Loader)", "yaml.unsafe_load(t)", "subprocess.run(t, shell=True)", "os.system(t)", "eval(t)",
    "archive.extractall(p)", "s.listen()", "socket.socket()", "AutoModel.from_pretrained(n, trust_remote_code=True)",
]  # fmt: skip
PASSED = [
    "torch.load(p, weights_only=True)", "np.load(p, allow_pickle=False)", "yaml.safe_load(t)", "model.eval()",
    "subprocess.run(['a'])", "re.compile(t)",
]  # fmt: skip


def test_the_search_finds_what_is_refused_and_nothing_else():
    assert [line for line in REFUSED if not findings(line)] == []
    assert [line for line in PASSED if findings(line)] == []


def test_our_yaml_loader_makes_what_the_safe_one_makes():
    assert issubclass(_loader(), yaml.CSafeLoader)
    # A mapping is a dict as well, but refuses a key that appears twice.
    ours, safe = _loader().yaml_constructors, yaml.CSafeLoader.yaml_constructors
    assert {tag for tag in ours if ours[tag] is not safe.get(tag)} == {"tag:yaml.org,2002:map"}
    assert ours.keys() == safe.keys()
    assert _loader().yaml_multi_constructors == yaml.CSafeLoader.yaml_multi_constructors


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
    lines, markers = [], []
    for name in hostile.pickles(tmp_path):
        marker = tmp_path / f"marker-{name}"
        (tmp_path / name).write_bytes(hostile.pickles(marker)[name])
        load = careless[name.split("-")[0]]
        lines.append(f"p = {str(tmp_path / name)!r}\ntry:\n {load}\nexcept Exception: pass")
        markers.append(marker)
    subprocess.run([sys.executable, "-W", "ignore", "-c", "\n".join(lines)], check=True, timeout=120)
    assert [marker.name for marker in markers if not marker.exists()] == []


@pytest.mark.parametrize("name", hostile.READERS)
def test_pickles_are_refused(name, tmp_path):
    reader, marker = hostile.READERS[name], tmp_path / "marker"
    folder = tmp_path / "files"
    folder.mkdir()
    reader.make(folder)
    reader.read(folder)  # a valid input is read
    contents = {path: path.read_bytes() for path in hostile.damage_targets(folder, reader.files)}
    for path in {path.name: path for path in contents}.values():  # one of each name
        for kind, content in hostile.pickles(marker).items():
            path.write_bytes(content)
            try:
                reader.read(folder)
            except UserError as error:
                assert "\n" not in str(error).strip(), error
            assert not marker.exists(), f"{name}: {kind} in {path.name} ran"
            # Readers that set damaged files aside have moved things: each content meets whole files.
            for other, whole in contents.items():
                other.parent.mkdir(parents=True, exist_ok=True)
                other.write_bytes(whole)


@pytest.mark.parametrize("field", ["latent.npy", "cls", "latent.pickle"])
def test_pickles_inside_of_tars_are_refused(field, tmp_path):
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
