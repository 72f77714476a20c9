"""The parts of `thunder.verify`: comparisons and their report, the rule, reference programs, one step."""
