"""Other people's configurations: read into one neutral description, and written from it."""
