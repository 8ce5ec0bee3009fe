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
from analysis import compare
from analysis.results import Results

# Runs of one group and variant differ in their seed alone; only these may be averaged.
VARIANT = ["group", "variant"]
runs = analysis.load(RUNS)
results = Results.of(runs)
print(f"{len(runs)} runs, {len(analysis.problems(RUNS))} unfinished")
runs.groupby([*VARIANT, "step"]).size().rename("runs").to_frame()

# %% [markdown]
# ## Which scores, over how many seeds?
#
# Mean and standard deviation over seeds after every number of steps, by the metric's full name
# (what was measured, on how many samples, in which features):

# %%
scores = analysis.scores(runs)
analysis.aggregate(scores).round(3)

# %% [markdown]
# Every variant minus the dense runs, paired by seed, with the ends of its 95 % interval:

# %%
analysis.paired_difference(scores).round(3)

# %% [markdown]
# **What these runs show.**

# %%
Markdown(findings.make("main", results))

# %% [markdown]
# ## How did training go?

# %%
curves = analysis.curves(runs, columns=("loss",))
ends = curves.groupby([*VARIANT, "run"])["loss"].agg(["first", "last"])
ends.groupby(VARIANT).agg(["mean", "count"]).round(3)

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
