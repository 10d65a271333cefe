"""The format on paper: what a manifest says, whether it can be, how it is sealed, and which ranges a rectangle is."""
