"""The cache of a compiled function: its entries, the index that finds the entry of a call, tiers and statistics."""
