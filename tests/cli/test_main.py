"""The door: help, version, mistakes as sentences, exit codes."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys

import pytest

import tetrad as package
from tests.house.all_flags import all_flags
from tetrad.cli import sglang_flags, vllm_flags
from tetrad.cli.spelling import edits, meant
from tetrad.core.config import ServeConfig
from tetrad.core.errors import BenchFailure, CapacityError, ConfigError, EngineDiedError

VERBS = ("serve", "chat", "bench", "bench serve", "bench kernels", "eval", "quantize", "doctor")
HEAVY = ("torch", "aiohttp", "fastapi", "uvicorn", "tokenizers", "transformers", "numpy")

LOOK = """
import json, sys
from tetrad.cli.main import main
sys.argv = ["tetrad", *sys.argv[1:]]
code = main()
print(json.dumps([code, sorted(sys.modules)]))
"""


def modules_after(*arguments: str) -> list[str]:
    """What a fresh process has imported after running a command line."""
    done = subprocess.run(
        [sys.executable, "-c", LOOK, *arguments], capture_output=True, text=True, check=True
    )
    code, modules = json.loads(done.stdout.splitlines()[-1])
    assert code == 0
    return list(modules)


def test_help_imports_no_verb_and_nothing_heavy():
    """`tetrad --help` must be there at once: it reads no configuration either."""
    modules = modules_after("--help")
    assert "tetrad.cli.main" in modules
    unwanted = [m for m in modules if m.split(".")[0] in HEAVY or m.startswith("tetrad.cli.serve")]
    assert not unwanted
    assert "pydantic" not in modules


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_imports_nothing_heavy(verb: str):
    unwanted = [m for m in modules_after(*verb.split(), "--help") if m in HEAVY]
    assert not unwanted


def test_the_package_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "tetrad", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"tetrad {package.__version__}\n"


@pytest.mark.parametrize(
    ("verb", "usage"),
    [
        ("serve", "tetrad serve [OPTIONS] [MODEL]"),
        ("chat", "tetrad chat [OPTIONS] [PROMPT]"),
        ("bench compare", "tetrad bench compare [OPTIONS] A B"),
    ],
)
def test_help_names_what_has_its_place(tetrad, verb: str, usage: str):
    _, out, _ = tetrad(*verb.split(), "--help")
    assert out.splitlines()[0].rstrip() == f"Usage: {usage}"


def test_numbers_are_finite_unless_infinity_means_something(tetrad):
    code, _, err = tetrad("serve", "--drain-timeout", "inf")
    assert (code, err) == (2, "error: --drain-timeout inf: input should be a finite number.\n")
    code, _, err = tetrad("bench", "serve", "--request-rate", "nan")
    assert (code, err) == (2, "error: --request-rate nan: input should be greater than 0.\n")
    code, _, err = tetrad("serve", "--rehearse", "")
    assert (code, "a layout was expected" in err) == (2, True)


def test_version(tetrad):
    assert tetrad("--version") == (0, f"tetrad {package.__version__}\n", "")


def test_help_lists_the_verbs(tetrad):
    code, out, _ = tetrad("--help")
    assert code == 0
    for verb in ("serve", "chat", "bench", "eval", "quantize", "doctor"):
        assert f" {verb} " in out
    assert tetrad()[:2] == (code, out)


def test_help_of_serve_has_every_field_with_group_range_and_default():
    """On a wide terminal: some of SGLang's names are long."""
    command = [sys.executable, "-m", "tetrad", "serve", "--help"]
    env = os.environ | {"COLUMNS": "160"}
    out = subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout
    for name in ServeConfig.model_fields:
        assert f"--{name.replace('_', '-')}" in out
    for group in ("Model", "Scheduling", "Memory", "Kernels", "Server"):
        assert f"─ {group} ─" in out
    text = " ".join(out.replace("│", " ").split())
    assert "[at least 1, at most 65,536]" in text
    assert "[choices: auto, cpu, cuda] [default: auto]" in text
    assert "[env var: TETRAD_API_KEY]" in text


@pytest.mark.parametrize("verb", [("chat",), ("eval",), ("bench", "serve"), ("bench", "sweep")])
def test_every_client_takes_a_key_from_either_variable(tetrad, verb: tuple[str, ...]):
    text = " ".join(tetrad(*verb, "--help")[1].replace("│", " ").split())
    assert "[env var: TETRAD_API_KEY, OPENAI_API_KEY]" in text


def test_flags_are_the_fields_and_their_aliases():
    flags = all_flags()
    assert flags == sorted(flags)
    assert {f for f in flags if f.startswith("serve:")} == {
        f"serve:{flag}"
        for name, field in ServeConfig.model_fields.items()
        for flag in ("--" + name.replace("_", "-"), *field.json_schema_extra["aliases"])  # type: ignore
    }
    for flag in ("bench/serve:--random-input-len", "quantize:--source", "doctor:--json"):
        assert flag in flags


def test_no_flag_of_serve_is_said_to_be_missing():
    flags = [flag.removeprefix("serve:") for flag in all_flags() if flag.startswith("serve:")]
    assert flags
    assert not [flag for flag in flags if sglang_flags.reason(flag) is not None]
    assert not [flag for flag in flags if vllm_flags.reason(flag) is not None]
    assert not set(vllm_flags.NAMES) & set(vllm_flags.REASONS)
    assert sglang_flags.reason("--dpx") is None


def test_what_a_foreign_flag_is_told_to_be_here_is_a_flag():
    flags = {flag.removeprefix("serve:") for flag in all_flags() if flag.startswith("serve:")}
    assert set(vllm_flags.NAMES.values()) <= flags
    told = " ".join([*vllm_flags.REASONS.values(), *sglang_flags.REASONS.values()])
    named = set(re.findall(r"--[a-z][a-z-]+", told))
    assert "--chunked-prefill-size" in named
    assert named <= flags


CARRIED_OVER = (
    *("--enable-ep-moe", "--enable-deepep-moe", "--fp8-gemm-backend", "--fp4-gemm-backend"),
    *("--skip-server-warmup", "--disable-shared-experts-fusion", "--enable-flashinfer-autotune"),
    *("--cuda-graph-backend-decode", "--disable-piecewise-cuda-graph", "--decode-log-interval"),
    *("--attn-dp-size", "--node-rank", "--base-gpu-id", "--model-loader-extra-config"),
    *("--enable-expert-parallel", "--data-parallel-size-local", "--kv-offloading-size"),
    *("--calculate-kv-scales", "--enable-prompt-tokens-details", "--headless", "--mm-processor-x"),
)
"""What launch scripts for these models carry, of SGLang and of vLLM."""


def test_a_flag_is_meant_by_a_typo_or_an_abbreviation_and_by_nothing_else():
    known = ["--port", "--tp", "--max-total-tokens", "--max-running-requests"]
    assert meant("--prot", known) == "--port"
    assert meant("--max-run-req", known) == "--max-running-requests"
    assert meant("--running-requests", known) == "--max-running-requests"
    assert [meant(flag, known) for flag in ("--max", "--max-model-len", "--xx", "-")] == [None] * 4
    assert meant("--port" + "t" * 200, known) is None
    assert edits("kitten", "sitting") == 3


def test_serve_gets_its_configuration(tetrad, monkeypatch):
    seen: list[ServeConfig] = []

    def run(config: ServeConfig) -> int:
        seen.append(config)
        return 3

    monkeypatch.setattr("tetrad.server.process.launch.run", run)
    arguments = ["model", "--tp-size=1", "--port", "7", "--disable-radix-cache"]
    assert tetrad("serve", *arguments)[0] == 3
    monkeypatch.setenv("TETRAD_API_KEY", "secret")
    assert tetrad("serve", "--model-path", "other")[0] == 3
    first, second = seen
    assert (str(first.model), first.port, first.disable_radix_cache) == ("model", 7, True)
    assert first.api_key is None
    assert (str(second.model), second.api_key) == ("other", "secret")
    assert second.port == ServeConfig().port


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["serv"], 'Unknown command "serv". Did you mean "serve"?'),
        (["serve", "--portt", "1"], "Unknown option: --portt. Did you mean --port?"),
        (["serve", "--max-runing-requests=4"], "Did you mean --max-running-requests?"),
        (["serve", "--max-running"], "Unknown option: --max-running."),
        (["serve", "--port", "x"], 'Invalid value for --port: unable to convert "x" into int.'),
        (["serve", "--port", "70000"], "--port 70000: input should be less than or equal to 65535"),
        (["serve", "--device", "gpu"], 'Choose from: "auto", "cpu", "cuda".'),
        (["quantize", "a", "--target"], "--target requires an argument."),
        (["serve", "--port"], "--port requires an argument."),
        (["serve", "a", "b"], "Too many words, from 'b' on"),
        (["chat", "What", "is", "3+5"], "from 'is 3+5' on; quote text that has several words."),
        (["serve", "--trust-remote-code"], "tetrad serve has no --trust-remote-code: code in"),
        (["serve", "--dp-size=2"], "tetrad serve has no --dp-size: this version runs on one"),
        (["serve", "--speculative-algorithm", "EAGLE"], "this version has no speculative decoding"),
        (["serve", "--max-model-len", "9"], "no --max-model-len: its name here is --context-len"),
        (["serve", "--max-num-seqs=4"], "--max-num-seqs: its name here is --max-running-requests"),
        (["serve", "--enable-auto-tool-choice"], "tool calls are read whenever a request names"),
        (["serve", "--schedule-policy", "lpm"], "requests go first come, first served, or with"),
        *((["serve", flag, "x"], f"tetrad serve has no {flag}: ") for flag in CARRIED_OVER),
        (["serve", "--tokenizer-worker-num=4"], "--api-workers sets the number of processes"),
        (["serve", "--attn-dp-size=8"], "no --attn-dp-size: this version runs on one device"),
        (["serve", "--max-wood"], "Unknown option: --max-wood. `tetrad serve --help` lists all."),
        (["serve", "--quantization", "modelopt_fp4"], "each tensor is read from the checkpoint"),
        (["bench", "serve", "--profil"], "`tetrad bench serve --help` lists all."),
        (["bench", "serve", "--profile"], "has no --profile: a profiled run is not a measurement"),
        (["bench", "serve", "--lora-n=a"], "has no --lora-name: on a server with adapters"),
        (["chat", "--url", "u", "--model", "m"], "--model starts a server and --url uses one"),
        (["eval", "--kinds", "sum2", "sum22"], "--kinds sum2 sum22: there is no kind 'sum22'."),
        (["eval", "--kinds", "x"], "there is no kind 'x'. There are "),
        (["eval", "--kinds", "sum22"], "there is no kind 'sum22'. Did you mean 'sum2'?\n"),
        (["bench", "serve", "--random-in-len", "4"], "Did you mean --random-input-len?"),
        (["bench", "serve", "--output-file", "no/such/f"], "there is no such folder"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(arguments: list[str], sentence: str, tetrad):
    code, out, err = tetrad(*arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert sentence in err
    assert err.count("\n") == 1
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("said"), 2),
        (CapacityError("said"), 3),
        (EngineDiedError("said"), 5),
        (BenchFailure("said"), 6),
    ],
)
def test_errors_of_ours_are_told_and_have_their_exit_code(error, code: int, tetrad, monkeypatch):
    def fail(config):
        raise error

    monkeypatch.setattr("tetrad.server.process.launch.run", fail)
    assert tetrad("serve") == (code, "", "error: said\n")


def test_a_bug_keeps_its_traceback_and_ctrl_c_is_130(tetrad, monkeypatch):
    def interrupted(config):
        raise KeyboardInterrupt

    def broken(config):
        raise ZeroDivisionError

    monkeypatch.setattr("tetrad.server.process.launch.run", interrupted)
    assert tetrad("serve") == (130, "", "")
    monkeypatch.setattr("tetrad.server.process.launch.run", broken)
    with pytest.raises(ZeroDivisionError):
        tetrad("serve")


def test_a_reader_that_leaves_is_no_error():
    """As in `tetrad doctor --json | head -1`, where head closes the pipe early."""
    script = (
        "import sys\nimport tetrad.server.process.launch as launch\n"
        "launch.run = lambda config: [print('x' * 100) for _ in range(10000)] and 0\n"
        "from tetrad.cli.main import main\nsys.argv = ['tetrad', 'serve']\nsys.exit(main())"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.readline()
        child.stdout.close()
        complaint = child.stderr.read()
    assert (child.returncode, complaint) == (141, b"")


def test_closed_standard_streams_are_open_again():
    """As in `tetrad serve <&- >&- 2>&-`: else the next socket is number 2, and gets warnings."""
    script = (
        "import os, sys\nfrom tetrad.cli.main import open_standard_streams\n"
        "open_standard_streams()\nprint('out')\nprint('err', file=sys.stderr)\n"
        "assert sys.stdin.read() == ''\nassert os.open(os.devnull, os.O_RDONLY) > 2"
    )
    command = shlex.join([sys.executable, "-c", script])
    assert subprocess.run(["sh", "-c", f"exec {command} <&- >&- 2>&-"]).returncode == 0
