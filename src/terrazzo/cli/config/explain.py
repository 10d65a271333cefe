"""`terrazzo config explain`: shows what a configuration means, with effective values."""

from __future__ import annotations

from pathlib import Path

from terrazzo.cli.config.context import reading_context
from terrazzo.cli.config.options import ContextOptions
from terrazzo.cli.config.text import cell_text, columns_text, say_report, say_verdicts
from terrazzo.cli.shared.terminal import say
from terrazzo.dialects.core.key_verdict import LOST
from terrazzo.dialects.verbs.explain import OptionRow, Page, explain, origin_words
from terrazzo.dialects.verbs.understand import understand

__all__ = ["explain_config"]


def explain_config(file: Path, dialect: str | None, options: ContextOptions, everything: bool, as_json: bool) -> None:
    """Print what a configuration means."""
    page = explain(understand(file, dialect, reading_context(options)))
    say_report(page) if as_json else _say_page(str(file), page, everything=everything)


def _say_page(file: str, page: Page, *, everything: bool) -> None:
    """Print the plan in words, then what the file sets, and with `everything` also what it does not."""
    say(f"{file}: {page.title}", "bold")
    say("\n".join(page.plan))
    in_file = [option for option in page.options if option.key]
    default = [option for option in page.options if not option.key]
    if in_file:
        say("\n" + columns_text([["option", "value", "set by", "meaning"], *map(_option_row, in_file)]))
    if everything:
        if default:
            say(f"\nby default:\n{columns_text([[row[0], row[1], row[3]] for row in map(_option_row, default)])}")
        if page.left:
            say(f"\nleft to code: {', '.join(page.left)}")
    else:
        say(f"\n{len(default)} more by default, {len(page.left)} left to code: --all lists them")
    if page.own:
        rows = [[LOST[extra.loss], extra.key, cell_text(extra.value), extra.why] for extra in page.own]
        say(f"\nonly {page.title} has these; in another dialect they are:\n" + columns_text(rows))
    if page.unsettled:
        say("\nkeys that are not taken as they stand:")
        say_verdicts(page.unsettled)


def _option_row(option: OptionRow) -> list[str]:
    open_ended = option.value is None and option.origin == "auto"
    return [option.path, "open" if open_ended else cell_text(option.value), origin_words(option), option.meaning]
