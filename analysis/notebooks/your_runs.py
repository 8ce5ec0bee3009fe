# %% [markdown]
# # What do your own runs show?
#
# Any folder with run folders below it will do: `ANALYSIS_RUNS=DIR`, or its path here.

# %%
from IPython.display import Markdown

from analysis import findings, notebook_files

RUNS = notebook_files.runs_folder()

# %%
import analysis
from analysis.runs import compare
from analysis.runs.cells import Study
from analysis.runs.grouping import named

# Runs of one setting and one treatment differ in their seed alone; only these may be averaged.
CELL = ["setting", "treatment"]
runs = named(analysis.load(RUNS))
study = Study.of(runs)
print(f"{len(runs)} runs, {len(runs.attrs['unfinished'])} unfinished")
runs.groupby([*CELL, "step"]).size().rename("runs").to_frame()

# %% [markdown]
# ## Which scores, over how many seeds?
#
# Mean and standard deviation of the runs' last scores, by the metric's full name (what was
# measured, on how many samples, in which features):

# %%
scores = analysis.scores(runs)
own = scores[scores["own"]].sort_values("step").drop_duplicates(["run", "metric"], keep="last")
own.groupby([*CELL, "metric"])["value"].agg(["mean", "std", "count"]).round(3)

# %% [markdown]
# **What these runs show.**

# %%
Markdown(findings.make("main", study))

# %% [markdown]
# ## How did training go?

# %%
curves = analysis.curves(runs, columns=("loss",))
ends = curves.groupby([*CELL, "run"])["loss"].agg(["first", "last"])
ends.groupby(CELL).agg(["mean", "count"]).round(3)

# %% [markdown]
# ## What differs between them?
#
# So that nothing is compared by accident:

# %%
compare.varying(runs)

# %%
first, second = runs["path"].iloc[0], runs["path"].iloc[-1]
print(compare.text(first, second))

# %% [markdown]
# ## What do their samples look like?
#
# The same noise and the same classes everywhere:

# %%
analysis.figures.make("samples", runs)

# %% [markdown]
# Everything on one page: `python -m analysis report RUNS`.
