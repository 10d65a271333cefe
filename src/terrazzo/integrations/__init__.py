"""Doors: other people's training loops, with Terrazzo's engine behind them. Each is a thin translation."""
