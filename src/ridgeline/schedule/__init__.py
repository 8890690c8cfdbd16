"""Who takes part in a step, and how much each may draft."""
