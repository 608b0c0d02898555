"""Files out of source archives: what a package holds, and under which licence it says it is."""

import io
import re
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from email.parser import BytesHeaderParser
from html.parser import HTMLParser
from pathlib import Path

LARGEST = 400_000
PERMISSIVE = re.compile(
    r"\b(MIT|BSD|Apache|PSF|Python Software Foundation|ISC|HPND|Unlicense|0BSD|Zope|ZPL|NCSA)\b", re.I
)
RESTRICTED = re.compile(
    r"\b(A?L?GPL\w*|GNU|MPL|Mozilla|EPL|Eclipse|CeCILL|EUPL|CC-BY\S*|proprietary|non-?commercial)\b", re.I
)


def members(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Path and content of every file up to LARGEST bytes."""
    if archive.suffix == ".deb":
        # dpkg knows which compression each package uses.
        unpacked = subprocess.run(["dpkg-deb", "--fsys-tarfile", archive], check=True, capture_output=True).stdout
        yield from _tar(io.BytesIO(unpacked))
    elif archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as file:
            for entry in file.infolist():
                if not entry.is_dir() and entry.file_size <= LARGEST:
                    yield entry.filename, file.read(entry)
    else:
        with archive.open("rb") as stream:
            yield from _tar(stream)


def _tar(stream: io.BufferedIOBase) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(fileobj=stream, mode="r:*") as file:
        for entry in file:
            if entry.isfile() and entry.size <= LARGEST:
                content = file.extractfile(entry)
                if content is not None:
                    yield entry.name, content.read()


def licence(files: dict[str, bytes]) -> str:
    """What PKG-INFO says of the licence; empty when it says nothing that is permissive throughout."""
    infos = sorted((path for path in files if path.endswith("PKG-INFO")), key=len)
    if not infos:
        return ""
    headers = BytesHeaderParser().parsebytes(files[infos[0]])
    classifiers = [str(c) for c in headers.get_all("Classifier", []) if str(c).startswith("License ::")]
    said = [str(headers.get("License-Expression", "")), *classifiers]
    if not "".join(said):
        said = [str(headers.get("License", ""))[:300]]
    text = " ".join(" ".join(said).split())
    if not PERMISSIVE.search(text) or RESTRICTED.search(text):
        return ""
    return str(headers.get("License-Expression") or "") or PERMISSIVE.search(text)[1]


def text_of(content: bytes) -> str:
    """The file as text with plain line ends; empty when it is not UTF-8."""
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\t", "    ")
    except UnicodeDecodeError:
        return ""


class _Page(HTMLParser):
    """The readable text of an HTML page: paragraphs on lines of their own, code as it stands."""

    BLOCKS = frozenset(
        [
            "p",
            "div",
            "li",
            "ul",
            "ol",
            "dl",
            "dt",
            "dd",
            "h1",
            "h2",
            "h3",
            "h4",
            "h5",
            "h6",
            "tr",
            "table",
            "section",
            "article",
            "br",
            "blockquote",
            "pre",
        ]
    )
    HIDDEN = frozenset(["script", "style", "nav", "header", "footer", "head", "form", "button", "svg"])

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.hidden = self.code = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.hidden += tag in self.HIDDEN
        self.code += tag == "pre"
        if tag in self.BLOCKS:
            self.parts.append("\n\n" if tag in ("p", "pre", "h1", "h2", "h3", "h4", "table") else "\n")

    def handle_endtag(self, tag: str) -> None:
        self.hidden -= tag in self.HIDDEN and self.hidden > 0
        self.code -= tag == "pre" and self.code > 0
        if tag in self.BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self.hidden:
            self.parts.append(data if self.code else re.sub(r"\s+", " ", data))


def page_text(html: str) -> str:
    page = _Page()
    page.feed(html)
    lines = [line.rstrip() for line in "".join(page.parts).split("\n")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"
