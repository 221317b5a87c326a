"""How far the planner is from what was measured, and from single messages: the tables of docs/planning.md."""
