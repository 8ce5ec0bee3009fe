# %% [markdown]
# # How alike are the blocks, and does a route change it?
#
# TREAD's Fig. 4 shows that neighbouring blocks of a trained DiT are much alike, which is why a
# token can leave before one and re-enter after another. The paper does not publish how it was
# computed; the protocol here is our own and is stored with every array.

# %%
from pathlib import Path

from IPython.display import Markdown

import analysis
from analysis import figures, findings, notebook_files
from analysis.similarity import Protocol, SimilarityFile, measure, read

runs = analysis.load(notebook_files.runs_folder())
# Of published runs, some have what was measured on them and none has weights.
files = ("similarity.npz", "model.safetensors")
runs = runs[[any((Path(run) / name).is_file() for name in files) for run in runs["path"]]]
runs = runs[runs["seed"] == runs["seed"].min()].sort_values(["step", "data"], ascending=False)
routes = runs.loc[(runs["method"] == "TREAD") & (runs["rate"] == 0.5), "route"]
pair = runs[runs["route"].isin(["none", *routes.mode().head(1)])]
# The longest run of each backbone, dense and routed.
chosen = pair.drop_duplicates(["backbone", "route"]).sort_values(["backbone", "route"])


def similarity_of(run: str, route: str) -> SimilarityFile:
    """Return what is stored beside a run, else measure it."""
    file = Path(run) / "similarity.npz"
    protocol = Protocol(samples=16, batch=8, centred=True, routed=route != "none")
    return read(file) if file.is_file() else measure(run, protocol)


maps = [similarity_of(run.path, run.route) for run in chosen.itertuples()]
figures.similarity(maps)

# %% [markdown]
# **What these runs show.**

# %%
Markdown(findings.text(findings.similarity(maps)))

# %%
print(maps[0].protocol_line())

# %% [markdown]
# ## Is that more than a shared mean?
#
# Residual streams share a large constant part, which makes all blocks look alike. Without each
# channel's mean:

# %%
figures.similarity(maps, key="centred")

# %%
Markdown(findings.text(findings.similarity(maps, key="centred")))

# %% [markdown]
# ## Do the blocks after the route tell the tokens apart?
#
# In the routed pass a token that skips keeps the state it had before the route, so that its
# similarity inside the frame is one; what matters is how the blocks after the route find it, beside
# those that stayed:

# %%
routed = [item for item in maps if "routed" in item.arrays and item.route != "none"]
figures.similarity(routed, key="routed")

# %%
figures.similarity(routed, key="stayed")

# %%
Markdown(findings.text(findings.similarity(routed, key="stayed")))
