"""Programs that cannot be captured whole."""
