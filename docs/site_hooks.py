"""Hooks of mkdocs: pages written for GitHub, and docstrings in the style of Hugging Face."""

import html
import posixpath
import re
from pathlib import Path
from types import SimpleNamespace


ROOT = Path(__file__).parents[1]
OTHER_SOURCES = {"README.md": "README.md", "questions.md": "docs/README.md", "recipes.md": "recipes/README.md"}
"""Files of the repository by their page on the site. The source of every other page is the file of its name in `docs/`."""

_PAGES = {source: page for page, source in OTHER_SOURCES.items()}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)")
_CODE_BLOCK = re.compile(r"(^ *```.*?^ *```)", re.MULTILINE | re.DOTALL)


def on_files(files, config):
    """Add the pages whose sources have another name or are outside of `docs/`."""
    from mkdocs.structure.files import File  # here, so that tests of the links need no mkdocs

    for page, source in OTHER_SOURCES.items():
        if files.get_file_from_path(page) is None:
            content = (ROOT / source).read_text(encoding="utf-8")
            files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page, config, **kwargs) -> str:
    """Show the README on the first page, and let the links lead to pages of the site or to files of the repository.

    Comments are left out, because one at the start of a line ends a list.
    """
    uri = page.file.src_uri
    source = OTHER_SOURCES.get(uri, f"docs/{uri}")
    if uri == "README.md":  # mkdocs reads docs/README.md, which is the page `questions.md`
        markdown = (ROOT / source).read_text(encoding="utf-8")
    markdown = re.sub("<!--.*?-->", "", markdown)
    place = SimpleNamespace(uri=uri, folder=posixpath.dirname(source), repository=config["repo_url"])
    parts = _CODE_BLOCK.split(markdown)
    for index in range(0, len(parts), 2):  # code blocks have odd indices
        parts[index] = _LINK.sub(lambda match: _convert_link(match, place), parts[index])
    return "".join(parts)


def _convert_link(match: re.Match, place: SimpleNamespace) -> str:
    """Return the link of a file on GitHub as it is on the site, or the path of the file if it can have no link."""
    image, text, target, anchor = match.groups(default="")
    path = posixpath.normpath(posixpath.join(place.folder, target))
    if not (ROOT / path).exists():  # not a link, or a dead one, which mkdocs reports
        return match[0]
    page = _find_page(path)
    if page is not None:
        return f"{image}[{text}]({posixpath.relpath(page, posixpath.dirname(place.uri) or '.')}{anchor})"
    if place.repository:
        return f"[{text}]({place.repository.rstrip('/')}/blob/HEAD/{path}{anchor})"
    name = text.strip("`")
    if name in (path, posixpath.basename(path)):
        return f"`{path}`"
    return f"{text} (`{path}`)"


def _find_page(path: str) -> str | None:
    """Return the file of the site that shows a file of the repository, or None. `exclude_docs` leaves the programs out."""
    if path in _PAGES:
        return _PAGES[path]
    if path.startswith("docs/") and not path.endswith(".py"):
        return path.removeprefix("docs/")
    return None


def on_page_content(content: str, **kwargs) -> str:
    """Show the types of arguments without Markdown."""
    content = re.sub(r"<code>([^<]*\*optional\*[^<]*|[^<]*`[^<]*)</code>", _plain_type, content)
    return re.sub(r"\[<code>~?([\w.]+)</code>\]", r"<code>\1</code>", content)


def _plain_type(match: re.Match) -> str:
    text = re.sub(r", \*optional\*(, defaults to .*)?$", ", optional", html.unescape(match[1]))
    text = re.sub(r"\[`~?([\w.]+)`\]", r"\1", text).replace("`", "")
    return f"<code>{html.escape(text, quote=False)}</code>"
