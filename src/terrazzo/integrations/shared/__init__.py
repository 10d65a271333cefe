"""What several integrations share.

engine_setup      `EngineSetup`: what an integration asks of the engine, and what it does to a model before sharding
from_description  the `EngineSetup` that the neutral description of a configuration comes to
honour            what a configuration asks for and is not done: refused, or named in a warning
first_rank        warnings and other lines of the first rank alone
owners            whose an optimizer is
saving            where a checkpoint of the same name lies
generation        of text, by ranks together
"""
