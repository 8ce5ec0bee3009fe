"""Removed keys: ignored at their former default, refused otherwise, and still part of every hash."""

import pytest
import yaml
from analysis_runs import write
from small import small

from analysis.comparison.compare import pair
from experiments.config.compose import load
from experiments.config.removed_keys import REMOVED, former_defaults
from experiments.config.schema import Config
from experiments.options.roles import ConfigError


def with_former_defaults(values):
    groups = {key.split(".")[0] for key in REMOVED}
    return values | {group: values.get(group, {}) | former_defaults(group) for group in groups}


def test_files_and_words_with_the_former_defaults_are_the_same_run(tmp_path):
    config = small(tmp_path)
    again = Config.from_dict(with_former_defaults(config.to_dict()))
    assert again == config and again.name == config.name
    words = [f"{key}={'null' if value is None else value}" for key, value in REMOVED.items()]
    assert small(tmp_path, *words).name == config.name


@pytest.mark.parametrize("key", REMOVED)
@pytest.mark.parametrize("value", ["4-9", "true", "[3"])
def test_another_value_is_one_sentence(tmp_path, key, value):
    said = f"{key} was removed; only its former default {key}=(null|2) is accepted"
    with pytest.raises(ConfigError, match=said):
        load([f"{key}={value}"])
    values, (group, name) = small(tmp_path).to_dict(), key.split(".")
    values[group][name] = value
    with pytest.raises(ConfigError, match=said):
        Config.from_dict(values)


def test_runs_with_and_without_the_former_defaults_do_not_differ(tmp_path):
    older, newer = write(tmp_path, seed=0), write(tmp_path, seed=1)
    values = yaml.safe_load((older / "config.yaml").read_text())
    (older / "config.yaml").write_text(yaml.safe_dump(with_former_defaults(values)))
    assert [row.key for row in pair(older, newer)[0]] == ["seed"]
