"""ggml's sources: from the package index through pip, from the cache, or from where the user says.

The cache folder has one `ggml-<hash>` per archive, shared by checkouts. It appears by rename when it is
complete, and its files are compared with a digest before they are used. Imported by build.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from lzma import LZMAError
from pathlib import Path, PurePosixPath

from vendor.options import BuildError, Pin, say

DAMAGED = (tarfile.TarError, EOFError, OSError, zlib.error, LZMAError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Unpacked ggml: its folder, its licence, a digest over all its files, and where it is from."""

    ggml: Path
    licence: Path
    digest: str
    origin: str


def find_source(pin: Pin, given: Path | None, cache: Path) -> Source:
    """ggml's sources: the folder or archive `given` by the user, else the pinned package."""
    if given is None:
        return cached_source(cache, pin.sha256, f"{pin.package} {pin.version}", pin)
    if given.is_file():
        return cached_source(cache, file_sha256(given), given.name, given)
    for ggml in (given, given / "ggml", given / pin.folder):
        if all((ggml / name).is_file() for name in ("CMakeLists.txt", "include/ggml.h", "src/ggml.c")):
            origin = f"folder {given.name}"
            return Source(ggml=ggml, licence=find_licence(ggml), digest=tree_digest(ggml), origin=origin)
    what = "holds no ggml (include/ggml.h and src/ggml.c)" if given.is_dir() else "does not exist"
    raise BuildError(
        f"DFLASH_GGML_SOURCE={given} {what}; it takes ggml's folder, one that has it in ggml/ or "
        f"{pin.folder}/, or a .tar.gz or .tar.xz of such a folder"
    )


def find_licence(ggml: Path) -> Path:
    for path in (ggml / "LICENSE", ggml.parent / "LICENSE"):
        if path.is_file():
            return path
    raise BuildError(f"no LICENSE in {ggml} or beside it; ggml's licence has to travel with its libraries")


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def tree_digest(folder: Path) -> str:
    """One digest over the names and bytes of all files below `folder`."""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        digest.update(f"{path.relative_to(folder).as_posix()}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds `path` for this process, so that two builds do not share a folder."""
    import fcntl  # absent on Windows, which find_toolchain refuses before

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another build, which holds {path}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def cached_source(cache: Path, sha256: str, origin: str, where: Pin | Path) -> Source:
    """The unpacked archive from the cache; fetched and unpacked when absent or damaged there."""
    home = cache / f"ggml-{sha256[:16]}"
    with locked(cache / f"{home.name}.lock"):
        digest = stored_digest(home)
        if digest is None:
            with tempfile.TemporaryDirectory(dir=cache, prefix="unpack-") as temporary:
                fresh = Path(temporary) / "fresh"
                if isinstance(where, Pin):
                    unpack(download(where, Path(temporary)), fresh / "source", where.folder)
                else:
                    unpack(where, fresh / "source", "")
                digest = tree_digest(fresh / "source")
                (fresh / "digest").write_text(digest)
                shutil.rmtree(home, ignore_errors=True)
                fresh.replace(home)
    source = home / "source"
    return Source(ggml=source / "ggml", licence=source / "LICENSE", digest=digest, origin=origin)


def stored_digest(home: Path) -> str | None:
    """The digest of an unpacked source, or None when there is none or its files have changed since."""
    if not home.exists():
        return None
    with contextlib.suppress(OSError):
        digest = (home / "digest").read_text()
        if digest == tree_digest(home / "source"):
            return digest
    say(f"{home} is damaged; it is made again")
    return None


def download(pin: Pin, folder: Path) -> Path:
    """The pinned source package in `folder`, fetched by pip, which checks the hash before it looks inside."""
    say(f"fetching {pin.package} {pin.version} through pip; DFLASH_GGML_SOURCE=DIR builds without an index")
    wanted = folder / "requirement.txt"
    wanted.write_text(f"{pin.package}=={pin.version} --hash=sha256:{pin.sha256}\n")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
    command += ["--no-deps", "--no-binary", pin.package, "--require-hashes"]
    command += ["--dest", str(folder / "sdist"), "-r", str(wanted)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(download_failure(pin, done.stderr + done.stdout))
    (archive,) = (folder / "sdist").iterdir()
    if (found := file_sha256(archive)) != pin.sha256:
        raise BuildError(hash_failure(pin, found))
    return archive


def hash_failure(pin: Pin, found: str) -> str:
    return (
        f"{pin.package} {pin.version} has sha256 {found}, but {pin.sha256} is pinned; it is not used. "
        "Run `pip cache purge` and try again, or ask whoever runs your package index"
    )


def download_failure(pin: Pin, output: str) -> str:
    """One message out of what pip printed."""
    if mismatch := re.search(r"Got\s+([0-9a-f]{64})", output):
        return hash_failure(pin, mismatch[1])
    if "No module named pip" in output:
        return f"{sys.executable} has no pip, which fetches ggml; run `{sys.executable} -m ensurepip`"
    errors = [line.strip() for line in output.splitlines() if "ERROR" in line or "error:" in line]
    return (
        f"pip cannot fetch {pin.package} {pin.version}: {errors[0] if errors else output.strip()[-300:]}. "
        "Check the network and pip's index settings, or set DFLASH_GGML_SOURCE to a folder that has ggml"
    )


def unpack(archive: Path, home: Path, folder: str) -> None:
    """ggml and its licence out of `archive` into `home`; nothing else leaves the archive."""
    try:
        with tarfile.open(archive, "r:*") as tar:
            files = {safe_name(member, archive): member for member in tar if not member.isdir()}
            top = ggml_folder(files, archive, folder)
            licence = next((p for p in (top / "LICENSE", top.parent / "LICENSE") if p in files), None)
            if licence is None:
                raise BuildError(f"{archive.name} has no LICENSE in ggml or beside it")
            for name, member in files.items():
                if top in name.parents:
                    extract(tar, member, home / "ggml" / name.relative_to(top))
            extract(tar, files[licence], home / "LICENSE")
    except DAMAGED as error:
        reason = f"{type(error).__name__}: {error}"
        raise BuildError(f"{archive.name} is cut short or damaged ({reason}); get it again") from error


def safe_name(member: tarfile.TarInfo, archive: Path) -> PurePosixPath:
    name = PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts or "\\" in member.name:
        what = f"{member.name!r}, a name that leads out of its folder"
        raise BuildError(f"{archive.name} holds {what}; it is not used")
    return name


def ggml_folder(files: Mapping[PurePosixPath, object], archive: Path, folder: str) -> PurePosixPath:
    """Where ggml lies in the archive: the shallowest folder with its files whose path ends in `folder`."""
    tops = [name.parent.parent for name in files if name.parts[-2:] == ("include", "ggml.h")]
    for top in sorted(tops, key=lambda top: len(top.parts)):
        whole = top / "CMakeLists.txt" in files and top / "src/ggml.c" in files
        if whole and f"/{top}".endswith(folder):
            return top
    raise BuildError(f"{archive.name} holds no {folder or 'ggml'} (include/ggml.h and src/ggml.c)")


def extract(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    file = tar.extractfile(member) if member.isfile() else None
    if file is None:
        raise BuildError(f"{member.name} is a link or a device, not a file; the archive is not used")
    target.parent.mkdir(parents=True, exist_ok=True)
    with file, target.open("wb") as out:
        shutil.copyfileobj(file, out)
