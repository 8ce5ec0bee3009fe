# %% [markdown]
# # Where should a route start and end?
#
# TREAD's Fig. 8 tries sixteen routes on DiT-B/2: long ones help, as long as they leave the first
# and the last blocks alone; `2-8` of twelve blocks is the best. Here is that figure, with these
# runs beside the published numbers.

# %%
from IPython.display import Markdown

import analysis
from analysis import findings, notebook_files
from analysis.runs.cells import Study
from analysis.tables import paper

study = Study.of(analysis.load(notebook_files.runs_folder()))
analysis.figures.make("route_placement", study)

# %% [markdown]
# **What these runs show.** Sixteen routes are sixteen comparisons: read the trend, not the winner.

# %%
Markdown(findings.make("placement", study))

# %%
analysis.tables.make("route_placement", study)

# %% [markdown]
# ## What each block saves
#
# A longer route saves more of a step, which is the other half of the question:

# %%
analysis.figures.make("cost", study)

# %% [markdown]
# **What this shows.** Blocks inside the route see half of the tokens and cost about half; the
# attention of a DiT saves more, since it is quadratic in the tokens.

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
