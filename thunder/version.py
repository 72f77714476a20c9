"""The version of thunder."""

VERSION = "0.2.0"
