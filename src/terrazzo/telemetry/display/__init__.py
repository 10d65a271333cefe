"""A run's records as what one reads: a verdict, tables, a screen of text, a page.

bounds      what may bound a step, and the words for each
tables      where the time of a step goes
edits       the edit that would help against what bounds a step
verdict     what bounds it, with that edit
console     standard output of a run
step_table  log steps as rows of a terminal
screen      a run that goes on, as a screen of text
picture     seconds of a step over a run
page        `report.html`
"""
