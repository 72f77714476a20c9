"""A hook of mkdocs: links to files of the repository lead there, or are plain text where mkdocs.yml names none."""

import re
from posixpath import dirname, join, normpath


def on_page_markdown(markdown, page, config, files):
    def linked(found):
        text, target = found[1], normpath(join("docs", dirname(page.file.src_uri), found[2]))
        if target.startswith("docs/") and target.endswith((".md", ".svg", ".png")):
            return found[0]
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{target})" if config.repo_url else text

    return re.sub(r"\[([^\]]*)\]\(((?!\w+:)[^)#]+)\)", linked, markdown)
