"""Exact match of greedy answers on held-out problems, with the training model.

    PYTHONPATH=. python examples/abacus/evaluate.py tetrad/data/abacus --count 200
    PYTHONPATH=. python examples/abacus/evaluate.py BF16_FOLDER

A reply is what greedy decoding would say, but most replies need one pass only: if at every position
of the right reply (reasoning and end token included) the most likely token is the right one, greedy
decoding says exactly that. The few others are decoded token by token, since other words can lead to
the same answer. "drafts" is how often the MTP layer foresaw the token after next.
"""

import argparse
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from attention import ModelConfig
from checkpoint import from_tensors, read_tensors
from conversations import OBSERVATION, PAD, USER, Writer
from model import Abacus
from torch import Tensor

from tetrad.bench.eval.problems import KINDS, Problem, held_out_problems, is_correct

CALL = re.compile(r"<tool_call>([^<]*)(.*?)</tool_call>", re.DOTALL)
ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key><arg_value>(.*?)</arg_value>", re.DOTALL)


@dataclass(frozen=True)
class Score:
    """What was found for one kind of problem."""

    kind: str
    count: int
    correct: int
    reply_tokens: int
    drafts_right: int
    misses: list[tuple[str, str]]  # what was expected, what was said

    def row(self) -> dict[str, Any]:
        """For tables and logs."""
        return {
            "kind": self.kind,
            "count": self.count,
            "exact": round(self.correct / self.count, 4),
            "draft_acceptance": round(self.drafts_right / max(self.reply_tokens, 1), 4),
            "misses": self.misses[:3],
        }


def parse(text: str) -> tuple[str, list[dict[str, Any]]]:
    """The visible answer and the tool calls of a reply."""
    visible = text.split("</think>")[-1]
    calls = [
        {"name": name, "arguments": dict(ARGUMENT.findall(arguments))}
        for name, arguments in CALL.findall(visible)
    ]
    return CALL.sub("", visible).strip(), calls


def grouped(lengths: Sequence[int], tokens_per_batch: int) -> Iterator[list[int]]:
    """Indices in batches of similar length."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[index] > tokens_per_batch:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


@dataclass
class Examiner:
    """Asks a model held-out problems."""

    model: Abacus
    writer: Writer
    device: torch.device
    tokens_per_batch: int = 8192
    max_new_tokens: int = 160

    def padded(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Right-padded ids; padding is never seen by what stands before it."""
        width = max(map(len, rows))
        pad = self.writer.token(PAD)
        table = [[*row, *[pad] * (width - len(row))] for row in rows]
        return torch.tensor(table, device=self.device)

    def follow(self, wholes: list[list[int]], starts: list[int]) -> tuple[list[bool], int, int]:
        """Whether each reply is greedy's own; reply tokens, and how many the MTP layer foresaw."""
        agrees, num_tokens, num_right = [False] * len(wholes), 0, 0
        for batch in grouped([len(ids) for ids in wholes], self.tokens_per_batch):
            ids = self.padded([wholes[i] for i in batch])
            output = self.model(ids, with_drafts=True)
            assert output.drafts is not None
            right = (output.logits.argmax(-1)[:, :-1] == ids[:, 1:]).cpu()
            drafted = (output.drafts.argmax(-1)[:, :-2] == ids[:, 2:]).cpu()
            for row, index in enumerate(batch):
                start, end = starts[index], len(wholes[index])
                agrees[index] = bool(right[row, start - 1 : end - 1].all())
                num_tokens += end - start - 1
                num_right += int(drafted[row, start - 1 : end - 2].sum())
        return agrees, num_tokens, num_right

    def decode(self, prompts: list[list[int]]) -> list[str]:
        """Greedy decoding of all prompts at once, without a cache."""
        if not prompts:
            return []
        ends = torch.tensor([self.writer.token(token) for token in (PAD, USER, OBSERVATION)])
        ids = self.padded([[*prompt, *[0] * self.max_new_tokens] for prompt in prompts])
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        rows = torch.arange(len(prompts), device=self.device)
        done = torch.zeros(len(prompts), dtype=torch.bool, device=self.device)
        for _ in range(self.max_new_tokens):
            logits = self.model(ids[:, : int(lengths.max())]).logits[rows, lengths - 1]
            tokens = logits.argmax(-1)
            done |= torch.isin(tokens, ends.to(self.device))
            if bool(done.all()):
                break
            ids[rows, lengths] = tokens
            lengths += (~done).long()
        said = [
            row[len(prompt) : length]
            for row, prompt, length in zip(ids.tolist(), prompts, lengths.tolist(), strict=True)
        ]
        return [self.writer.tokenizer.decode(part, skip_special_tokens=False) for part in said]

    @torch.no_grad()
    def score(self, kind: str, problems: Sequence[Problem], max_decoded: int = 100) -> Score:
        """Exact match on one kind. Beyond `max_decoded` disagreements the rest count as wrong."""
        prompts = [self.writer.encode(self.writer.prompt(problem)) for problem in problems]
        wholes = [self.writer.encode(self.writer.whole(problem)) for problem in problems]
        agrees, num_tokens, num_right = self.follow(wholes, [len(ids) for ids in prompts])
        wrong = [index for index, agreed in enumerate(agrees) if not agreed]
        misses, correct = [], len(problems) - len(wrong)
        decoded = wrong[:max_decoded]
        for index, said in zip(decoded, self.decode([prompts[i] for i in decoded]), strict=True):
            problem = problems[index]
            if is_correct(kind, problem.expected, *parse(said)):
                correct += 1
            else:
                misses.append((problem.expected, said))
        return Score(kind, len(problems), correct, num_tokens, num_right, misses)


def examine(examiner: Examiner, kinds: Sequence[str], count: int, seed: int = 0) -> list[Score]:
    """All kinds in turn."""
    examiner.model.eval()
    examiner.model.sparse = True
    return [examiner.score(kind, list(held_out_problems(kind, count, seed))) for kind in kinds]


def main() -> None:
    """Print one line a kind, and one JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="a checkpoint with its tokenizer")
    parser.add_argument("--count", type=int, default=200, help="problems of each kind")
    parser.add_argument("--kinds", nargs="+", default=KINDS)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    model = Abacus(ModelConfig.load(arguments.folder)).to(device)
    from_tensors(read_tensors(arguments.folder), model)
    tokens_per_batch = 65536 if on_gpu else 8192
    examiner = Examiner(model, Writer.load(arguments.folder), device, tokens_per_batch)
    began = time.monotonic()
    rows = []
    for kind in arguments.kinds:
        [score] = examine(examiner, [kind], arguments.count, arguments.seed)
        rows.append(score.row())
        row = rows[-1]
        print(f"{kind:20} {row['exact']:8.2%}  drafts {row['draft_acceptance']:7.2%}", flush=True)
        for expected, said in row["misses"]:
            print(f"    expected {expected!r}, said {said!r}")
    print(json.dumps({"seconds": round(time.monotonic() - began, 1), "rows": rows}))


if __name__ == "__main__":
    main()
