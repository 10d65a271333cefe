"""A run's records as people read them: a verdict, tables, a screen of text, a page.

bounds      what may bound a step, and the words for each
tables      where the time of a step goes
edits       the edit that helps against each bound
verdict     what bounds the step, with that edit
console     standard output of a run
step_table  log steps as rows on a terminal
screen      a running run as a screen of text, for `terrazzo watch`
picture     seconds of a step over the course of a run, as SVG
page        `report.html`
"""
