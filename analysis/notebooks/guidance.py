# %% [markdown]
# # Does guidance improve routed models as much as dense ones?

# %%
RUNS = "results/guidance.tar.gz"  # or the folder of your own runs, such as "runs"

# %%
import analysis
from analysis.comparison.results import Results
from analysis.reports import notebook_files

results = Results.of(notebook_files.runs_folder(RUNS))
analysis.figures.make("guidance", results)

# %%
analysis.tables.make("guidance", results).only(ours=True)
