"""Makes the site of pages that also read well where the repository is browsed.

Files outside of docs/ that pages link to are pages of the site too, and links between all of these are rewritten.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
# Files of the repository, and what they are called in the site. README is its first page.
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "LICENSE": "licence.md",
    "integrations/kernels/README.md": "start/hub-kernel.md",
    "integrations/comfyui/README.md": "start/comfyui.md",
    "examples/mix_two_papers.py": "examples/mix_two_papers.md",
    "examples/own_selector.py": "examples/own_selector.md",
    "examples/video_tokens.py": "examples/video_tokens.md",
}
SOURCE = {page: file for file, page in OUTSIDE.items()}
LINK = re.compile(r"(?<=\]\()(?P<path>[^)#\s:]+)(?P<rest>[^)]*\))")
KIND = re.compile(r"^```(python|sh) .+$", re.MULTILINE)  # what tests do with a block is nothing that readers need
CHART = re.compile(r"!\[(?P<alt>[^\]]*)\]\((?P<path>[^)\s]+)\.svg\)")
CODE = re.compile(r"`[^`\n]+`")
REFERENCE = re.compile(r"^::: (?P<path>[\w.]+)$", re.MULTILINE)
FAMILIES = re.compile(r"^::: blocksparse\.(?P<folder>order|score|select|execute|presets)$", re.MULTILINE)
# Words of the glossary that a reader may not know, or know otherwise. The first use on each page is a link.
WORDS = (
    "prefill", "density", "covered mass", "mass", "KL", "slot", "segment", "visible", "forced", "band", "sink",
    "last_q", "antidiagonal", "sum of cells", "index map", "early stop", "plan", "stock", "YaRN",
    "window of a text",
)  # fmt: skip
# What to read next, where a page does not say it.
NEXT = {
    "evidence/": "[choose](../choose.md) a method, or see [the other questions](index.md#every-page)",
    "reference/papers/": "[choose](../../choose.md) among all presets",
    "reference/api/": "[concepts](../concepts.md), where these are explained",
    "start/hub-kernel.md": "[choose](../choose.md) a method",
    "start/comfyui.md": "[images and video](video.md)",
    "contributing.md": "[write your own stage](start/write-your-own-stage.md)",
    "changelog.md": "[the first page](index.md)",
    "security.md": "[the first page](index.md)",
    "licence.md": "[the first page](index.md)",
    "examples/": "[write your own stage](../start/write-your-own-stage.md)",
}
PROSE = re.compile(r"^(?:[A-Z*(]|  ?\S|[a-z\d])")  # neither heading, table, code, list of links nor HTML


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside."""
    for file, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=_as_markdown(ROOT / file)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Turn a page of the repository into one of the site."""
    here = page.file.src_uri
    folder = posixpath.dirname(SOURCE.get(here, f"docs/{here}"))

    def to_page(link: re.Match[str]) -> str:
        file = posixpath.normpath(posixpath.join(folder, link["path"]))
        if not (ROOT / file).is_file():
            return link[0]  # for mkdocs to complain about
        target = OUTSIDE.get(file) or posixpath.relpath(file, "docs")
        return posixpath.relpath(target, posixpath.dirname(here) or ".") + link["rest"]

    def in_both_themes(image: re.Match[str]) -> str:
        """A chart has a dark version beside it, NAME-dark.svg."""
        alt, path = image["alt"], image["path"]
        return f"![{alt}]({path}.svg#only-light) ![{alt}]({path}-dark.svg#only-dark)"

    linked = CHART.sub(in_both_themes, LINK.sub(to_page, markdown))
    if "**Next:**" not in linked and here != "evidence/index.md":
        linked += "".join(f"\n**Next:** {step}.\n" for folder, step in NEXT.items() if here.startswith(folder))
    linked = FAMILIES.sub(_of_a_folder, linked)
    lines = KIND.sub(r"```\1", linked).split("\n")
    if here == "glossary.md":
        lines = [re.sub(r"^\| \*?(" + "|".join(WORDS) + r")\b", _with_anchor, line) for line in lines]
    elif not here.startswith("reference/api"):
        lines = _with_words_linked(lines, posixpath.relpath("glossary.md", posixpath.dirname(here) or "."))
    # In a table a forge wants `a \| b`, and Python's Markdown would show the backslash.
    return "\n".join(CODE.sub(lambda x: x[0].replace(r"\|", "|"), x) if x.startswith("|") else x for x in lines)


def _of_a_folder(line: re.Match[str]) -> str:
    """A line for each name that the package exports from a folder, except those with a line of their own."""
    pages = (ROOT / "docs" / "reference" / "api").glob("*.md")
    own = {path for page in pages for path in REFERENCE.findall(page.read_text(encoding="utf-8"))}
    package = ast.parse((ROOT / "src" / "blocksparse" / "__init__.py").read_text(encoding="utf-8"))
    paths = (
        f"blocksparse.{name.name}"
        for taken in package.body
        if isinstance(taken, ast.ImportFrom) and f"{taken.module}.".startswith(f"blocksparse.{line['folder']}.")
        for name in taken.names
    )
    return "\n\n".join(f"::: {path}" for path in paths if path not in own)


def _with_anchor(row: re.Match[str]) -> str:
    return f'| <a id="{row[1].replace(" ", "-").lower()}"></a>{row[0][2:]}'


def _with_words_linked(lines: list[str], glossary: str) -> list[str]:
    """Link the first use of each word in running text to the glossary, outside of code, links and emphasis."""
    waiting, linked, fenced, in_code = list(WORDS), [], False, False
    for line in lines:
        fenced ^= line.lstrip().startswith("```")
        began_in_code = in_code
        in_code = not fenced and line.strip() != "" and in_code ^ (line.count("`") % 2 == 1)
        # A line with code that begins or ends on another line is left alone.
        if not fenced and PROSE.match(line) and not line.startswith("    ") and not (began_in_code or in_code):
            pieces = re.split(r"(`[^`]*`|\[[^\]]*\]\([^)]*\)|!?\[.*|\*.*?\*|<.*?>|.*\]\([^)]*\))", line)
            for word in waiting.copy():
                for i in range(0, len(pieces), 2):
                    if found := re.search(rf"\b{word}s?\b", pieces[i]):
                        link = f"[{found[0]}]({glossary}#{word.replace(' ', '-').lower()})"
                        pieces[i : i + 1] = [pieces[i][: found.start()], link, pieces[i][found.end() :]]
                        waiting.remove(word)
                        break
            line = "".join(pieces)
        linked.append(line)
    return linked


def _as_markdown(file: Path) -> str:
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        return text
    language = "python" if file.suffix == ".py" else "text"
    return f"# {file.relative_to(ROOT).as_posix()}\n\n```{language}\n{text.rstrip()}\n```\n"
