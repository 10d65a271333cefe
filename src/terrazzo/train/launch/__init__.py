"""Processes: how ranks are started, meet, stop, and fail, and what they leave behind."""
