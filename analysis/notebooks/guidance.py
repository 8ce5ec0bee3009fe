# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Guidance with two selection rates
#
# The follow-up paper guides a routed model with itself: a pass in which few tokens skip is pushed
# away from one in which many do, both conditional, the same weights. It can cost less than no
# guidance at all.

# %%
import analysis
from analysis import notebook_files
from analysis.runs.cells import Study
from analysis.tables import paper

study = Study.of(analysis.load(notebook_files.runs_folder()))
analysis.tables.make("guidance", study)

# %% [markdown]
# Score by the two rates (bold is the best; a cross was not scored):

# %%
analysis.figures.make("guidance", study)

# %% [markdown]
# ## The published numbers

# %%
paper.table("guidance")[["method", "fid", "gmacs"]]

# %%
paper.table("guidance_over_training").pivot(index="method", columns="steps_m", values="fid")

# %% [markdown]
# More settings for a run of yours, one line each; the table and the map pick them up:
#
# ```bash
# python experiments/evaluate.py RUN --guidance none cfg,scale=1.5 routed,strong=0.3,weak=0.8
# ```
