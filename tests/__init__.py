"""Tests, one folder for each folder of `thunder`."""
