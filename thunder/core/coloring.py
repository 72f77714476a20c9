"""Colours of Python text, for terminals and for notebooks."""

from __future__ import annotations

import html
import re
from collections.abc import Callable

_TOKENS = re.compile(
    r"""(?P<comment>\#.*)
    | (?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
    | (?P<keyword>@[\w.]+|\b(?:def|return|import|from|as|del|if|for|in|and|or|not|raise|None|True|False)\b)
    | (?P<number>(?<![\w.])\d[\w.]*(?:(?<=e)-\d+)?)""",
    re.VERBOSE,
)
_ANSI = {"comment": "\033[90m", "string": "\033[32m", "keyword": "\033[34m", "number": "\033[36m"}
_CSS = {"comment": "#8a8a8a", "string": "#1a7f37", "keyword": "#0550ae", "number": "#953800"}


def for_terminal(text: str) -> str:
    """Python text with ANSI colours."""
    return _colored(text, lambda kind, token: f"{_ANSI[kind]}{token}\033[0m", str)


def for_html(text: str) -> str:
    """Python text as an HTML element."""
    spans = _colored(
        text, lambda kind, token: f'<span style="color:{_CSS[kind]}">{html.escape(token)}</span>', html.escape
    )
    return f'<pre style="line-height:1.3">{spans}</pre>'


def _colored(text: str, style: Callable[[str, str], str], plain: Callable[[str], str]) -> str:
    pieces, end = [], 0
    for token in _TOKENS.finditer(text):
        pieces += [plain(text[end : token.start()]), style(str(token.lastgroup), token[0])]
        end = token.end()
    return "".join([*pieces, plain(text[end:])])
