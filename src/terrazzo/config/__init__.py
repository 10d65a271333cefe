"""Terrazzo's own configuration: its schema, how files become one, and what must not be printed of it.

An override `a.b=3` is put into what `reading` has read of the file, as YAML has it: `3` is a number there. The field
`b` of the section `a` then says what that may be, and pydantic turns it into its type.

In reading order:

    section        what every section is
    sections       the sections, each in the module of its name
    section_rules  what sections say together
    schema         the whole tree of settings
    keys           the schema key by key
    secrets        passwords in URLs, which are not printed
    wording        errors of the validation in plain words
    reading        a file, then overrides, then validation

To add a key:

1. In the section's module in `sections`, a field with its default and its meaning, from which follow what a file or an
   override may say, the wording of errors, and the reference page. What cannot be beside it in its section is said in
   the section's `_disagreements`, and what cannot be in others in a function of `section_rules`. A key that needs a
   switch of its own section is refused there without it.
2. In `train.settings`, or where the trainer reads the section, what a run makes of it. Where a setting of another
   section has it do nothing, which may be meant, a rule in `train.preflight.idle_keys`; where both cannot be, a
   check in `train.preflight`: in `refusals` if it needs no file and no device, as `terrazzo config check` asks it too.
3. In `dialects.formats.terrazzo`, for a neutral setting, a row in `paths`, or code in `read` and `write` where a row
   does not do. Other keys are carried over as they are; `read` has what a conversion to another library says of them.
4. In `tests/dialects/test_terrazzo.py`, a value that is not the default, and what the key needs beside it.
5. `python -m tools.reference_pages` gives it its row in docs/reference/train-config.md.
"""

from typing import TYPE_CHECKING

from terrazzo.lazy import lazily

if TYPE_CHECKING:
    from terrazzo.config.keys import CONFIG_KEYS, SHORTHANDS, keys_meant
    from terrazzo.config.reading import (
        CheckedKeys,
        apply_override,
        check_keys,
        config_from_dict,
        config_problems,
        load_config,
        setting_texts,
    )
    from terrazzo.config.schema import Config
    from terrazzo.config.secrets import without_passwords
    from terrazzo.config.section import Section
    from terrazzo.config.sections.batch import BatchConfig
    from terrazzo.config.sections.data import DataConfig
    from terrazzo.config.sections.launch import LaunchConfig, is_rank_range
    from terrazzo.config.sections.lora import LoraConfig
    from terrazzo.config.sections.model import ModelConfig, head_faults
    from terrazzo.config.sections.objective import ObjectiveConfig, ObjectiveKind
    from terrazzo.config.sections.offload import OffloadConfig, tier_text
    from terrazzo.config.sections.optimizer import MuonConfig, OptimizerConfig
    from terrazzo.config.sections.plan import MeshConfig, PlanConfig
    from terrazzo.config.sections.schedule import ScheduleConfig
else:
    __getattr__, __dir__ = lazily(__name__)

__all__ = [
    "CONFIG_KEYS",
    "SHORTHANDS",
    "BatchConfig",
    "CheckedKeys",
    "Config",
    "DataConfig",
    "LaunchConfig",
    "LoraConfig",
    "MeshConfig",
    "ModelConfig",
    "MuonConfig",
    "ObjectiveConfig",
    "ObjectiveKind",
    "OffloadConfig",
    "OptimizerConfig",
    "PlanConfig",
    "ScheduleConfig",
    "Section",
    "apply_override",
    "check_keys",
    "config_from_dict",
    "config_problems",
    "head_faults",
    "is_rank_range",
    "keys_meant",
    "load_config",
    "setting_texts",
    "tier_text",
    "without_passwords",
]
