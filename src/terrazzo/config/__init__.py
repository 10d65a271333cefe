"""Terrazzo's own configuration: its schema, how files become one, and what must not be printed of it."""
