"""Hooks of mkdocs: the pages are written for GitHub, where links can leave `docs/`."""

import re


def on_page_markdown(markdown: str, page, **kwargs) -> str:
    """Show the paths of files outside of `docs/` instead of links, and link the README to the overview."""
    markdown = re.sub(r"\]\((?:\.\./)+README\.md(#\w*)?\)", "](README.md)", markdown)
    up = page.file.src_uri.count("/") + 1
    outside = rf"!?\[([^\]]*)\]\((?:\.\./){{{up}}}([^)]*)\)"
    return re.sub(outside, lambda match: f"{match[1]} (`{match[2]}`)", markdown)


def on_page_content(html: str, **kwargs) -> str:
    """Show Hugging Face's [`~trl.SFTConfig`] as code."""
    return re.sub(r"\[<code>~?([\w.]+)</code>\]", r"<code>\1</code>", html)
