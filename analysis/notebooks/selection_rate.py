# %% [markdown]
# # How many tokens should take the route?

# %%
RUNS = "results/ablations.tar.gz"  # or the folder of your own runs, such as "runs"

# %%
import analysis
from analysis.comparison.results import Results
from analysis.reports import notebook_files

results = Results.of(notebook_files.runs_folder(RUNS))
analysis.figures.make("selection_rate", results)

# %%
analysis.tables.make("selection_rate", results).only(ours=True)
