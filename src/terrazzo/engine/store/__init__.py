"""Tiers: where states rest that are not on the device. Read settings, host, disk, store, in that order."""
