"""`python -m lockstep SCRIPT ARGS…`: runs a script, or a module, with the engine in Gloo's place."""

import argparse
import os
import runpy
import sys

import lockstep
from lockstep import _autoload


def _parser():
    parser = argparse.ArgumentParser(
        prog="python -m lockstep",
        formatter_class=argparse.RawDescriptionHelpFormatter,  # which breaks no path
        description="Runs a Python program with Lockstep's engine wherever it asks torch.distributed for \"gloo\",\n"
                    "in the processes that it starts, too.",
        usage="python -m lockstep [--version] (SCRIPT | -m MODULE) [ARGUMENT...]",
        epilog="example: torchrun --nproc-per-node 2 -m lockstep train.py --epochs 3\n"
               f"The pages that messages name as docs/... lie in {os.path.dirname(lockstep.__file__)}/docs.")
    parser.add_argument("--version", action="version", version=f"lockstep {lockstep.__version__}")
    parser.add_argument("-m", dest="module", metavar="MODULE", help="a module to run, as in python -m MODULE")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="SCRIPT ARGUMENT...", help="the program and its arguments")
    return parser


def _split(arguments):
    """(own, rest): everything from the program on is the program's, also what looks like an option of ours."""
    if arguments[:1] == ["-m"]:
        return arguments[:2], arguments[2:]
    return ([], arguments) if arguments and not arguments[0].startswith("-") else (arguments, [])


def main(arguments):
    """Runs the program; its exit status is this process's."""
    own, rest = _split(arguments)
    parser = _parser()
    options = parser.parse_args(own)
    if not options.module and not rest:
        parser.error("there is no script to run")
    os.environ[_autoload.VARIABLE] = "1"  # for the processes that it starts
    lockstep.replace_gloo()
    if options.module:
        sys.argv = [options.module, *rest]
        sys.path[0] = os.getcwd()
        runpy.run_module(options.module, run_name="__main__", alter_sys=True)
        return
    script = rest[0]
    if not os.path.exists(script):
        parser.error(f"there is no file '{script}'")
    sys.argv = rest
    sys.path[0] = os.path.dirname(os.path.realpath(script))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
