"""What is known of a model: its tensors in sharding units, from a preset, a config.json, a module or a bare count.

All ways end in a `ModelShape`, and the rest of the planner is arithmetic on that. Read the modules in this order:

    shapes          `TensorShape`, `BlockShape`, `UnitShape`, `ModelShape`
    rows            the words in which a family's tensors are declared
    decoder_family  the built-in decoder in these words
    families        the families in these words, a table
    fields          a config's fields under a family's names, checked
    closed_form     config and family to shape: nothing is built
    presets         the fields of well-known models
    adapters        the shape of a model of which not all is trained
    modules         the shape of modules that exist, on any device
    transformers    the shape of a config without a closed form, by another process
    meta            the program of that process
    loading         the way in: `model_shape`

The width of an MLP, of `model_shape("llama3-8b")`:

    model_shape                        a name, so a preset                                       loading
      PRESETS["llama3-8b"]             {"intermediate_size": 14336, ...}, a config's fields      presets
      shape_of_config                  the family is known in closed form                        closed_form, families
        Fields                         `ffn` is `intermediate_size` in this family               fields
        TensorRow                      gate_proj is declared as ("ffn", "hidden")                rows, families
        TensorShape                    mlp.gate_proj.weight, (14336, 4096), a matrix             shapes
        merged                         32 equal layers are one `UnitShape` with a count          closed_form
      ModelShape                       what memory, traffic and timing are computed from         shapes
"""
