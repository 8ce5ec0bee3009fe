# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Where should the route start and end?
#
# TREAD's Fig. 8 tries sixteen routes on DiT-B/2: long ones help, as long as they leave the first
# and the last blocks alone; `2-8` of twelve blocks is the best. Here is that figure, with your runs
# beside it.

# %%
import analysis
from analysis import notebook_files
from analysis.runs.cells import Study
from analysis.tables import paper

study = Study.of(analysis.load(notebook_files.runs_folder()))
analysis.figures.make("route_placement", study)

# %%
analysis.tables.make("route_placement", study)

# %% [markdown]
# The published numbers alone, with where they stand:

# %%
print(paper.citation("placement"))
paper.table("placement").sort_values("fid").head()

# %% [markdown]
# ## Convergence: steps, multiply-adds, time

# %%
analysis.figures.make("convergence", study)

# %% [markdown]
# ## What the route saves, block by block

# %%
analysis.figures.make("cost", study)

# %% [markdown]
# ## Which tokens stay, and in which order a scan walks them
#
# A block inside the route walks the same path with the missing tokens left out: scan order is kept.

# %%
analysis.figures.selections()

# %%
analysis.figures.scan_paths()
