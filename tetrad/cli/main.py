"""`tetrad`: finds the verb, runs it, and turns what went wrong into a sentence and an exit code.

Verbs are named by import path, so that `tetrad --help` imports none of them.
"""

from __future__ import annotations

import os
import sys

from cyclopts import (
    App,
    CycloptsError,
    MissingArgumentError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from tetrad import __version__
from tetrad.bench.figures.definitions import help_text
from tetrad.cli import bench_flags, sglang_flags, vllm_flags
from tetrad.cli.spelling import meant
from tetrad.core.errors import TetradError, UserError

INTERRUPTED = 130
BROKEN_PIPE = 141

app = App(
    name="tetrad",
    help="Serve NVFP4 mixture-of-experts models of the GLM-5 class, and measure them.",
    version=f"tetrad {__version__}",
    help_format="plaintext",
    version_format="plaintext",
    suppress_keyboard_interrupt=False,
)
app.command(
    "tetrad.cli.serve:serve",
    name="serve",
    help="Serve a model over HTTP: OpenAI's API and SGLang's native routes.\n\n"
    "Without MODEL it serves Abacus, the tiny arithmetic model that ships with Tetrad. On SIGTERM "
    "open requests may finish.",
    usage="Usage: tetrad serve [OPTIONS] [MODEL]",
    sort_key=1,
)
app.command(
    "tetrad.cli.chat:chat",
    name="chat",
    usage="Usage: tetrad chat [OPTIONS] [PROMPT]",
    help="Ask a model one question, or chat with it; starts a server if none is running.",
    sort_key=2,
)
app.command(
    bench := App(name="bench", help="Benchmark a server, kernels, or one rank.", sort_key=3)
)
bench.command(
    "tetrad.cli.bench_serve:bench_serve",
    name="serve",
    help="Put load on a running server and print throughput and latencies.\n\n"
    "Exit code 0: the figures are valid. 6: more requests failed than --allow-failures permits, "
    "the client was too slow (INVALID), or no server answered. 130: interrupted.",
    help_epilogue=help_text(),
)
bench.command(
    "tetrad.cli.bench_sweep:bench_sweep",
    name="sweep",
    help="Put load on a running server at each of several points; can be resumed.\n\n"
    "Exit code 0: every point is valid. 6: some are not; all are in the table. 130: "
    "interrupted.",
)
bench.command(
    "tetrad.cli.bench_compare:bench_compare",
    name="compare",
    usage="Usage: tetrad bench compare [OPTIONS] A B",
    help="Put the same load on two servers alternately, and say whether they differ significantly.",
)
bench.command(
    "tetrad.cli.bench_kernels:bench_kernels",
    name="kernels",
    help="Time every kernel at a real model's shapes, against ceilings measured in the same run.",
)
bench.command(
    "tetrad.cli.bench_rank:bench_rank",
    name="rank",
    help="Run one rank of a layout alone with random weights and time its step against its limit.",
)
app.command(
    "tetrad.cli.eval:evaluate",
    name="eval",
    help="Measure a model's exact-match accuracy on held-out problems.\n\n"
    "Exit code 0: every request was answered, and enough of them correctly, at least one. 6: "
    "otherwise.",
    sort_key=4,
)
app.command(
    "tetrad.cli.quantize:quantize",
    name="quantize",
    usage="Usage: tetrad quantize [OPTIONS] SOURCE TARGET",
    help="Quantise a bf16 checkpoint to NVFP4.",
    sort_key=5,
)
app.command(
    "tetrad.cli.doctor:doctor",
    name="doctor",
    help="Show this machine, which backends run on it, and why others do not.",
    sort_key=6,
)


def main() -> int:
    """Entry point of the console script. Returns the exit code; bugs keep their traceback."""
    open_standard_streams()
    try:
        return run(sys.argv[1:])
    except TetradError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has left; without this the interpreter would complain when it flushes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def open_standard_streams() -> None:
    """Replace closed ones (`tetrad serve 2>&-`): who closes one wants silence, and the next file or
    socket must not get its number, since libraries write there by number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # The lowest free number is the closed one's own.
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def run(tokens: list[str]) -> int:
    """Run one command line. A mistake in it is a UserError that names what would work."""
    try:
        result = app(tokens, exit_on_error=False, print_error=False, result_action="return_value")
    except UnknownOptionError as error:
        if (longer := _expand(tokens, error)) is not None:
            return run(longer)
        raise UserError(_unknown(error)) from None
    except UnusedCliTokensError as error:
        words = " ".join(error.unused_tokens or ())
        raise UserError(
            f"Too many words, from {words!r} on; quote text that has several words."
        ) from None
    except MissingArgumentError as error:
        raise UserError(_missing(error)) from None
    except CycloptsError as error:
        raise UserError(_sentence(error)) from None
    return result if isinstance(result, int) else 0


def _expand(tokens: list[str], error: UnknownOptionError) -> list[str] | None:
    """Replace an abbreviated flag of `bench` by the one it begins, as argparse tools accept it."""
    short = (error.token.keyword or "").partition("=")[0]
    if not error.command_chain or error.command_chain[0] != "bench" or len(short) < 4:
        return None
    flags = {name for argument in error.argument_collection for name in argument.names}
    longer = [name for name in flags if name.startswith(short)]
    if error.command_chain[1:] in (("serve",), ("sweep",)) and (
        same := bench_flags.full_name(short)
    ):
        # What SGLang understands by it goes before flags that only Tetrad has.
        longer = [same] if same in flags else []
    if len(longer) != 1:
        return None
    return [_replace(token, short, longer[0]) for token in tokens]


def _replace(token: str, short: str, longer: str) -> str:
    flag, equals, value = token.partition("=")
    return longer + equals + value if flag == short else token


def _unknown(error: UnknownOptionError) -> str:
    """What stands for a flag of SGLang or vLLM or why nothing does, else the nearest one and where
    to look."""
    verb = " ".join(error.command_chain or ())
    flag = (error.token.keyword or error.token.value).partition("=")[0]
    foreign = sglang_flags.reason(flag) or vllm_flags.reason(flag)
    if verb == "serve" and foreign is not None:
        return f"tetrad serve has no {flag}: {foreign}."
    is_load = verb in ("bench serve", "bench sweep", "bench compare")
    if is_load and (why := bench_flags.reason(flag)) is not None:
        return f"tetrad {verb} has no {bench_flags.full_name(flag)}: {why}."
    known = (name for argument in error.argument_collection for name in argument.names)
    near = meant(flag, known)
    hint = "" if near is None else f" Did you mean {near}?"
    return f"Unknown option: {flag}.{hint} `tetrad {verb} --help` lists all."


def _missing(error: MissingArgumentError) -> str:
    """A word of the command line, as its help shows it, or the value of a flag."""
    wanted, form = error.argument, error.app.usage if error.app is not None else None
    if error.keyword or not form or wanted is None or not wanted.field_info.is_positional:
        return _sentence(error)
    return f"{wanted.name.lstrip('-').upper()} is missing: {form.removeprefix('Usage: ')}."


def _sentence(error: CycloptsError) -> str:
    return " ".join(str(error).split())
