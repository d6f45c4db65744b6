"""Downloads against a local server: resume, checksums and every way in which they fail."""

import errno
import hashlib
import io
import re
import shutil
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from foogd.core.errors import InputError
from foogd.data import fetch as fetching
from foogd.data.catalogue import CATALOGUE
from foogd.data.fetch import adopt, download, fetch, unpack
from foogd.data.layouts import Entry, Remote

CONTENT = bytes(range(256)) * 4000  # about 1 MB
MD5 = hashlib.md5(CONTENT).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        return

    def do_GET(self):
        server = self.server
        server.asked.append((self.path, self.headers.get("Range")))
        content = server.files.get(self.path)
        if content is None:
            return self.answer(404, b"no such file", {"Content-Type": "text/html"})
        if isinstance(content, str):
            return self.answer(302, b"", {"Location": content})
        begin, status, headers = 0, 200, {"Content-Type": server.kind}
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if asked and server.ranges:
            begin, status = int(asked[1]), 206
            if begin >= len(content):
                return self.answer(416, b"", {"Content-Range": f"bytes */{len(content)}"})
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        self.answer(status, content[begin:], headers, server.breaks_after)

    def answer(self, status, body, headers, breaks_after=None):
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(self.server.claims or len(body)))
        self.end_headers()
        self.wfile.write(body[:breaks_after])
        if breaks_after is not None:
            self.close_connection = True


class Server(ThreadingHTTPServer):
    def handle_error(self, *_):  # a client that hangs up is what these tests are about
        return


@pytest.fixture
def server():
    with Server(("127.0.0.1", 0), Handler) as server:
        server.files, server.asked = {"/data/a.bin": CONTENT}, []
        server.kind, server.ranges, server.breaks_after, server.claims = "application/octet-stream", True, None, None
        server.url = f"http://127.0.0.1:{server.server_address[1]}/data"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_file_arrives_with_progress_and_is_not_asked_for_twice(server, tmp_path):
    seen = []
    got = download(f"{server.url}/a.bin", tmp_path / "a.bin", MD5, progress=lambda *both: seen.append(both))
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    assert (got.md5, got.checked) == (MD5, True)
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert len(seen) > 2
    download(f"{server.url}/a.bin", tmp_path / "a.bin", MD5)
    assert len(server.asked) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]


def test_without_a_published_checksum_the_computed_one_is_told(server, tmp_path):
    got = download(f"{server.url}/a.bin", tmp_path / "a.bin", None)
    assert (got.md5, got.checked) == (MD5, False)


def test_a_broken_connection_keeps_what_came_and_the_next_try_goes_on(server, tmp_path):
    server.breaks_after = 600_000
    with pytest.raises(InputError, match=r"broke off after [\d,]+ bytes \(the connection was closed\)"):
        download(f"{server.url}/a.bin", tmp_path / "a.bin", MD5)
    kept = (tmp_path / "a.bin.part").read_bytes()
    assert 0 < len(kept) <= 600_000
    assert kept == CONTENT[: len(kept)]
    assert not (tmp_path / "a.bin").exists()
    server.breaks_after = None
    seen = []
    download(f"{server.url}/a.bin", tmp_path / "a.bin", MD5, progress=lambda done, total: seen.append((done, total)))
    assert server.asked[-1] == ("/data/a.bin", f"bytes={len(kept)}-")
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    assert seen[0][0] > len(kept)
    assert seen[-1] == (len(CONTENT), len(CONTENT))


def test_a_server_without_ranges_starts_over(server, tmp_path):
    server.ranges = False
    (tmp_path / "a.bin.part").write_bytes(CONTENT[:1000])
    download(f"{server.url}/a.bin", tmp_path / "a.bin", MD5)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


@pytest.mark.parametrize("part", [CONTENT, CONTENT + b"more", b"x" * 1000], ids=["whole", "too long", "another"])
def test_a_partial_file_of_any_kind_ends_well(server, tmp_path, part):
    (tmp_path / "a.bin.part").write_bytes(part)
    download(f"{server.url}/a.bin", tmp_path / "a.bin", MD5)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


def test_a_wrong_checksum_names_both_and_puts_the_file_aside(server, tmp_path):
    (tmp_path / "a.bin").write_bytes(b"what the user had")
    with pytest.raises(InputError, match=f"{MD5}, but {'0' * 32} is published"):
        download(f"{server.url}/a.bin", tmp_path / "a.bin", "0" * 32)
    assert (tmp_path / "a.bin").read_bytes() == b"what the user had"
    assert (tmp_path / "a.bin.wrong").read_bytes() == CONTENT


@pytest.mark.parametrize("kind", ["text/html; charset=utf-8", "application/octet-stream"])
def test_a_page_instead_of_the_file_is_told(server, tmp_path, kind):
    server.files["/data/a.bin"], server.kind = b"\n<!DOCTYPE html><html>Please log in</html>", kind
    with pytest.raises(InputError, match=r"answered with a web page instead of a\.bin"):
        download(f"{server.url}/a.bin", tmp_path / "a.bin", MD5)
    assert list(tmp_path.iterdir()) == []


def test_a_page_does_not_spoil_a_partial_file(server, tmp_path):
    (tmp_path / "a.bin.part").write_bytes(CONTENT[:1000])
    server.files["/data/a.bin"], server.kind, server.ranges = b"<html>busy</html>", "text/html", False
    with pytest.raises(InputError, match="web page"):
        download(f"{server.url}/a.bin", tmp_path / "a.bin", MD5)
    assert (tmp_path / "a.bin.part").read_bytes() == CONTENT[:1000]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_told(server, tmp_path):
    (tmp_path / "a.bin.part").symlink_to("/dev/full")
    with pytest.raises(InputError, match="the disk is full"):
        download(f"{server.url}/a.bin", tmp_path / "a.bin", MD5)


def test_a_disk_that_fills_up_in_the_middle_keeps_what_came(server, tmp_path, monkeypatch):
    class Filling(io.FileIO):
        def write(self, data):
            if self.tell() > 400_000:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    real = Path.open

    def filling(path, mode="r", *more):
        return Filling(path, mode) if mode == "ab" else real(path, mode, *more)

    monkeypatch.setattr(Path, "open", filling)
    with pytest.raises(InputError, match="the disk is full"):
        download(f"{server.url}/a.bin", tmp_path / "a.bin", MD5)
    monkeypatch.undo()
    assert len((tmp_path / "a.bin.part").read_bytes()) > 400_000
    download(f"{server.url}/a.bin", tmp_path / "a.bin", MD5)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


def test_a_file_larger_than_the_disk_is_refused_before_it_comes(server, tmp_path):
    server.claims = 10**18
    with pytest.raises(InputError, match=r"needs 1,000,000,000,000,000,000 more bytes"):
        download(f"{server.url}/a.bin", tmp_path / "a.bin", MD5)


def test_no_connection_and_a_missing_file_are_told(server, tmp_path):
    with pytest.raises(InputError, match="answered 404"):
        download(f"{server.url}/none.bin", tmp_path / "none.bin", None)
    with pytest.raises(InputError, match=r"cannot be reached \(the connection was refused\)"):
        download("http://127.0.0.1:9/a.bin", tmp_path / "a.bin", None)
    with pytest.raises(InputError, match="cannot be reached"):
        download("http://nowhere.invalid/a.bin", tmp_path / "a.bin", None)
    assert list(tmp_path.iterdir()) == []


def test_a_silent_server_is_not_waited_for_forever(server, tmp_path, monkeypatch):
    monkeypatch.setattr(fetching, "TIMEOUT", 0.3)
    server.claims = len(CONTENT) + 10  # ten bytes never come
    with pytest.raises(InputError, match=r"broke off after [\d,]+ bytes \(no answer in time\)"):
        download(f"{server.url}/a.bin", tmp_path / "a.bin", MD5)


def test_redirects_are_followed(server, tmp_path):
    server.files["/data/b.bin"] = "/data/a.bin"
    assert download(f"{server.url}/b.bin", tmp_path / "b.bin", MD5).checked


def archive(members, mode="w:gz"):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as packed:
        for name, content in members.items():
            about = tarfile.TarInfo(name)
            if isinstance(content, bytes):
                about.size = len(content)
                packed.addfile(about, io.BytesIO(content))
            else:
                about.type, about.linkname = tarfile.SYMTYPE, content
                packed.addfile(about)
    return file.getvalue()


def entry(**files):
    remotes = tuple(Remote(f"http://127.0.0.1:9/{name}", md5) for name, md5 in files.items())
    return Entry("some", "out", "1", 8, "MIT", "", CATALOGUE["isun"].layouts, remotes, where="the authors")


def test_fetch_downloads_from_a_mirror_and_unpacks(server, tmp_path):
    packed = archive({"set/a.png": b"1", "set/deep/b.png": b"2"})
    server.files["/data/set.tar.gz"] = packed
    some = entry(**{"set.tar.gz": hashlib.md5(packed).hexdigest()})
    (got,) = fetch(some, tmp_path, mirror=server.url)
    assert got.checked
    assert (tmp_path / "some" / "set" / "deep" / "b.png").read_bytes() == b"2"
    assert sorted(path.name for path in (tmp_path / "some").iterdir()) == ["set", "set.tar.gz"]
    shutil.rmtree(tmp_path / "some" / "set")
    fetch(some, tmp_path)  # the archive is there: it is unpacked again, nothing is asked of a server
    assert (tmp_path / "some" / "set" / "a.png").exists()
    with pytest.raises(InputError, match="no address"):
        fetch(entry(**{"b.tar.gz": None}), tmp_path, mirror="ftp://x")
    with pytest.raises(InputError, match="look at the authors"):
        fetch(entry(), tmp_path)


@pytest.mark.parametrize(
    "members",
    [
        {"../out.txt": b"x"},
        {"ok.txt": b"x", "/../../out.txt": b"x"},
        {"link": "../..", "link/out.txt": b"x"},
        {"link": "/etc/passwd"},
    ],
)
def test_an_archive_that_reaches_out_of_its_folder_is_refused(tmp_path, members):
    (tmp_path / "a.tar.gz").write_bytes(archive(members))
    (tmp_path / "in" / "side").mkdir(parents=True)
    with pytest.raises(InputError, match=r"a\.tar\.gz is refused"):
        unpack(tmp_path / "a.tar.gz", tmp_path / "in" / "side")
    assert list((tmp_path / "in" / "side").iterdir()) == []
    assert not list(tmp_path.rglob("out.txt"))


def test_a_zip_cannot_reach_out_and_damaged_archives_are_told(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as packed:
        packed.writestr("../../out.txt", "x" * 1000)
    (tmp_path / "in").mkdir()
    unpack(tmp_path / "a.zip", tmp_path / "in")
    assert not (tmp_path / "out.txt").exists()
    assert not (tmp_path.parent / "out.txt").exists()
    whole = archive({"a": bytes(range(256)) * 50})
    for name, content in (
        ("cut.tar.gz", whole[: len(whole) // 2]),
        ("bits.tar.gz", whole[:100] + b"\0\1" + whole[102:]),
        ("no.tar", b"not an archive"),
        ("no.zip", b"PK\3\4 half a zip"),
    ):
        (tmp_path / name).write_bytes(content)
        (tmp_path / "to").mkdir(exist_ok=True)
        with pytest.raises(InputError, match=name):
            unpack(tmp_path / name, tmp_path / "to")
        assert list((tmp_path / "to").iterdir()) == []


def test_a_disk_that_fills_while_unpacking_is_told_and_swept(tmp_path, monkeypatch):
    (tmp_path / "a.tar.gz").write_bytes(archive({"a": b"1"}))
    (tmp_path / "to").mkdir()

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tarfile.TarFile, "extractall", full)
    with pytest.raises(InputError, match="the disk is full"):
        unpack(tmp_path / "a.tar.gz", tmp_path / "to")
    assert list((tmp_path / "to").iterdir()) == []


def test_a_local_path_is_accepted_instead(tmp_path):
    have = tmp_path / "have"
    (have / "set").mkdir(parents=True)
    (have / "set" / "a.png").write_bytes(b"1")
    assert (adopt(entry(), tmp_path / "1", have) / "set" / "a.png").read_bytes() == b"1"
    assert adopt(entry(), tmp_path / "1", have) == tmp_path / "1" / "some"  # once more is the same
    with pytest.raises(InputError, match="is there already"):
        adopt(entry(), tmp_path / "1", tmp_path)
    (tmp_path / "set.tar").write_bytes(archive({"set/a.png": b"1"}, "w"))
    adopt(entry(), tmp_path / "2", tmp_path / "set.tar")
    assert (tmp_path / "2" / "some" / "set" / "a.png").read_bytes() == b"1"
    (tmp_path / "a.npz").write_bytes(b"arrays")
    adopt(entry(), tmp_path / "2", tmp_path / "a.npz")
    assert (tmp_path / "2" / "some" / "a.npz").read_bytes() == b"arrays"
    assert adopt(entry(), tmp_path / "2", tmp_path / "2" / "some" / "a.npz").read_bytes() == b"arrays"
    with pytest.raises(InputError, match="does not exist"):
        adopt(entry(), tmp_path / "2", tmp_path / "nothing")
    with pytest.raises(InputError, match=r"has the md5 .* cut short or another file"):
        adopt(entry(**{"a.npz": "0" * 32}), tmp_path / "2", tmp_path / "a.npz")


def test_the_table_names_published_checksums_and_addresses():
    for item in CATALOGUE.values():
        assert item.embedded or item.files or item.where
        for remote in item.files:
            assert re.fullmatch(r"https?://\S+", remote.address)
            assert remote.name.endswith((".tar", ".tar.gz", ".zip", ".mat"))
            assert remote.md5 is None or re.fullmatch(r"[0-9a-f]{32}", remote.md5)
    unknown = {name for name, item in CATALOGUE.items() for remote in item.files if remote.md5 is None}
    assert unknown == {"isun"}
