# %% [markdown]
# # How many tokens should take the route?
#
# TREAD's Table 5 lets 25, 50 or 75 % of the tokens skip the blocks of one route, on DiT-B/2: half
# of them gives the lowest FID. Here is that table for these runs, beside the published numbers. A
# higher rate saves more of each step, so that the score after equal steps is half of the answer,
# and what it saves the other.

# %%
from IPython.display import Markdown

import analysis
from analysis import findings, notebook_files
from analysis.results import Results

# Rates, placements and other methods beside each other at `scale=tiny`; runs of yours take their
# place: RUNS = "my_runs", or ANALYSIS_RUNS=my_runs in the environment.
RUNS = notebook_files.runs_folder(records="ablations")
results = Results.of(RUNS)
analysis.figures.make("selection_rate", results)

# %% [markdown]
# **What these runs show.** Routed minus dense runs after equal steps, paired by seed, by the share
# of tokens that skips:

# %%
Markdown(findings.make("rate", results))

# %% [markdown]
# The same with the spread over seeds, beside the published numbers:

# %%
analysis.tables.make("selection_rate", results).only(ours=True)

# %% [markdown]
# ## What each rate saves
#
# Multiply-adds of a step, dense over routed: an upper limit of the speed-up.

# %%
analysis.tables.make("throughput", results).only(ours=True)
