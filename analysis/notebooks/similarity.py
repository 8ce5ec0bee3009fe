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
from analysis import figures, quick_runs
from analysis.runs import find
from analysis.similarity import Protocol, measure

protocol = Protocol(samples=16, batch=8, centred=True, per_level=True)
folders = [
    path for path in find(quick_runs.folder()) if "@" not in path.name and "_s0-" in path.name
]
maps = [measure(path, protocol) for path in folders]
figures.similarity(maps[:8])

# %%
maps[0].protocol

# %% [markdown]
# ## Centred
#
# Residual streams share a large constant part, which makes all blocks look alike. Without each
# channel's mean, and as linear CKA:

# %%
figures.similarity(maps[:8], key="centred")

# %%
figures.similarity(maps[:8], key="cka")

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
    for path in folders
    if "_none_" not in path.name
]
figures.similarity(routed[:4], key="routed")

# %%
figures.similarity(routed[:4], key="stayed")
