"""Analysis: facts about the bound symbols of a trace that several passes ask for. It knows `thunder.core` only.

`flow` says who produces and uses values, `aliases` whose memory they are in, `lifetimes` until when, `cost` what
operations take.
"""
