# %% [markdown]
# # Does routing make the blocks that tokens skip more alike?

# %%
RUNS = "results/runs.tar.gz"  # or the folder of your own runs, such as "runs"

# %%
import analysis
from analysis.measurements import similarity
from analysis.reports import notebook_files

runs = analysis.load(notebook_files.runs_folder(RUNS))
maps = similarity.pairs(runs, similarity.Protocol(samples=16, batch=8))
analysis.figures.similarity(maps)
