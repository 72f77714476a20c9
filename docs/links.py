"""A hook of mkdocs: links to files of the repository lead there, or are plain text where mkdocs.yml names none."""

import re
from posixpath import normpath


def on_page_markdown(markdown, page, config, files):
    def linked(found):
        text, target = found[1], normpath(f"docs/{found[2]}")
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{target})" if config.repo_url else text

    return re.sub(r"\[([^\]]*)\]\((\.\./[^)]*)\)", linked, markdown)
