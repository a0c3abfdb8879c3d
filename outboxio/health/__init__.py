"""Health checks: facts, rules, the overview for operators, and the health of a process for probes."""
