"""How figures are written: amounts, lines and tables of every report.

Nothing is estimated here. Read the modules in this order:

    words     names of setups, meshes and terms; amounts with their unit
    blocks    lines and tables, and how they are printed
    terms     memory, traffic and time as such tables

The bytes of gathered weights, from a term to the terminal:

    memory_blocks    a row for each term that two digits can show                                 terms
      units          GiB and GB, or MiB and MB where the sum is below 1 GiB                       words
      LABELS         "gathered" is written "gathered weights"                                     words
      ByteUnit.of    two digits in either unit, and the share of the sum                          words, terms
    TextTable        cells of text under headings                                                 blocks
    show             rich draws it on a terminal, `plain` elsewhere                               blocks
"""
