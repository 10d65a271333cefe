"""Experts of the same layers that ranks share along `ep`."""
