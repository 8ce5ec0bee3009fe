"""`--help` of the main command, printed from the options' own declarations."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

import yaml

from backbones.validation import check_choice, fields_of, show
from experiments.config import groups
from experiments.config.groups import CONF, GROUPS
from experiments.config.run_options import RunOptions
from experiments.options.roles import config_defaults
from experiments.options.training import PathsOptions, TrainOptions
from experiments.runtime.nested import flatten
from routing.options import RoutingOptions

HEAD = """\
Train a diffusion model with token routing (TREAD), draw samples, score them.

  python experiments/run.py backbone=mamba route=2-8   minutes on a laptop
  python experiments/run.py backbone=rwkv route=2-8@0.75 scale=small
  python experiments/run.py backbone=dit size=XL/2 route=auto scale=paper \\
      data.path=LATENTS

Re-running a command resumes an interrupted run, or reports that it has
finished. --dry-run or dry=true prints model, cost and run folder only.
"""

ROUTES = """\
A route is a range of blocks, counted from 0, both ends included. In training,
a random part of the tokens skips these blocks; inference is dense.
  none            no route
  2-8             half of the tokens skip blocks 2 to 8
  2-8@0.75        three quarters skip them
  auto            2--4, the paper's guideline
  2--4            from block 2 to the fourth from the end
  '0-4+6-9'       two routes, one after the other
  2-8/0.9:none    another route from a share of the steps on: here dense for the
                  last tenth
"""

AFTER = """\
Other commands, each with --help:
  experiments/sample.py     images from a run or an exported file
  experiments/evaluate.py   scores of any checkpoint
  experiments/export.py     weights as one small file
  experiments/prepare.py    images to latents
  experiments/bench.py      speed of this machine
  python -m sweeps          many runs, on Slurm or here
  python -m analysis        tables, figures and a report from run folders
"""

#: Sections of keys that belong to no group.
SECTIONS: Mapping[str, tuple[str, type]] = {
    "route": ("routing", RoutingOptions),
    "train": ("train", TrainOptions),
    "paths": ("paths", PathsOptions),
}
DEFAULTS_NOTE = "Keys with their defaults (a scale or an experiment may set others):"


def help_text(topic: str = "") -> str:
    """Return the help: an overview, a section, one entry of a group (`data=digits`), or all.

    A backbone's name alone (`mamba`) means its entry.

    Raises:
        ConfigError: There is no such topic.
    """
    name, _, entry = topic.partition("=")
    if name in GROUPS and entry:
        check_choice(entry, groups.names(name), f"--help {name}")
        return _entry_text(name, entry)
    backbones = groups.names("backbone")
    if topic in backbones:
        return _entry_text("backbone", topic)
    name = name.split(".")[0]
    if name in SECTIONS:
        return _section_text(name)
    if name in GROUPS:
        return "\n".join(_entry_text(name, entry) for entry in groups.names(name))
    if topic == "all":
        return "\n".join([overview(), *(_section_text(section) for section in SECTIONS)])
    if topic and "=" not in topic:
        check_choice(topic, [*SECTIONS, *GROUPS, *backbones, "all"], "--help")
    return overview()


def overview() -> str:
    """Return what fits on a screen or two: examples, groups, the first keys, sections."""
    lines = [
        HEAD,
        "Groups, set as group=name (--help data and --help data=digits list their keys):",
    ]
    for group in GROUPS:
        line = f"  {group + '=':<12}{' | '.join(groups.names(group))}"
        lines.append(textwrap.fill(line, 80, subsequent_indent=" " * 14))
    lines += ["", DEFAULTS_NOTE]
    for name, field in fields_of(RunOptions).items():
        if name not in GROUPS and name not in ("routing", "train", "paths"):
            lines += _option_lines(name, field.default, field.comment)
    lines += [
        "",
        "More keys: --help route, --help train, --help paths, or all: --help all",
        "",
        AFTER,
    ]
    return "\n".join(lines)


def _preset(group: str, name: str) -> dict[str, Any]:
    """Return the values of a YAML preset."""
    return yaml.safe_load((CONF / group / f"{name}.yaml").read_text()) or {}


def _section_text(section: str) -> str:
    prefix, options = SECTIONS[section]
    lines = [ROUTES] if section == "route" else []
    lines.append(DEFAULTS_NOTE)
    default_scale = fields_of(RunOptions)["scale"].default
    changed = flatten(_preset("scale", default_scale).get(prefix, {}))
    if changed:
        values = " ".join(f"{prefix}.{key}={show(value)}" for key, value in changed.items())
        text = f"scale={default_scale}, the default, sets {values}"
        lines += textwrap.wrap(text, 78, initial_indent="  ", subsequent_indent="  ")
    lines += _options_lines(options, f"{prefix}.")
    return "\n".join([*lines, ""])


def _entry_text(group: str, name: str) -> str:
    """Return the keys of one entry of a group, with comments."""
    lines = [f"{group}={name}"]
    if group in groups.PRESETS:
        text = (CONF / group / f"{name}.yaml").read_text()
        about = [line[2:] for line in text.splitlines() if line[:2] == "# " and "@" not in line]
        lines += textwrap.wrap(" ".join(about), 80, initial_indent="  ", subsequent_indent="  ")
        values = _preset(group, name)
        for base in values.pop("defaults", ()):
            lines.append(f"  from {_base_text(base)}")
        for key, value in flatten(values).items():
            if key != "name":
                lines.append(f"    {key}={show(value)}")
        return "\n".join([*lines, ""])
    for options in groups.option_classes(group, name):
        if group != "backbone" or options.__name__ != "SharedBackboneOptions":
            summary = (options.__doc__ or "").split("\n\n")[0]
            lines += textwrap.wrap(
                " ".join(summary.split()), 80, initial_indent="  ", subsequent_indent="  "
            )
        lines += _options_lines(options, f"{group}.", leave_out=("name",))
    return "\n".join([*lines, ""])


def _base_text(base: Any) -> str:
    if isinstance(base, Mapping):
        return ", ".join(f"{key.removeprefix('override /')}={value}" for key, value in base.items())
    return str(base)


def _options_lines(options: type, prefix: str, leave_out: tuple[str, ...] = ()) -> list[str]:
    lines = []
    defaults = config_defaults(options)
    for name, field in fields_of(options).items():
        if name not in leave_out:
            lines += _option_lines(f"{prefix}{name}", defaults[name], field.comment)
    return lines


def _option_lines(key: str, default: Any, comment: str) -> list[str]:
    lines = [f"  {key}={show(default)}"]
    if comment:
        lines += textwrap.wrap(
            comment, 80, initial_indent=" " * 6, subsequent_indent=" " * 6, break_on_hyphens=False
        )
    return lines
