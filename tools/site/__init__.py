"""The documentation site: which names the reference has, and what mkdocs is told about the pages in docs/."""
