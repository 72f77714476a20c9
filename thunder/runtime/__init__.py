"""Runtime: what compiled programs call when they run. It knows no pass."""
