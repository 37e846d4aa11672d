"""What a sweep is asked for: its command line, or a file of the same."""

import argparse
import json
import math
import os
import pathlib
import re
import shlex

from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

FORMS = {"log": (FloatDistribution, float, True), "uniform": (FloatDistribution, float, False),
         "logint": (IntDistribution, int, True), "int": (IntDistribution, int, False)}  # fmt: skip
FORMS_TEXT = "log:LOW:HIGH, uniform:LOW:HIGH[:STEP], int:LOW:HIGH[:STEP], logint:LOW:HIGH, or choice:A,B,…"
OWN_NAMES = ("number", "folder")  # in the program's words, beside the parameters'
SQLITE = re.compile(r"(sqlite[^:]*:///)([^?:]+)")  # an Optuna URL, and its file
PLACE = re.compile(r"\{\{(\w+)\}\}|\{([A-Za-z_]\w*)\}")
DEFAULT_TRIALS = 20
USAGE = """lockstep sweep [OPTIONS] -- PROGRAM [ARGS...]
       lockstep sweep status|best|plot [FOLDER]
       lockstep sweep resume [FOLDER] [OPTIONS]"""
EXAMPLES = """
{NAME} in the program's words is that parameter's value, {number} the trial's number and {folder} its folder.

examples:
  lockstep sweep --param lr=log:1e-4:1e-1 --param batch=choice:32,64 --metric validation/loss --trials 30 \\
      -- ./train --lr {lr} --batch-size {batch}
  lockstep sweep --file sweep.toml                  the same from a file, whose keys are the options' names
  lockstep sweep --param lr=log:1e-4:1 --metric loss --regex 'loss=loss: ([^\\s,]+)' --pruner median \\
      --nproc-per-node 2 --jobs auto -- python train.py --lr {lr}
  lockstep sweep status                             how far the one in the folder sweep is; also best, plot
  lockstep sweep resume sweep --trials 60           goes on with one that was ended, or joins one that runs

docs/sweep.md is the guide."""


HINT = "; the program comes after --"


class Misuse(Exception):
    """A command line that cannot be meant."""


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise Misuse(message + (HINT if message.startswith("unrecognized") else ""))


def _from(least):
    """Reads a whole number that is not less."""
    def read(text):
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"'{text}' is not a number from {least}")
        return int(text)
    return read


def _jobs(text):
    return text if text == "auto" else _from(1)(text)


def _pair(text):
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME=VALUE")
    return name, value


def _parser():
    parser = _Parser(prog="lockstep sweep", usage=USAGE, epilog=EXAMPLES, allow_abbrev=False,
                     description="Looks for the best hyperparameters of a program: Optuna asks, lockstep run answers",
                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--file", metavar="FILE", help="options and program from a TOML file; the command line overrides it")
    add("--param", type=_pair, action="append", default=[], metavar="NAME=FORM", help=FORMS_TEXT)
    add("--metric", metavar="NAME", help="what the program reports and is judged by: validation/loss, say")
    add("--direction", choices=["minimize", "maximize"], default="minimize", help="[minimize]")
    add("--regex", type=_pair, action="append", default=[], metavar="NAME=REGEX",
        help="a metric in rank 0's output, as SageMaker defines them: the first group is the value")
    add("--trials", type=_from(1), metavar="N", help="how many, of all drivers together [20; the grid's size]")
    add("--sampler", default="tpe", metavar="KIND", help="tpe, random, grid, or a class of optuna.samplers; with its "
        "arguments: tpe:multivariate=true,n_startup_trials=20 [tpe]")
    add("--pruner", default="none", metavar="KIND", help="none, median, hyperband, halving, or a class of optuna.pruners; "
        "with its arguments: median:n_warmup_steps=1 [none]")
    add("--seed", type=int, metavar="N", help="of the sampler")
    add("--enqueue", action="append", default=[], metavar="NAME=VALUE,…", help="a trial to begin with")
    add("--warm-start", action="append", default=[], metavar="FOLDER", help="begin with the trials of an older sweep")
    add("--nproc-per-node", "-n", type=_from(1), default=1, metavar="N", help="processes of a trial [1]")
    add("--jobs", type=_jobs, metavar="N", help="trials at once, which share the cores; auto: a core for each process [1; with "
        "--host as many as fit]")
    add("--host", "-H", action="append", metavar="HOST:SLOTS,…", help="where trials run, with a slot for each "
        "process, as lockstep run has it")
    add("--rsh", metavar="COMMAND", help="what runs a command on a host of --host [%(default)s]",
        default="ssh -T -o BatchMode=yes -o ConnectTimeout=20 -o ServerAliveInterval=5")
    add("--export", "-x", action="append", default=[], metavar="NAME[=VALUE]", help="a variable for the processes on other hosts")
    add("--retries", type=_from(0), default=0, metavar="N", help="how often a failed trial is run again [0]")
    add("--max-failures", type=_from(1), default=5, metavar="N", help="end after N failures in a row [5]")
    add("--folder", default="sweep", metavar="DIR", help="the study, and a folder for each trial [sweep]")
    add("--storage", metavar="URL", help="an Optuna URL, sqlite:///sweep.db say, or a journal file; several drivers may share "
        "it [FOLDER/study.journal]")
    add("--name", help="the study's name there [the folder's]")
    add("--mlflow", metavar="URI", help="trials as child runs of one run there")
    return parser


def parse(words):
    """The options of a sweep. Their `own` and `program` stand for all of them, also when the file has changed."""
    return _parse(_hosts_together(words))


def _hosts_together(words):
    """The words of one command line: several --host add up, as mpirun's do. In _parse() the last one counts, for the words of a
    command line follow those of a file, or of the sweep that it resumes."""
    place = words.index("--") if "--" in words else len(words)
    hosts = _parser().parse_args(words[:place]).host or []
    return [*words[:place], "--host", ",".join(hosts), *words[place:]] if len(hosts) > 1 else words


def _parse(words):
    place = words.index("--") if "--" in words else len(words)
    own, program = words[:place], words[place + 1:]
    options = _parser().parse_args(own)
    if options.file:
        file_words, file_program = _file_words(options.file)
        try:
            _parser().parse_args(file_words)
        except Misuse as error:
            raise Misuse(f"{options.file}: {str(error).removesuffix(HINT)}") from None
        own, program = [*file_words, *own, "--file", ""], program or file_program
        options = _parser().parse_args(own)
    options.program = program
    _check(options)
    options.own = [*own, "--storage", options.storage] if options.storage else own  # of any working folder
    return options


def begun(folder, more=()):
    """(its working folder, the options) with which the sweep of a folder was begun; `more` words override them."""
    try:
        kept = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Misuse(f"there is no sweep in {folder}") from None
    return kept["cwd"], _parse([*kept["own"], "--folder", str(folder), *_hosts_together(more), "--", *kept["program"]])


def keep(options):
    """Writes what begun() reads."""
    written = options.folder / f"sweep.json.{os.getpid()}"
    written.write_text(json.dumps({"cwd": os.getcwd(), "own": options.own, "program": options.program}), encoding="utf-8")
    written.replace(options.folder / "sweep.json")


def _file_words(path):
    """The words that a TOML file stands for: trials = 30 is --trials 30, a table or list is its option repeatedly."""
    try:
        import tomllib

        content = tomllib.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except ModuleNotFoundError:
        raise Misuse("--file needs Python 3.11 or newer; give the options on the command line") from None
    except OSError as error:
        raise Misuse(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise Misuse(f"{path} is no TOML: {error}") from error
    program = content.pop("program", [])
    words = []
    for key, value in content.items():
        if key == "host" and isinstance(value, list):
            value = ",".join(map(str, value))
        if isinstance(value, dict) and key != "enqueue":
            value = [f"{name}={form}" for name, form in value.items()]
        for entry in value if isinstance(value, list) else [value]:
            if isinstance(entry, dict):  # a trial to begin with
                entry = ",".join(f"{name}={text_of(setting)}" for name, setting in entry.items())
            words += [f"--{key}", str(entry)]
    return words, shlex.split(program) if isinstance(program, str) else [str(word) for word in program]


def _check(options):
    """Makes of texts what they mean."""
    missing = [name for name, value in (("--param", options.param), ("--metric", options.metric)) if not value]
    if missing:
        raise Misuse(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    if not options.program:
        raise Misuse("there is no program; it comes after --")
    options.folder = pathlib.Path(options.folder).absolute()
    options.storage = _absolute(options.storage)
    options.host = options.host[-1] if options.host else None
    options.space = {name: _distribution(name, form) for name, form in options.param}
    fill(options.program, dict.fromkeys([*options.space, *OWN_NAMES], 0))
    options.regex = {name: _compiled(name, text) for name, text in options.regex}
    exported = [given if "=" in given else f"{given}={os.environ[given]}" for given in options.export
                if "=" in given or given in os.environ]  # of one that is not set, lockstep run says so
    options.exported = dict(given.split("=", 1) for given in exported)
    options.enqueue = [_values(text, options.space, dict(options.param)) for text in options.enqueue]
    options.grid = _grid(options.space) if options.sampler.partition(":")[0] == "grid" else None
    if options.grid and any(set(values) != set(options.grid) for values in options.enqueue):
        raise Misuse("--enqueue must name all parameters with --sampler grid")
    if options.trials is None:
        options.trials = math.prod(map(len, options.grid.values())) if options.grid else DEFAULT_TRIALS


def _absolute(storage):
    """The URL or journal with its file's whole path."""
    if storage is None or ("://" in storage and not SQLITE.match(storage)):
        return storage
    return SQLITE.sub(lambda match: match[1] + os.path.abspath(match[2]), storage) if "://" in storage else os.path.abspath(storage)


# ---- Parameters


def scalar(text):
    """A number, true, false, or the text itself."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, (bool, int, float)) else text


def _distribution(name, form):
    """Optuna's for a form of --param."""
    if not name.isidentifier() or name in OWN_NAMES:
        raise Misuse(f"--param {name}: a name has letters, digits and underscores, and is none of {', '.join(OWN_NAMES)}")
    kind, _, rest = form.partition(":")
    if kind == "choice" and rest:
        return CategoricalDistribution([scalar(choice) for choice in rest.split(",")])
    try:
        made, number, log = FORMS[kind]
        low, high, *step = map(number, rest.split(":"))
    except (KeyError, ValueError):
        raise Misuse(f"--param {name}={form}: it takes {FORMS_TEXT}") from None
    try:
        return made(low, high, log, *step)
    except (TypeError, ValueError) as error:
        raise Misuse(f"--param {name}={form}: {error}") from error


def _grid(space):
    """{name: all values}"""
    values = {}
    for name, found in space.items():
        if isinstance(found, CategoricalDistribution):
            values[name] = list(found.choices)
        elif found.step is None or found.log:
            raise Misuse(f"--sampler grid: {name} has no grid; give it as choice:…, int:… or uniform:LOW:HIGH:STEP")
        else:
            values[name] = [found.low + found.step * i for i in range(int((found.high - found.low) / found.step + 1e-9) + 1)]
    return values


def _values(text, space, forms):
    """The values of "lr=0.1,batch=32" by name."""
    values = {}
    for entry in text.split(","):
        name, _, value = entry.partition("=")
        if name not in space:
            raise Misuse(f"--enqueue {text}: '{name}' is none of the parameters {', '.join(space)}")
        values[name] = scalar(value)
        if not contains(space[name], values[name]):
            raise Misuse(f"--enqueue {text}: '{entry}' is not within {forms[name]}")
    return values


def contains(form, value):
    """Whether a parameter of that form may have the value."""
    try:
        return form._contains(form.to_internal_repr(value))
    except ValueError:  # of another type
        return False


def _compiled(name, text):
    try:
        found = re.compile(text)
    except re.error as error:
        raise Misuse(f"--regex {name}: {error}") from error
    if found.groups < 1:
        raise Misuse(f"--regex {name} has no group in parentheses that is the value")
    return found


def text_of(value):
    """As a program reads it: true and false, and floats with all their digits."""
    return json.dumps(value) if isinstance(value, bool) else str(value)


def names(words):
    """The names in braces that fill() replaces."""
    return {match[2] for word in words for match in PLACE.finditer(word)}


def fill(words, values):
    """The words with each {name} replaced; {{name}} is {name} itself."""
    def replaced(match):
        if match[1]:
            return f"{{{match[1]}}}"
        if match[2] not in values:
            raise Misuse(f"'{match[0]}' in the program's words is no parameter; there are {', '.join(values)}, and "
                         f"{{{match[0]}}} is {match[0]} itself")
        return text_of(values[match[2]])
    return [PLACE.sub(replaced, word) for word in words]
