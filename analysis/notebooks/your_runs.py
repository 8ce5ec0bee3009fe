# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Bring your own runs
#
# Any folder with run folders below it will do. Put its path here, or into `ANALYSIS_RUNS`.

# %%
from analysis import notebook_files

RUNS = notebook_files.runs_folder()

# %%
import analysis
from analysis.runs.grouping import named

# Runs of one setting and one treatment differ in their seed alone; only these may be averaged.
CELL = ["setting", "treatment"]
runs = named(analysis.load(RUNS))
runs.groupby([*CELL, "step"]).size().rename("runs").to_frame()

# %% [markdown]
# What differs between the runs, so that nothing is compared by accident:

# %%
from analysis.runs import compare

compare.varying(runs)

# %% [markdown]
# Curves are read when asked for:

# %%
curves = analysis.curves(runs, columns=("loss", "time", "images_per_s"))
ends = curves.groupby([*CELL, "run"])["loss"].agg(["first", "last"])
ends.groupby(CELL).agg(["mean", "count"]).round(3)

# %% [markdown]
# Scores over training, with what they had cost:

# %%
scores = analysis.scores(runs)
scores[scores["own"]].pivot_table(
    index=[*CELL, "metric"], columns="step", values="value", aggfunc=["mean", "count"]
).round(1)

# %% [markdown]
# ## Two runs side by side

# %%
first, second = runs["path"].iloc[0], runs["path"].iloc[-1]
print(compare.text(first, second))

# %% [markdown]
# ## Samples, the same noise everywhere

# %%
analysis.figures.make("samples", runs)

# %% [markdown]
# ## Everything on one page
#
# ```bash
# python -m analysis report RUNS
# ```
