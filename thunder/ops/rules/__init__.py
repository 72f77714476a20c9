"""What the passes and executors above `thunder.ops` ask of operations: a module of rule tables for each subject.

Families of operations fill the tables. What `thunder.analysis` asks stands there (`analysis.cost`, `analysis.aliases`).
"""
