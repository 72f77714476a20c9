"""The executors that come with thunder: one file each."""

from thunder._lazy import names_from

__getattr__, __dir__ = names_from(__name__)
