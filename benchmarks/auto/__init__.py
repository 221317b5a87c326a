"""`--compression auto` beside what a user would choose by hand, on emulated hosts with real computing."""
