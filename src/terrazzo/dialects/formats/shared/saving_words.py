"""What is written beside the training state: a Hugging Face folder in place of one state dict."""

from __future__ import annotations

from terrazzo.dialects.core.draft import Draft

__all__ = ["write_folder"]


def write_folder(draft: Draft, key: str = "") -> None:
    """Say of an export that the target writes a folder, by `key` if that is written: it has what one state dict has."""
    more = "a Hugging Face folder has all weights" if draft.value("saving.export") == "full" else ""
    draft.holds("saving.export", more, key)
