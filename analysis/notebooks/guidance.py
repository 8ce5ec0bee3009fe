# %% [markdown]
# # Is a route a kind of guidance?
#
# One explanation for the scores of routed models is implicit guidance: dense inference through a
# model that was trained on half of the tokens would overshoot what its training calibrated, much as
# classifier-free guidance does on purpose. It predicts that precision and class accuracy rise as
# recall falls, that guidance proper then changes less, and that the effective guidance scale of a
# routed model lies above that of a dense one.
#
# **The published runs show no net guidance** (`results/README.md`): recall is lower after equal
# steps, but precision and accuracy are not higher, and the effective scale of routed models lies
# below that of dense ones. They are small models after short training; `ANALYSIS_RUNS=DIR` asks
# yours the same questions.

# %%
from IPython.display import Markdown

import analysis
from analysis import findings, notebook_files
from analysis.results import Results

results = Results.of(analysis.load(notebook_files.runs_folder()))

# %% [markdown]
# ## Do precision and accuracy rise as recall falls?
#
# **What these runs show.** Routed minus dense after equal steps, paired by seed:

# %%
Markdown(findings.make("main", results))

# %% [markdown]
# ## Does guidance change a routed model less?
#
# CFG takes its weak prediction from the null class, SG from a pass of the same weights in which
# tokens skip; `routed` is that pass alone. One or two pairs of seeds for each architecture, so this
# part is exploratory.

# %%
guided = Results.of(analysis.load(notebook_files.runs_folder(records="guidance")))
analysis.figures.make("response", guided)

# %% [markdown]
# **What these runs show.** Distances under guidance, as a fraction of those without: the nearer to
# 1, the weaker the response. Under CFG compare routed with dense; a weak response to SG only says
# that the routed pass of a routed model is nearly as good as its dense one.

# %%
Markdown(findings.make("response", guided))

# %% [markdown]
# ## Is the effective guidance scale higher?
#
# w_eff is 1 where a model's conditional step is as long as the held-out images ask for, and w where
# it was guided with scale w. Read the instrumented form: an independent dense run supplies the
# direction, so that a model's own error does not pass for a scale.

# %%
analysis.figures.make("guidance_scale", results)

# %%
Markdown(findings.make("scale", results))

# %%
analysis.tables.make("guidance_scale", results)

# %% [markdown]
# ## Guidance with two selection rates
#
# The follow-up paper (arXiv 2601.01608) guides a routed model with itself, away from a pass in
# which many tokens skip. Score by the two rates; darker is better:

# %%
analysis.figures.make("guidance", guided)

# %% [markdown]
# More settings for a run of yours; tables and figures pick them up:
#
# ```bash
# python experiments/evaluate.py RUN --guidance none cfg,scale=1.5 routed,strong=0.3,weak=0.8
# python -m analysis guidance-scale RUN
# ```
