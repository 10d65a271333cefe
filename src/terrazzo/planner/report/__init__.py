"""What the planner found, for people and for programs: text, pictures, JSON, and the formula behind a term."""
