"""Hooks of mkdocs: pages written for GitHub, and docstrings in the style of Hugging Face."""

import html
import re
from pathlib import Path


def on_page_markdown(markdown: str, page, **kwargs) -> str:
    """Show the README on the first page, and the paths of files outside of `docs/` instead of links.

    Comments are left out, because one at the start of a line ends a list.
    """
    if page.is_homepage:
        readme = Path(__file__).parents[1].joinpath("README.md").read_text(encoding="utf-8")
        markdown = re.sub(r"\]\((?!https?:|docs/)", "](../", readme).replace("](docs/", "](")
    markdown = re.sub("<!--.*?-->", "", markdown)
    # `exclude_docs` of mkdocs.yml leaves the programs out of the site.
    markdown = re.sub(r"\[([^\]]*)\]\((?!\.\./|https?:)[^)#]*\.py\)", r"`\1`", markdown)
    markdown = re.sub(r"\]\((?:\.\./)+README\.md(#[\w-]*)?\)", r"](README.md\1)", markdown)
    outside = rf"!?\[([^\]]*)\]\((?:\.\./){{{page.file.src_uri.count('/') + 1}}}([^)#]*)[^)]*\)"
    return re.sub(outside, lambda match: f"{match[1]} (`{match[2]}`)" * (match[1] != match[2]) or match[1], markdown)


def on_page_content(content: str, **kwargs) -> str:
    """Show the types of arguments without Markdown."""
    content = re.sub(r"<code>([^<]*\*optional\*[^<]*|[^<]*`[^<]*)</code>", _plain_type, content)
    return re.sub(r"\[<code>~?([\w.]+)</code>\]", r"<code>\1</code>", content)


def _plain_type(match: re.Match) -> str:
    text = re.sub(r", \*optional\*(, defaults to .*)?$", ", optional", html.unescape(match[1]))
    text = re.sub(r"\[`~?([\w.]+)`\]", r"\1", text).replace("`", "")
    return f"<code>{html.escape(text, quote=False)}</code>"
