# %% [markdown]
# # Does routing half of the tokens cost or gain, and what?
#
# Dense and routed runs of the same seed start from the same weights and see the same images with
# the same noise, so that their scores are compared seed by seed. These are the runs of `results/`;
# `ANALYSIS_RUNS=DIR` puts yours in their place, and every sentence below is made anew from them.

# %%
from IPython.display import Markdown

import analysis
from analysis import findings, notebook_files
from analysis.results import Results

results = Results.of(analysis.load(notebook_files.runs_folder()))
main = analysis.tables.make("main", results)
# Settings whose differences three seeds or more give; the others where there is none.
answer = analysis.tables.answer(main)
answer if answer.rows else main.only(ours=True)

# %% [markdown]
# **What these runs show.** A difference counts where its interval over seeds leaves zero out:

# %%
Markdown(findings.make("main", results))

# %% [markdown]
# ## What is paid for that
#
# A routed step does fewer multiply-adds. Whether that pays is a question of scores at equal cost,
# not at equal steps. How long training took is not compared: these runs shared busy machines, and
# `experiments/bench.py` measures the speed of steps.

# %%
Markdown(findings.make("cost", results))

# %%
analysis.figures.make("overview", results)

# %%
analysis.tables.make("speedup", results).only(ours=True)

# %% [markdown]
# ## Every table that these runs give
#
# `python -m analysis tables RUNS --out DIR` writes each as Markdown, CSV, HTML and LaTeX.

# %%
import pandas as pd

found = analysis.tables.make_all(results)
pd.DataFrame(
    [(table.name, table.title, len(table.rows)) for table in found if table.covered],
    columns=["name", "title", "rows"],
)
