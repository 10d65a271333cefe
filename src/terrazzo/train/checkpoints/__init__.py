"""What a run saves, keeps, goes on from, and exports at its end."""
