# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # How alike are the blocks?
#
# TREAD's Fig. 4 shows the cosine similarity of block outputs without a route and with two of them.
# The paper does not publish how it was computed; the protocol here is our own and is stored with
# every array: averaged weights, eval mode, all tokens, held-out samples, a fixed grid of noise
# levels, cosine per token over channels, averaged.

# %%
import analysis
from analysis import figures, notebook_files
from analysis.similarity import Protocol, measure

runs = analysis.load(notebook_files.runs_folder())
runs = runs[runs["seed"] == runs["seed"].min()].sort_values("step", ascending=False)
routes = runs.loc[(runs["variant"] == "TREAD") & (runs["rate"] == 0.5), "route"]
pair = runs[runs["route"].isin(["none", *routes.mode().head(1)])]
# The longest run of each backbone, dense and routed.
chosen = pair.drop_duplicates(["backbone", "route"]).sort_values(["backbone", "route"])
chosen[["backbone", "size", "data", "route", "seed", "step"]]

# %%
protocol = Protocol(samples=16, batch=8, centred=True, per_level=True)
maps = [measure(path, protocol) for path in chosen["path"]]
figures.similarity(maps)

# %%
maps[0].protocol

# %% [markdown]
# ## Centred
#
# Residual streams share a large constant part, which makes all blocks look alike. Without each
# channel's mean, and as linear CKA:

# %%
figures.similarity(maps, key="centred")

# %%
figures.similarity(maps, key="cka")

# %% [markdown]
# ## By noise level

# %%
import pandas as pd

levels = protocol.levels
pd.DataFrame(
    {item.label: [float(level[0, -1]) for level in item.arrays["per_level"]] for item in maps},
    index=pd.Index(levels, name="sigma / alpha over the data's std"),
).round(3)

# %% [markdown]
# ## Tokens that took the route against those that stayed
#
# In the routed pass a token that skips keeps the state it had before the route, so that its
# similarity inside the frame is one; what matters is how the blocks after the route find both.

# %%
routed = [
    measure(path, Protocol(samples=16, batch=8, routed=True))
    for path in chosen.loc[chosen["route"] != "none", "path"]
]
figures.similarity(routed, key="routed")

# %%
figures.similarity(routed, key="stayed")
