"""The intermediate representation: dtypes, devices, proxies, symbols, traces, and what prints, rewrites and checks
them. No torch here."""

from thunder._lazy import names_from

__getattr__, __dir__ = names_from(__name__)
