# %% [markdown]
# # Which blocks should routed tokens skip?

# %%
RUNS = "results/placement.tar.gz"  # or the folder of your own runs, such as "runs"

# %%
import analysis
from analysis.comparison.results import Results
from analysis.reports import notebook_files

results = Results.of(notebook_files.runs_folder(RUNS))
analysis.figures.make("route_placement", results)

# %%
analysis.tables.make("route_placement", results).only(ours=True)
