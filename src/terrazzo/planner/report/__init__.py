"""What the planner found, for people and for programs: text, pictures, JSON, and the formula behind a term.

Read the modules in this order:

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

    Answer.blocks     a row of the table of memory, "gathered weights"           answer, text.terms
    Answer.report     a `TermReport` of the JSON                                 answer, convert, schema
    explained         with `memory.gathered`, its formula, and the inputs        explain, all_formulas
    Answer.chart      a share of "gathered weights, buffers" in a bar            answer, alternatives, bars
                      drawn by `show_bars`, or by `save_picture`                 terminal, picture
    save_page         the same share of every plan that a slider reaches         page, bars
"""
