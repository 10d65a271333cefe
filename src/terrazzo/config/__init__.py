"""Terrazzo's own configuration: its schema, how files become one, and what must not be printed of it.

Open to other packages:

    arguments, files   any configuration's file as plain data, for those who read other libraries'

In reading order:

    schema     the whole tree of settings
    section    what every section is
    task       model, adapters, data and objective
    attention  how far the tokens of the built-in decoder see
    experts    the built-in decoder's mixture of experts
    axes       tensor, context and pipeline parallelism
    precision  every dtype of a run
    optimizer  what updates the weights
    guard      what is done about a step that is not like those before it
    running    how a run is saved, how its ranks start, what it writes
    keys       the schema key by key
    secrets    passwords in URLs, which are not printed
    arguments  arguments in a shell script, which is not run
    files      a file as plain data
    reading    a file, then overrides, then validation
"""

from typing import TYPE_CHECKING

from terrazzo.lazy import lazily

if TYPE_CHECKING:
    from terrazzo.config.keys import KEYS, keys_meant
    from terrazzo.config.optimizer import MuonConfig, OptimizerConfig
    from terrazzo.config.reading import CheckedKeys, check_keys, config_from_dict, flatten, load_config
    from terrazzo.config.running import LaunchConfig
    from terrazzo.config.schema import (
        BatchConfig,
        Config,
        MeshConfig,
        OffloadConfig,
        PlanConfig,
        ScheduleConfig,
        tier_text,
    )
    from terrazzo.config.secrets import without_passwords
    from terrazzo.config.section import Section
    from terrazzo.config.task import DataConfig, LoraConfig, ObjectiveConfig, ObjectiveKind
else:
    __getattr__ = lazily(__name__)

__all__ = [
    "KEYS",
    "BatchConfig",
    "CheckedKeys",
    "Config",
    "DataConfig",
    "LaunchConfig",
    "LoraConfig",
    "MeshConfig",
    "MuonConfig",
    "ObjectiveConfig",
    "ObjectiveKind",
    "OffloadConfig",
    "OptimizerConfig",
    "PlanConfig",
    "ScheduleConfig",
    "Section",
    "check_keys",
    "config_from_dict",
    "flatten",
    "keys_meant",
    "load_config",
    "tier_text",
    "without_passwords",
]
