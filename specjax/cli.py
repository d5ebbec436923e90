"""The command line of every script: a mistake costs the user one line.

absl and ml_collections meet a mistyped key with a traceback. `run` reads the
command line before they do, says what to type instead, and leaves to them only
what is right. A script accepts exactly the flags that its --help lists. Nothing
here imports jax, so that --help and every mistake answer at once.
"""

import difflib
import functools
import inspect
import itertools
import os
import pathlib
import select
import shlex
import sys
import traceback
import types

from absl import flags
from ml_collections import ConfigDict, config_flags
from ml_collections.config_flags import tuple_parser

from specjax import meanings
from specjax.errors import UserError

flags.disclaim_key_flags()  # what is defined here is the calling script's

_ARGS = []  # as config_flags reads them: --config first, `=` everywhere
_KINDS = {  # type of a value -> how it is read, and what to call it
  bool: (flags.BooleanParser(), "true or false"),
  int: (flags.IntegerParser(), "a whole number"),
  float: (flags.FloatParser(), "a number"),
  str: (flags.ArgumentParser(), "text"),
  tuple: (tuple_parser.TupleParser(), "a tuple"),
}


def nearest(name, names):
  """Return the one of `names` that `name` is most likely a slip of, or None."""
  return next(iter(difflib.get_close_matches(name, names, n=1)), None)


def flatten(config):
  """Return {"group.key": value} for every leaf of a ConfigDict."""
  return {n: value for n, kind, value in _fields(config) if kind != ConfigDict}


def overrides():
  """Return {"group.key": value} of what the command line set."""
  return dict(config_flags.get_override_values(flags.FLAGS["config"]))


def define_config():
  """Define --config=FILE.py[:ARG], its --config.KEY=VALUE and --print_config.

  Returns the flag's holder, whose `.value` is the locked ConfigDict.
  """
  flags.DEFINE_boolean("print_config", False, "Print the config and stop.")
  text = "Config file, as FILE.py or FILE.py:ARG."
  holder = config_flags.DEFINE_config_file("config", None, text, sys_argv=_ARGS)
  # A file that we have loaded to check the keys is not to run a second time.
  flags.FLAGS["config"].parser.parse = lambda spec: _load(spec)[1]
  return holder


@functools.cache
def _load(spec):
  """Return (docstring, locked config) of FILE.py or FILE.py:ARG."""
  file, colon, argument = spec.partition(":")
  path = pathlib.Path(file)
  _check_path(path, colon + argument)
  arguments = [argument] if colon else []
  module = types.ModuleType("config_file")
  module.__file__ = str(path.resolve())
  sys.modules["config_file"] = module  # a dataclass in the file looks there
  try:
    exec(compile(path.read_bytes(), path, "exec"), module.__dict__)
    try:
      inspect.signature(module.get_config).bind(*arguments)
    except TypeError:
      need = "takes no :ARG" if colon else "needs an argument: FILE.py:ARG"
      raise UserError(f"its get_config() {need}") from None
    config = module.get_config(*arguments)
    if not isinstance(config, ConfigDict):
      raise UserError(f"get_config() returned {config!r}, not a ConfigDict")
  except Exception as error:
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f":{f.lineno}" for f in frames if f.filename == str(path)]
    # A ValueError is how get_config() refuses its argument, in plain words.
    plain = isinstance(error, UserError | ValueError)
    what = error if plain else f"{type(error).__name__}: {error}"
    raise UserError(f"{path}{''.join(lines[-1:])}: {what}") from error
  return module.__doc__, config.lock()


def _check_path(path, suffix):
  """Raise UserError unless `path` is a file, naming the nearest that is."""
  if path.is_file():
    return
  if path.is_dir():
    found = ", ".join(map(str, _config_files(path))) or "no config"
    raise UserError(f"--config={path} is a folder; it holds {found}")
  by_stem = {p.stem: p for p in _config_files() + _config_files(path.parent)}
  hint = f"found: {', '.join(map(str, by_stem.values())) or 'none'}"
  if best := nearest(path.stem, by_stem):
    hint = f"did you mean --config={by_stem[best]}{suffix}?"
  raise UserError(f"--config={path}{suffix} does not exist; {hint}")


def _config_files(folder="configs"):
  """Return the paths in `folder` that --config can take."""
  found = sorted(p for p in pathlib.Path(folder).glob("*.py") if p.is_file())
  return [p for p in found if "def get_config" in p.read_text(errors="ignore")]


def _no_config():
  found = ", ".join(map(str, _config_files())) or "none in configs/"
  return UserError(f"no config: type --config=FILE.py (found: {found})")


def _fields(config, prefix=""):
  """Yield (dotted name, type, value) of the groups and leaves of a config."""
  for key, value in config.items():
    if isinstance(value, ConfigDict):
      yield prefix + key, ConfigDict, value
      yield from _fields(value, f"{prefix}{key}.")
    else:
      yield prefix + key, config.get_type(key), value


def _known(config):
  """Return {name: (type, default)} of all that the command line may name."""
  kinds = {kind.__name__: kind for kind in _KINDS}
  own = flags.FLAGS.get_key_flags_for_module(sys.modules["__main__"])
  known = {f.name: (kinds.get(f.flag_type(), str), f.default) for f in own}
  fields = _fields(config) if config else ()
  return known | {f"config.{n}": (kind, value) for n, kind, value in fields}


def _read(args, known):
  """Split arguments into [(name, value)]; raise UserError at the first slip."""
  args, pairs = list(args), []
  negated = {f"no{n}" for n, (kind, _) in known.items() if kind is bool}
  while args:
    arg = args.pop(0)
    if not arg.startswith("-") or not arg.strip("-"):
      raise _stray(arg, args, pairs, known)
    name, equals, value = arg.lstrip("-").partition("=")
    if arg.lstrip("-") in negated:
      name, equals, value = name.removeprefix("no"), "=", "false"
    if name not in known:
      raise _unknown(name, known)
    if not equals and known[name][0] is bool:
      value = "true"
    elif not equals:
      # A value that looks like a flag is one, and the value was forgotten.
      if not args or args[0].startswith("--"):
        raise UserError(f"--{name} has no value: type --{name}=VALUE")
      value = args.pop(0)
    _check_value(name, value, known)
    pairs.append((name, value))
  return pairs


def _check_value(name, text, known):
  """Raise UserError unless `text` reads as the type of the default."""
  kind, default = known[name]
  if kind is ConfigDict:
    keys = " or ".join(f"--{n}" for n in known if n.startswith(f"{name}."))
    raise UserError(f"--{name} is a group of keys; set {keys}")
  if kind not in _KINDS:
    raise UserError(f"--{name} is a {kind.__name__}: set it in the config file")
  parser, wanted = _KINDS[kind]
  try:
    value = parser.parse(text)
    if kind is tuple and default:
      allowed = {type(x) for x in default}
      allowed |= {int} if float in allowed else set()
      if not {type(x) for x in value} <= allowed:
        raise ValueError(text)
  except ValueError:
    like = "" if default is None else f" (the default is {default!r})"
    raise UserError(f"--{name}={text}: expected {wanted}{like}") from None


def _unknown(name, known):
  """Return the UserError for a flag or key that does not exist."""
  short = name.removeprefix("config.")
  keys = {n.removeprefix("config."): n for n in known if "." in n}
  own = {n: n for n in ["help", *known] if ("." in n) == ("." in name)}
  if short != name and not keys:
    return _no_config()
  what, pools = ("key", [keys]) if short != name else ("flag", [own, keys])
  # A key without its group may be one of several: name them all.
  found = [n for n in known if n.endswith(f".{short}")] or [
    pool[best] for pool in pools if (best := nearest(short, pool))
  ][:1]
  best = " or ".join(f"--{n}" for n in found)
  hint = f"did you mean {best}?" if found else "add --help to list them"
  return UserError(f"unknown {what} --{name}; {hint}")


def _stray(word, rest, pairs, known):
  """Return the UserError for an argument that belongs to no flag."""
  name, value = pairs[-1] if pairs else ("config", "")
  hint = "every argument begins with --; add --help to list them"
  if word.partition("=")[0] in known:
    hint = f"did you mean --{word}?"
  elif word.partition(":")[0].endswith(".py") and "config" in known:
    hint = f"did you mean --config={word}?"
  elif name != "config" and known[name][0] is str:
    more = itertools.takewhile(lambda w: not w.startswith("-"), rest)
    text = shlex.quote(" ".join([value, word, *more]))
    hint = f"quote a value that has spaces: --{name}={text}"
  return UserError(f"unexpected argument {word!r}; {hint}")


def _print_help(has_config, spec):
  """Print the script's docstring, its flags, and the keys of its config."""
  print((sys.modules["__main__"].__doc__ or "").strip(), "\n\nFlags:", sep="")
  for name, (_, default) in sorted(_known(None).items()):
    shown = "" if default is None else f" (default: {default})"
    print(f"  --{name}: {flags.FLAGS[name].help}{shown}")
  if has_config and not spec:
    print("\nConfig keys: add --config=FILE.py to list its keys.")
  elif has_config:
    doc, config = _load(spec)
    print(f"\nConfig {spec}: {(doc or '').strip()}\n")
    meanings.show(flatten(config), sys.modules["config_file"])


def _config_spec(args):
  """Return the value of --config, or None."""
  found = []
  for arg, following in itertools.pairwise([*args, ""]):
    name, equals, value = arg.partition("=")
    if name in ("--config", "-config"):
      found.append(value if equals else following)
  if len(found) > 1:
    raise UserError("--config is given twice; keep one of them")
  return "".join(found) or None


def _parse(args):
  """Parse the flags; False when --help or --print_config was all to do."""
  has_config = "config" in flags.FLAGS
  spec = _config_spec(args) if has_config else None
  if {"--help", "-help", "-h"} & set(args):
    _print_help(has_config, spec)
    return False
  pairs = _read(args, _known(_load(spec)[1] if spec else None))
  if has_config and not spec:
    raise _no_config()
  # config_flags wants --config ahead of the keys; the user need not.
  pairs.sort(key=lambda pair: pair[0] != "config")
  _ARGS[:] = [f"--{name}={value}" for name, value in pairs]
  try:
    flags.FLAGS(sys.argv[:1] + _ARGS)
  except flags.Error as error:
    raise UserError(str(error).removeprefix("flag ")) from None
  if has_config and flags.FLAGS.print_config:
    for key, value in flatten(flags.FLAGS.config).items():
      print(f"{key} = {value!r}")
    return False
  return True


def run(main):
  """Parse the flags, call main(argv) and exit with what it returns.

  A UserError is one line on stderr and code 2, an interrupt one line and 130.
  When a pipe's reader has left, exit silently with 141, as `cat` would. Any
  other exception is our bug and keeps its traceback.
  """
  try:
    code = main(sys.argv[:1]) if _parse(sys.argv[1:]) else 0
    sys.stdout.flush()
  except UserError as error:
    print("error:", " ".join(str(error).splitlines()), file=sys.stderr)
    code = 2
  except (KeyboardInterrupt, ImportError) as error:
    # C modules turn an interrupted import into a failure of their own
    causes = (error, error.__cause__, error.__context__)
    if not any(isinstance(cause, KeyboardInterrupt) for cause in causes):
      raise
    print("interrupted", file=sys.stderr, flush=True)
    os._exit(130)  # a compiler's threads may not survive an orderly exit
  except BrokenPipeError:
    poll = select.poll()
    for fd in (1, 2):
      poll.register(fd, 0)  # errors are reported whatever is asked for
    if not (gone := [fd for fd, e in poll.poll(0) if e & select.POLLERR]):
      raise  # some other pipe of ours broke
    for fd in gone:  # so that Python's last flush has nowhere to fail
      os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
    code = 141
  sys.exit(code)
