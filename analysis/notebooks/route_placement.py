# %% [markdown]
# # Where should a route start and end?
#
# TREAD's Fig. 8 tries sixteen routes on DiT-B/2: there long ones help, as long as they leave the
# first and the last blocks alone, and `2-8` of twelve blocks has the lowest FID. Here is that
# figure for these runs, beside the published numbers. In the published runs no route beats dense
# after equal steps (`results/README.md`).

# %%
from IPython.display import Markdown

import analysis
from analysis import findings, notebook_files
from analysis.results import Results
from analysis.tables import paper

# Four routes on Mamba and RWKV, three seeds or more; runs of yours take their place.
results = Results.of(analysis.load(notebook_files.runs_folder(records="placement")))
analysis.figures.make("route_placement", results)

# %% [markdown]
# **What these runs show.**

# %%
Markdown(findings.make("placement", results))

# %%
analysis.tables.make("route_placement", results).only(ours=True)

# %% [markdown]
# ## All sixteen routes
#
# On DiT, one seed each: sixteen comparisons without a spread. Read the trend, not the winner.

# %%
every = Results.of(analysis.load(notebook_files.runs_folder(records="fig8")))
analysis.figures.make("route_placement", every)

# %%
Markdown(findings.make("placement", every))

# %% [markdown]
# ## What each route saves
#
# A longer route saves more of a step, which is the other half of the question. Blocks inside it see
# half of the tokens and cost about half; the attention of a DiT saves more, since it is quadratic
# in the tokens.

# %%
analysis.tables.make("throughput", every).only(ours=True)

# %%
print(paper.citation("placement"))
paper.table("placement").sort_values("fid").head()

# %% [markdown]
# ## What does a scan see inside the route?
#
# Mamba and RWKV walk over the tokens in an order. Inside the route they walk the same path with
# the absent tokens left out, so that order is kept:

# %%
analysis.figures.scan_paths()

# %%
analysis.figures.selections()
