"""Every mistake at the prompt costs one line, code 2, and nothing on stdout.

The scripts are real ones in a folder of their own, run as a user runs them.
"""

import os
import pathlib
import subprocess
import sys
import types

import pytest

from specjax import cli, meanings

ROOT = pathlib.Path(__file__).parents[1]

FILES = {
  "decode.py": '''"""Decode prompts.

  python decode.py --config=configs/smollm2.py
"""
import sys
from absl import flags
from specjax import cli

_CONFIG = cli.define_config()
_JSON = flags.DEFINE_string("json", None, "Write the whole report here.")
_RUNS = flags.DEFINE_integer("runs", 3, "How often to time.")
_ENGINE = flags.DEFINE_enum("engine", "fast", ["fast", "slow"], "Which one.")

def main(argv):
  assert len(argv) == 1 and _CONFIG.value.is_locked
  for name in cli.overrides():
    print(name, repr(cli.flatten(_CONFIG.value)[name]))
  print("json", _JSON.value, "runs", _RUNS.value)

if __name__ == "__main__":
  cli.run(main)
''',
  # What main() can do wrong; the script has flags but no config.
  "other.py": '''"""Fail in many ways."""
import os, sys
from absl import flags
from specjax import cli, errors

_HOW = flags.DEFINE_string("how", "", "How to fail.")

def main(argv):
  if _HOW.value == "user":
    raise errors.UserError("no weights;\\n  type --weights=FILE")
  if _HOW.value == "interrupt":
    raise KeyboardInterrupt
  if _HOW.value == "bug":
    raise ZeroDivisionError("ours")
  if _HOW.value == "pipe":
    read, write = os.pipe()
    os.close(read)
    os.write(write, b"x")
  if _HOW.value == "flood":
    for i in range(100_000):
      print(i)
  if _HOW.value == "modules":
    print("jax" in sys.modules)
  return 7 if _HOW.value == "seven" else None

if __name__ == "__main__":
  cli.run(main)
''',
  "configs/smollm2.py": '''"""SmolLM2 with a draft."""
import dataclasses
import ml_collections
from ml_collections import config_dict

@dataclasses.dataclass
class Point:
  x: "int" = 0

def get_config(arg=""):
  if arg not in ("", "tiny"):
    raise ValueError(f"unknown argument {arg!r}: use tiny")
  c = ml_collections.ConfigDict()
  c.batch_size = 1
  c.chat = False
  c.prompt = config_dict.placeholder(str)
  c.target = "smol lm"
  c.mesh = (1, 1)
  c.lrs = (0.5, 0.1)
  c.ks = [1, 2]
  c.sampling = dict(temperature=0.0, top_k=0)
  c.draft = dict(temperature=0.5, num_tokens=4)
  return c
''',
  "configs/common.py": "def helper(): pass\n",
  "odd/syntax.py": '"""Doc."""\n\ndef get_config(:\n',
  "odd/crash.py": "def get_config():\n  return undefined\n",
  "odd/value.py": "def get_config():\n  return int('x')\n",
  "odd/loud.py": """import ml_collections
print("loaded")
def get_config():
  return ml_collections.ConfigDict()
""",
  "odd/empty.py": "x = 1\n",
  "odd/nothing.py": "def get_config():\n  pass\n",
  "odd/argument.py": "def get_config(arg):\n  pass\n",
}

CONFIG = "--config=configs/smollm2.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp("cli")
  for name, text in FILES.items():
    (path / name).parent.mkdir(exist_ok=True)
    (path / name).write_text(text)
  return path


def run(folder, script, *args, python=()):
  return subprocess.run(
    [sys.executable, *python, script, *args],
    cwd=folder,
    env=os.environ | {"PYTHONPATH": str(ROOT)},
    capture_output=True,
    text=True,
    timeout=60,
  )


def fails(folder, args, message, script="decode.py"):
  """Check code 2, an empty stdout, and exactly this line on stderr."""
  result = run(folder, script, *args)
  assert result.stderr == f"error: {message}\n"
  assert (result.returncode, result.stdout) == (2, "")


LIST = "add --help to list them"


@pytest.mark.parametrize(
  ("args", "message"),
  [
    ("--jsn=x", "unknown flag --jsn; did you mean --json?"),
    ("--helpfull", "unknown flag --helpfull; did you mean --help?"),
    ("--verbosity=1", f"unknown flag --verbosity; {LIST}"),  # absl's own
    ("--promt=x", "unknown flag --promt; did you mean --config.prompt?"),
    (
      "--batch_size=2",
      "unknown flag --batch_size; did you mean --config.batch_size?",
    ),
    (
      "--confg.chat=true",
      "unknown flag --confg.chat; did you mean --config.chat?",
    ),
    (
      "--config.promt=x",
      "unknown key --config.promt; did you mean --config.prompt?",
    ),
    ("--config.kk=8", f"unknown key --config.kk; {LIST}"),
    (
      "--config.k=8",
      "unknown key --config.k; did you mean --config.ks?",
    ),
    (
      "--config.sampling.temperture=1",
      "unknown key --config.sampling.temperture; "
      "did you mean --config.sampling.temperature?",
    ),
    (
      "--config.samplng.top_k=1",
      "unknown key --config.samplng.top_k; "
      "did you mean --config.sampling.top_k?",
    ),
    (
      "--config.temperature=1",
      "unknown key --config.temperature; did you mean "
      "--config.draft.temperature or --config.sampling.temperature?",
    ),
    (
      "--config.batch_size.x=1",
      "unknown key --config.batch_size.x; did you mean --config.batch_size?",
    ),
    (
      "--config.sampling=3",
      "--config.sampling is a group of keys; "
      "set --config.sampling.temperature or --config.sampling.top_k",
    ),
    (
      "--sampling.temperture=1",
      "unknown flag --sampling.temperture; "
      "did you mean --config.sampling.temperature?",
    ),
    (
      "--noconfig.batch_size",
      "unknown flag --noconfig.batch_size; did you mean --config.batch_size?",
    ),
  ],
)
def test_wrong_name(folder, args, message):
  fails(folder, [CONFIG, args], message)


def number(default):
  return f"expected a whole number (the default is {default})"


@pytest.mark.parametrize(
  ("arg", "why"),
  [
    ("--config.batch_size=abc", number(1)),
    ("--config.batch_size=2.5", number(1)),
    ("--config.batch_size=True", number(1)),  # ConfigDict would take it
    ("--config.batch_size=", number(1)),
    ("--runs=abc", number(3)),
    ("--engine=quick", "value should be one of <fast|slow>"),
    (
      "--config.sampling.temperature=hot",
      "expected a number (the default is 0.0)",
    ),
    ("--config.chat=maybe", "expected true or false (the default is False)"),
    ("--config.mesh=(2,'a')", "expected a tuple (the default is (1, 1))"),
    ("--config.mesh=(2,0.5)", "expected a tuple (the default is (1, 1))"),
    ("--config.mesh=(2,", "expected a tuple (the default is (1, 1))"),
  ],
)
def test_wrong_value(folder, arg, why):
  fails(folder, [CONFIG, arg], f"{arg}: {why}")


@pytest.mark.parametrize("after", [[], ["--json=x"]])
def test_no_value(folder, after):
  message = "--config.prompt has no value: type --config.prompt=VALUE"
  fails(folder, [CONFIG, "--config.prompt", *after], message)


def test_list_is_not_for_the_command_line(folder):
  arg = "--config.ks=[1]"
  fails(
    folder, [CONFIG, arg], "--config.ks is a list: set it in the config file"
  )


BEGINS = f"every argument begins with --; {LIST}"


@pytest.mark.parametrize(
  ("args", "message"),
  [
    (["foo", CONFIG], f"unexpected argument 'foo'; {BEGINS}"),
    ([CONFIG, "foo"], f"unexpected argument 'foo'; {BEGINS}"),
    ([CONFIG, "--", "foo"], f"unexpected argument '--'; {BEGINS}"),
    (
      ["configs/smollm2.py:tiny"],
      "unexpected argument 'configs/smollm2.py:tiny'; "
      "did you mean --config=configs/smollm2.py:tiny?",
    ),
    (
      [CONFIG, "config.batch_size=3"],
      "unexpected argument 'config.batch_size=3'; "
      "did you mean --config.batch_size=3?",
    ),
    (
      [CONFIG, "--config.prompt", "Hello", "big", "world", "--json=x"],
      "unexpected argument 'big'; quote a value that has spaces: "
      "--config.prompt='Hello big world'",
    ),
    (
      [CONFIG, "--config.prompt=Hello", "world"],
      "unexpected argument 'world'; quote a value that has spaces: "
      "--config.prompt='Hello world'",
    ),
  ],
)
def test_stray_argument(folder, args, message):
  fails(folder, args, message)


NONE = "no config: type --config=FILE.py (found: configs/smollm2.py)"
MEANT = "does not exist; did you mean --config=configs/smollm2.py"


@pytest.mark.parametrize(
  ("args", "message"),
  [
    ([], NONE),
    (["--config="], NONE),
    (["--config"], "--config has no value: type --config=VALUE"),
    (["--config.batch_size=3"], NONE),
    (["--jsn=x"], "unknown flag --jsn; did you mean --json?"),
    (["--confg=x"], "unknown flag --confg; did you mean --config?"),
    (["--config=configs/smolm2.py"], f"--config=configs/smolm2.py {MEANT}?"),
    (
      ["--config=configs/smolm2.py:tiny"],
      f"--config=configs/smolm2.py:tiny {MEANT}:tiny?",
    ),
    (["--config=smollm2"], f"--config=smollm2 {MEANT}?"),
    (
      ["--config", "odd/crush.py"],
      "--config=odd/crush.py does not exist; "
      "did you mean --config=odd/crash.py?",
    ),
    (
      ["--config=none/zz.py"],
      "--config=none/zz.py does not exist; found: configs/smollm2.py",
    ),
    (
      ["--config=configs/"],
      "--config=configs is a folder; it holds configs/smollm2.py",
    ),
    ([CONFIG, CONFIG], "--config is given twice; keep one of them"),
    (
      ["--config=configs/smollm2.py:foo"],
      "configs/smollm2.py:12: unknown argument 'foo': use tiny",
    ),
    (
      ["--config=odd/syntax.py"],
      "odd/syntax.py: SyntaxError: invalid syntax (syntax.py, line 3)",
    ),
    (
      ["--config=odd/crash.py"],
      "odd/crash.py:2: NameError: name 'undefined' is not defined",
    ),
    (
      ["--config=odd/value.py"],
      "odd/value.py:2: invalid literal for int() with base 10: 'x'",
    ),
    (
      ["--config=odd/empty.py"],
      "odd/empty.py: AttributeError: "
      "module 'config_file' has no attribute 'get_config'",
    ),
    (
      ["--config=odd/nothing.py"],
      "odd/nothing.py: get_config() returned None, not a ConfigDict",
    ),
    (
      ["--config=odd/nothing.py:x"],
      "odd/nothing.py: its get_config() takes no :ARG",
    ),
    (
      ["--config=odd/argument.py"],
      "odd/argument.py: its get_config() needs an argument: FILE.py:ARG",
    ),
  ],
)
def test_config_file(folder, args, message):
  fails(folder, args, message)


def test_no_configs_at_all(folder, tmp_path):
  script = str(folder / "decode.py")
  message = "no config: type --config=FILE.py (found: none in configs/)"
  fails(tmp_path, [], message, script)


@pytest.mark.parametrize(
  ("args", "printed"),
  [
    ([CONFIG], ""),
    (["--config", "configs/smollm2.py:tiny"], ""),
    (["-config", "configs/smollm2.py"], ""),
    ([CONFIG, "--config.batch_size=8"], "batch_size 8\n"),
    (["--config.batch_size=8", CONFIG], "batch_size 8\n"),  # any order
    ([CONFIG, "--config.batch_size", "-8"], "batch_size -8\n"),
    ([CONFIG, "--config.chat"], "chat True\n"),
    ([CONFIG, "--config.chat", "--noconfig.chat"], "chat False\n"),
    ([CONFIG, "--config.draft.temperature=1"], "draft.temperature 1.0\n"),
    ([CONFIG, "--config.prompt="], "prompt ''\n"),
    ([CONFIG, "--config.prompt", ""], "prompt ''\n"),
    ([CONFIG, "--config.prompt=a=b\n c"], "prompt 'a=b\\n c'\n"),
    ([CONFIG, "--config.target=3"], "target '3'\n"),
    ([CONFIG, "--config.mesh=(2,4)"], "mesh (2, 4)\n"),
    ([CONFIG, "--config.lrs=(1,0.5)"], "lrs (1, 0.5)\n"),
  ],
)
def test_right(folder, args, printed):
  result = run(folder, "decode.py", *args, "--json", "x", "--runs=5")
  assert (result.returncode, result.stderr) == (0, "")
  assert result.stdout == printed + "json x runs 5\n"


def test_config_file_runs_once(folder):
  result = run(folder, "decode.py", "--config=odd/loud.py")
  assert result.stdout == "loaded\njson None runs 3\n"


def test_as_a_module(folder):
  result = run(folder, "decode", CONFIG, "--runs=5", python=["-m"])
  assert result.stdout == "json None runs 5\n"
  assert (result.returncode, result.stderr) == (0, "")


HELP = """Decode prompts.

  python decode.py --config=configs/smollm2.py

Flags:
  --config: Config file, as FILE.py or FILE.py:ARG.
  --engine: <fast|slow>: Which one. (default: fast)
  --json: Write the whole report here.
  --print_config: Print the config and stop. (default: False)
  --runs: How often to time. (default: 3)

"""

KEYS = """Config configs/smollm2.py:tiny: SmolLM2 with a draft.

  --config.batch_size=1
  --config.chat=False
  --config.draft.num_tokens=4
  --config.draft.temperature=0.5
  --config.ks='[1, 2]'
  --config.lrs='(0.5, 0.1)'
  --config.mesh='(1, 1)'
  --config.prompt (not set)
  --config.sampling.temperature=0.0
  --config.sampling.top_k=0
  --config.target='smol lm'
"""


@pytest.mark.parametrize(
  ("args", "end"),
  [
    (["--help"], "Config keys: add --config=FILE.py to list its keys.\n"),
    (["--help", "--config=configs/smollm2.py:tiny"], KEYS),
    (["--config=configs/smollm2.py:tiny", "-h", "--jsn=x"], KEYS),
  ],
)
def test_help(folder, args, end):
  result = run(folder, "decode.py", *args)
  assert result.stdout == HELP + end
  assert (result.returncode, result.stderr) == (0, "")


def test_help_says_what_is_beside_a_default(tmp_path, capsys):
  """The file's own words before those of what it imports."""
  (tmp_path / "odd_base.py").write_text(BASE)
  text = "def make(c):\n  c.steps = 4  # of the file # itself\n"
  module = types.ModuleType("config_file")
  module.__file__ = str(tmp_path / "own.py")
  (tmp_path / "own.py").write_text(text)
  module.base = types.ModuleType("odd_base")
  module.base.__file__ = str(tmp_path / "odd_base.py")
  values = {"steps": 4, "batch.rows": 2, "batch.mix": None, "batch.no": 1}
  meanings.show(values | {"batch.last": "a b"}, module)
  assert capsys.readouterr().out == BESIDE


BASE = """c = dict()
c.steps = 1  # of the base
c.batch = dict(  # a group
  rows=2,  # at once
  # what share
  # of each
  mix=(
    (0, 1),
  ),
  no=1,
  last="a",  # it is
  # the last
)
"""
BESIDE = """  --config.steps=4
      of the file # itself
  --config.batch.rows=2
      at once
  --config.batch.mix (not set)
      what share of each
  --config.batch.no=1
  --config.batch.last='a b'
      it is the last
"""


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/*.py")))
def test_every_key_says_what_it_is(path, capsys):
  """But for the architecture's, which are of Hugging Face's config.json."""
  if path.stem in ("common", "training"):
    return
  args = {"llama3": ":8b", "qwen3": ":8b", "gemma3": ":12b"}
  _, config = cli._load(f"{path}{args.get(path.stem, '')}")
  values = cli.flatten(config)
  meanings.show(values, sys.modules["config_file"])
  told = capsys.readouterr().out.split("  --config.")[1:]
  assert len(told) == len(values)
  silent = {x for x in told if "\n      " not in x}
  assert all(x.startswith("architecture.") for x in silent), silent


ODD = {
  "c.a = 1  # noqa: E501": {},
  "c.b.c = 1  # it": {"b.c": "it"},
  "self.seed = 1  # of another": {},
  "c['a'].b = 1  # no\nc.x, c.y = 1, 2  # no": {},
  "c.g = dict(**x, a=1)  # all": {"g.a": "all"},
  "#!/usr/bin/python\nc.a = 1": {},
  "def broken(:  # no": {},
  'c.a = """': {},
  "": {},
}


@pytest.mark.parametrize("text", ODD)
def test_odd_sources_do_not_break_help(tmp_path, text):
  (tmp_path / "odd.py").write_text(text)
  assert meanings.read(tmp_path / "odd.py") == ODD[text]
  assert meanings.read(tmp_path) == {}
  assert meanings.read(tmp_path / "odd.py" / "in.py") == {}


def test_help_of_a_config_in_the_folder_above(tmp_path, monkeypatch, capsys):
  """What a config holds besides modules has no file, not this folder's."""
  (tmp_path / "own.py").write_text("c.steps = 4  # so many")
  (tmp_path / "below").mkdir()
  monkeypatch.chdir(tmp_path / "below")
  module = types.ModuleType("config_file")
  module.__file__, module.number = "../own.py", 3
  meanings.show({"steps": 4}, module)
  assert capsys.readouterr().out == "  --config.steps=4\n      so many\n"


def test_help_without_a_config_flag(folder):
  result = run(folder, "other.py", "--help")
  text = "Fail in many ways.\n\nFlags:\n  --how: How to fail. (default: )\n"
  assert (result.returncode, result.stderr, result.stdout) == (0, "", text)


def test_help_with_a_broken_config(folder):
  result = run(folder, "decode.py", "--help", "--config=odd/crush.py")
  assert result.stdout.strip() == HELP.strip()
  assert "did you mean --config=odd/crash.py?" in result.stderr
  assert result.returncode == 2


def test_print_config(folder):
  args = [CONFIG, "--print_config", "--config.prompt=hi", "--config.mesh=(8,)"]
  result = run(folder, "decode.py", *args)
  assert (result.returncode, result.stderr) == (0, "")
  assert result.stdout.splitlines() == [
    "batch_size = 1",
    "chat = False",
    "draft.num_tokens = 4",
    "draft.temperature = 0.5",
    "ks = [1, 2]",
    "lrs = (0.5, 0.1)",
    "mesh = (8,)",
    "prompt = 'hi'",
    "sampling.temperature = 0.0",
    "sampling.top_k = 0",
    "target = 'smol lm'",
  ]


@pytest.mark.parametrize(
  ("how", "code", "stdout", "stderr"),
  [
    ("user", 2, "", "error: no weights;   type --weights=FILE\n"),
    ("interrupt", 130, "", "interrupted\n"),
    ("seven", 7, "", ""),
    ("", 0, "", ""),
    ("modules", 0, "False\n", ""),  # jax costs a second to import
  ],
)
def test_how_main_ends(folder, how, code, stdout, stderr):
  result = run(folder, "other.py", f"--how={how}")
  expected = (code, stdout, stderr)
  assert (result.returncode, result.stdout, result.stderr) == expected


def test_our_bug_keeps_its_traceback(folder):
  result = run(folder, "other.py", "--how=bug")
  assert (result.returncode, result.stdout) == (1, "")
  assert result.stderr.startswith("Traceback")
  assert result.stderr.endswith("\nZeroDivisionError: ours\n")


def test_a_broken_pipe_of_ours_is_a_bug(folder):
  result = run(folder, "other.py", "--how=pipe")
  assert result.returncode == 1
  assert "BrokenPipeError" in result.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
  ("command", "read"),
  [
    ("--how=flood | head -n 2", "0\n1\n"),
    ("--how=flood 2>&1 | head -n 2", "0\n1\n"),
    ("--how=modules | true", ""),  # found out by the flush at the end
  ],
)
def test_reader_leaves(folder, command, read, unbuffered):
  result = subprocess.run(
    [
      "bash",
      "-c",
      f'"$0" other.py {command}; echo ${{PIPESTATUS[0]}}',
      sys.executable,
    ],
    cwd=folder,
    env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered},
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert (result.stdout, result.stderr) == (read + "141\n", "")


def test_nearest():
  assert cli.nearest("temperture", ["top_k", "temperature"]) == "temperature"
  assert cli.nearest("zzz", ["top_k", "temperature"]) is None
  assert cli.nearest("top_k", []) is None
