"""Other people's configurations: read into one neutral description, and written from it.

Each folder imports from those before it in this list:

    core      what every dialect is made of
    formats   the dialects, a folder for each: DeepSpeed's JSON, Accelerate's YAML, TrainingArguments and others
    registry  all dialects, by name
    verbs     what is done with a configuration, from a file to its meaning on

A key's way through, from `{"zero_optimization": {"stage": 3}, "gradient_clipping": 0.5}` of DeepSpeed to Terrazzo's
YAML, and from there to torchtitan:

    1  verbs.understand        `documents` loads the document, and `registry.recognise` finds that it is DeepSpeed's
    2  formats.deepspeed.keys  the key's row, `Key(number(), 1.0, "largest global gradient norm; 0: no clipping")`: the
                               type of its value, DeepSpeed's default, and the meaning
    3  formats.deepspeed.read  calls `read_training`, where `reader.take("gradient_clipping")` checks the value by its
                               row, marks the key `applied`, and gives `Setting(0.5, "file", "gradient_clipping")`:
                               a value, who gave it, and by which key. It is the setting at the path `training.clip`
    4  core.reader             `finish` makes a description of all settings. A key that nobody has taken is kept as an
                               `Extra`, as its row says, or refused: each key has its `KeyVerdict`
    5  verbs.convert           asks the other dialect to write the description
    6  formats.terrazzo.write  `draft.carry("training.clip")` writes the key that `paths` has for it, `train.clip: 0.5`,
                               and gives the setting its verdict
    7  core.draft              `finish`: a setting that nobody has written is lossy, unless it asks for nothing
    8  verbs.convert           reads the written document back, and calls lossy whatever now means something else
    9  verbs.emit              the document as text

    The YAML goes the same way: `formats.terrazzo.read` takes `train.clip` as `training.clip` again, and
    `formats.torchtitan.write` writes `training.max_norm: 0.5`, since torchtitan clips at 1.0 without being told.

To add a key of a dialect: a row in its `keys`, and where it means something here, a `take` of it in its `read` modules
and what writes it in its `write` modules. A row alone marks the key as known, and says what becomes of it. That the
written document means the same is checked by reading it back; `tests/dialects/test_contract.py` asks each row.
To add a setting: its path and type in `core.sections`, then the keys of each dialect that has words for it; the others
call it lossy without being told.
To add a dialect: a folder in `formats` with a `DIALECT`, and its place in `registry`, those first that are told apart
by keys of their own.

Open to other packages:

    core, registry, verbs                            as above
    formats.accelerate.launch_environment            what integrations read besides a file
    formats.deepspeed.auto, formats.deepspeed.keys   what integrations ask of a key
"""
