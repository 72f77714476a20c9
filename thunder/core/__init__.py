"""The intermediate representation: dtypes, devices, proxies, symbols, traces, and what prints, rewrites and checks them. No torch here."""
