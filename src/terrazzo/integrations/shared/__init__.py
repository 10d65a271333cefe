"""What several integrations share.

engine_setup      what an integration asks of the engine, and does to a model before it shards it
from_description  that of the neutral description of a configuration
owners            whose an optimizer is
saving            where a checkpoint of the same name lies
generation        of text, by ranks together
"""
