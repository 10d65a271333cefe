"""What is answered, and how it reads: as text, as JSON, as pictures, and the formula behind a term.

Each answer is a value with `blocks()`, its text as lines and tables. Read the modules in this order:

    words           names of setups, meshes and terms; amounts with their unit
    blocks          lines and tables, and how they are printed
    terms           memory, traffic and time as such tables
    estimates       `Estimate`: what is said of one setup
    frontier        `Frontier`: of a search what fits, ranked, and what does not, with reasons
    sizing          `Sizing`: how many devices
    schema          every field of the JSON
    convert         an `Estimate` in these fields
    all_formulas    all formulas by their keys
    explain         a term's formula, inputs and source: `--explain`
    bars            a picture of memory before it is drawn: kinds, bars, a chart
    alternatives    the same run under other strategies, for that picture
    answer          `Answer`: one estimate, or a search with its best
    bare            `BareAnswer`: of a number of parameters alone
    terminal        a chart in characters
    picture         a chart as SVG or PNG
    page            an HTML page of an answer, with sliders

The term `gathered` of an estimate's memory, by who reads it:

    Answer.blocks     a row of the table of memory, "gathered weights"           answer, estimates, terms, words
      show            rich draws it on a terminal, `plain` elsewhere             blocks
    Answer.report     a `TermReport` of the JSON                                 answer, convert, schema
    explained         with `memory.gathered`, its formula, and the inputs        explain, all_formulas
    Answer.chart      a share of "gathered weights, buffers" in a bar            answer, alternatives, bars
                      drawn by `show_bars`, or by `save_picture`                 terminal, picture
    page              the same share of every plan that a slider reaches         page, bars
"""
