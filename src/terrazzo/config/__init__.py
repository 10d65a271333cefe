"""Terrazzo's own configuration: its schema, how files become one, and what must not be printed of it.

Open to other packages:

    arguments, files   any configuration's file as plain data, for those who read other libraries'

In reading order:

    section    what every section is
    rank_range `launch.ranks: 2:4`, which is no number
    sections   the sections, each in the module of its name
    schema     the whole tree of settings, and what sections say together
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
    from terrazzo.config.reading import CheckedKeys, check_keys, config_from_dict, flatten, load_config
    from terrazzo.config.schema import Config
    from terrazzo.config.secrets import without_passwords
    from terrazzo.config.section import Section
    from terrazzo.config.sections.batch import BatchConfig
    from terrazzo.config.sections.data import DataConfig
    from terrazzo.config.sections.launch import LaunchConfig
    from terrazzo.config.sections.lora import LoraConfig
    from terrazzo.config.sections.objective import ObjectiveConfig, ObjectiveKind
    from terrazzo.config.sections.offload import OffloadConfig, tier_text
    from terrazzo.config.sections.optimizer import MuonConfig, OptimizerConfig
    from terrazzo.config.sections.plan import MeshConfig, PlanConfig
    from terrazzo.config.sections.schedule import ScheduleConfig
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
