"""Models that the documents and the tests use."""
