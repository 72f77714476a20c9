"""`thunder.executors.apex_entropyex`: where the apex executor stood before it had more than one operation."""

from thunder.executors.apexex import apex_ex

__all__ = ["apex_ex"]
