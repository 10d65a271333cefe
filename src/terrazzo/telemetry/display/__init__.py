"""A run's records as people read them: tables, a screen of text, a page.

tables      where the time of a step goes
console     standard output of a run
step_table  log steps as rows on a terminal
screen      a running run as a screen of text, for `terrazzo watch`
picture     seconds of a step over the course of a run, as SVG
page        `report.html`
"""
