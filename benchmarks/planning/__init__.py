"""How far the planner is from what was measured, and from single messages; what it says of many hosts."""
