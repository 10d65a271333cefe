"""What several integrations share.

In reading order:

arguments         `TerrazzoArguments`: those of `tz.shard`, as a user of another library gives them
engine_setup      `EngineSetup`: these, what is done to a model before it is sharded, and what the loop does
honour            what a configuration asks for and is not done: it is refused, or named in a warning
from_description  the `EngineSetup` that the neutral description of a configuration comes to
first_rank        warnings and other lines of the first rank alone
owners            whose an optimizer is
checkpoints       a checkpoint saved over one of the same name, opened on all ranks, and resumed from
script_runner     a script that `python -m` of an integration runs, and the end of it
generation        of text, by ranks together
"""
