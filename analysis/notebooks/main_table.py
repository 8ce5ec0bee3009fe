# %% [markdown]
# # Does routing improve the score, and what does it save?

# %%
RUNS = "results/runs.tar.gz"  # or the folder of your own runs, such as "runs"

# %%
import analysis
from analysis.comparison.results import Results
from analysis.reports import notebook_files

results = Results.of(notebook_files.runs_folder(RUNS))
analysis.figures.make("convergence", results)

# %%
analysis.tables.make("main", results).only(ours=True)
