"""Reads left_out.toml and quick.toml, and holds them to their rules."""

import fnmatch
import pathlib

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where pytest brings it
    import tomli as tomllib

from conformance import suites

HERE = pathlib.Path(__file__).resolve().parent
LEFT_OUT, QUICK = HERE / "left_out.toml", HERE / "quick.toml"
MOST = 5


class ListError(Exception):
    """A list that breaks its rules."""


def read_toml(path):
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ListError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ListError(f"{path} is no TOML: {error}") from error


def read_left_out(path=LEFT_OUT):
    """{full name: reason} of the tests of Gloo's own internals that may fail with lockstep."""
    content = read_toml(path)
    entries = content.pop("test", [])
    if content or not isinstance(entries, list):
        raise ListError(f"{path} has [[test]] tables and nothing else; it has {', '.join(content) or '[test]'}")
    if len(entries) > MOST:
        raise ListError(f"{path} leaves out {len(entries)} tests; at most {MOST} may be: mend the engine instead")
    found = {}
    for entry in entries:
        name, reason = entry.get("name"), entry.get("reason")
        if set(entry) != {"name", "reason"} or not isinstance(name, str) or not isinstance(reason, str):
            raise ListError(f"{path}: an entry has just a name and a reason, both text; this has not: {entry}")
        if not reason.strip():
            raise ListError(f"{path}: {name} has no reason; say which internal of Gloo it tests")
        if name in found:
            raise ListError(f"{path} has {name} twice")
        found[name] = " ".join(reason.split())
    return found


def check_left_out(path, names, known):
    """Raises if the list names a test that does not exist. Tests of modules that this run has not are not looked at."""
    modules = {suites.module_of(name) for name in known}
    unknown = [name for name in names
               if name not in known and (suites.module_of(name) in modules
                                         or suites.module_of(name) not in suites.TEST_MODULES)]
    if unknown:
        raise ListError(f"{path} names tests that do not exist: {', '.join(unknown)}; correct or remove them")


def quick_subset(known, path=QUICK):
    """Those of the known tests that a pattern of quick.toml matches, in their order."""
    content = read_toml(path)
    patterns = content.get("tests")
    if set(content) != {"tests"} or not patterns:
        raise ListError(f"{path} must have a list `tests` of patterns, not empty, and nothing else")
    modules = {suites.module_of(name) for name in known}
    chosen = set()
    for pattern in patterns:
        found = fnmatch.filter(known, pattern)
        module = next((module for module in suites.TEST_MODULES if pattern.startswith(module + ".")), None)
        if not found and (module is None or module in modules):
            raise ListError(f"{path}: no test matches {pattern}; correct or remove it")
        chosen.update(found)
    return [name for name in known if name in chosen]
