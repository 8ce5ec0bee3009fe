# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The paper's tables, from run folders
#
# A table of ours holds mean and standard deviation over n seeds, the metric's full name, and the
# published number beside it. `ANALYSIS_RUNS=DIR` reads your own runs; without it, a few small ones
# are trained on the spot (minutes), and their numbers mean nothing.

# %%
import analysis
from analysis import notebook_files

runs = analysis.load(notebook_files.runs_folder())
metrics = [name for name in runs.columns if name.startswith("score.")]
runs[["backbone", "size", "data", "route", "seed", "step", *metrics]]

# %% [markdown]
# `analysis.load` gives one row per finished run, every config key a typed column. What it could not
# read is listed, not fatal.

# %%
print(
    len(runs),
    "runs;",
    len(runs.attrs["unfinished"]),
    "unfinished;",
    len(runs.attrs["damaged"]),
    "damaged",
)

# %% [markdown]
# ## The headline: how much sooner is the dense run's best score reached?

# %%
from analysis.runs.cells import Study

study = Study.of(runs)
analysis.tables.make("speedup", study)

# %% [markdown]
# ## The main table, with paired differences

# %%
analysis.tables.make("main", study)

# %%
analysis.tables.make("differences", study)

# %% [markdown]
# ## What the clock shows against what the multiply-adds allow

# %%
analysis.tables.make("throughput", study)

# %% [markdown]
# ## Every table there is, and whether these runs give any of its numbers

# %%
for table in analysis.tables.make_all(study):
    what = "covered" if table.covered else "only published numbers"
    print(f"{table.name:<20} {what:<24} {table.title}")

# %% [markdown]
# The same tables as LaTeX, which compiles as it is (booktabs, siunitx):

# %%
from analysis.tables.render import latex

print(latex(analysis.tables.make("selection_rate", study)))
