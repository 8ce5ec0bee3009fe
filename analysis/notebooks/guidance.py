# %% [markdown]
# # Is a route a kind of guidance?
#
# Dense inference through a model that was trained on half of the tokens overshoots what its
# training calibrated, much as classifier-free guidance does on purpose: precision and class
# accuracy rise, recall falls, and the model answers less to guidance proper. Two meters show how
# much of that there is in a run: its response to guidance, and the effective guidance scale.

# %%
from IPython.display import Markdown

import analysis
from analysis import findings, notebook_files
from analysis.runs.cells import Study

study = Study.of(analysis.load(notebook_files.runs_folder()))
analysis.figures.make("response", study)

# %% [markdown]
# **What these runs show.** Distances under guidance, as a fraction of those without: the nearer to
# 1, the weaker the response.

# %%
Markdown(findings.make("response", study))

# %% [markdown]
# ## The effective guidance scale
#
# w_eff is 1 where a model's conditional step is as long as the held-out images ask for, and w where
# it was guided with scale w. Read the instrumented form: an independent dense run supplies the
# direction, so that a model's own error does not pass for a scale.

# %%
analysis.figures.make("guidance_scale", study)

# %%
Markdown(findings.make("scale", study))

# %%
analysis.tables.make("guidance_scale", study)

# %% [markdown]
# ## Guidance with two selection rates
#
# The follow-up paper (arXiv 2601.01608) guides a routed model with itself, away from a pass in
# which many tokens skip. Score by the two rates; the dark end is the better one:

# %%
analysis.figures.make("guidance", study)

# %% [markdown]
# More settings for a run of yours; tables and figures pick them up:
#
# ```bash
# python experiments/evaluate.py RUN --guidance none cfg,scale=1.5 routed,strong=0.3,weak=0.8
# python -m analysis guidance-scale RUN
# ```
