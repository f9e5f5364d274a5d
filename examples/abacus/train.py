"""Train Abacus from scratch on one GPU, by the clock.

    PYTHONPATH=. python examples/abacus/train.py tetrad/data/abacus OUT_FOLDER --minutes 8.5

Three stages share one run. First attention is dense and the indexers learn to imitate it; then it
is restricted to the keys the indexers choose; last, the experts' weights are rounded to NVFP4 in
every pass, so that the network grows used to them. The learning rate is level first and falls to
zero over the second half. On a GPU a whole step is captured as one CUDA graph: the model is so
small that launching its kernels one by one would take longer than running them.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from attention import ModelConfig
from checkpoint import from_tensors, quantise_experts, save_bf16, to_tensors
from conversations import Batch, BatchMaker, Writer
from evaluate import Examiner, examine
from kernels import FAST
from model import SAMPLE_STRIDE, Abacus, Experts, Router
from nvfp4 import fake_quantise_experts
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tetrad.bench.eval.problems import KINDS

# Rows of each length in a step, and what the loss of each length counts.
ROWS = {128: 192, 256: 48, 640: 40}
SHARES = {128: 0.5, 256: 0.15, 640: 0.35}
MTP_SHARE, INDEX_SHARE = 0.15, 1.0
PEAK_LR, WARMUP_STEPS, LEVEL_UNTIL = 2e-3, 150, 0.5
SPARSE_FROM, QUANTISED_FROM, BIAS_FROZEN_FROM = 0.35, 0.6, 0.9
BIAS_STEP, BETAS, WEIGHT_DECAY = 1e-3, (0.9, 0.97), 0.05
MAX_GRAD_NORM = 1.0
LOG_EVERY = 50


class Steps(IterableDataset[list[Batch]]):
    """An endless stream of steps; each worker draws its own problems."""

    def __init__(self, folder: Path, rows: dict[int, int], seed: int) -> None:
        self.folder, self.rows, self.seed = folder, rows, seed

    def __iter__(self) -> Iterator[list[Tensor]]:
        worker = get_worker_info()
        rng = random.Random(f"{self.seed} {worker.id if worker else 0}")
        maker = BatchMaker(Writer.load(self.folder), rng)
        while True:
            batches = [maker.batch(rows, tokens) for tokens, rows in self.rows.items()]
            yield [torch.from_numpy(array) for batch in batches for array in batch]


@dataclass
class Losses:
    """Running tensors of one step, for the log."""

    language: Tensor
    draft: Tensor
    index: Tensor


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the positions of a mask."""
    return (values * mask).sum() / mask.sum().clamp_min(1)


def token_loss(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """Cross-entropy on the masked targets."""
    losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return masked_mean(losses, mask.flatten())


def losses_of(model: Abacus, ids: Tensor, documents: Tensor, mask: Tensor) -> Losses:
    """Next token, token after next, and the indexers' distance from attention."""
    output = model(ids, documents, with_drafts=True)
    assert output.drafts is not None
    assert output.draft_context is not None
    # A masked target never follows another document's token: no reply is the first of a document.
    language = token_loss(output.logits[:, :-1], ids[:, 1:], mask[:, 1:])
    after_next = mask[:, 2:] & (documents[:, 2:] == documents[:, :-2])
    draft = token_loss(output.drafts[:, :-2], ids[:, 2:], after_next)
    taught = (documents >= 0)[:, output.context.sampled]
    index = [
        masked_mean(loss, taught)
        for context in (output.context, output.draft_context)
        for loss in context.index_losses()
    ]
    return Losses(language, draft, torch.stack(index).mean())


def parameter_groups(model: Abacus) -> list[dict[str, object]]:
    """Weight decay for matrices only; the embedding is a table."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        plain = parameter.dim() < 2 or "embed_tokens" in name
        (others if plain else matrices).append(parameter)
    return [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": others, "weight_decay": 0.0},
    ]


@dataclass
class Trainer:
    """One model, its optimizer and its stage."""

    model: Abacus
    device: torch.device
    rows: dict[int, int]
    graph: torch.cuda.CUDAGraph | None = None
    logged: Tensor = field(init=False)

    def __post_init__(self) -> None:
        on_gpu = self.device.type == "cuda"
        self.lr = torch.tensor(0.0, device=self.device)
        self.bias_step = torch.tensor(BIAS_STEP, device=self.device)
        self.logged = torch.zeros(5, device=self.device)
        self.optimizer = torch.optim.AdamW(
            parameter_groups(self.model),
            lr=self.lr,
            betas=BETAS,
            capturable=on_gpu,
            fused=on_gpu,
        )
        named = list(self.model.named_parameters())
        self.clipped = [parameter for name, parameter in named if "indexer" not in name]
        self.routers = [module for module in self.model.modules() if isinstance(module, Router)]
        self.experts = [module for module in self.model.modules() if isinstance(module, Experts)]
        self.buffers = [
            torch.zeros(num_rows, num_tokens, dtype=dtype, device=self.device)
            for num_tokens, num_rows in self.rows.items()
            for dtype in (torch.int64, torch.int64, torch.bool)
        ]

    def update(self) -> None:
        """One optimizer step on what lies in the buffers."""
        self.optimizer.zero_grad(set_to_none=True)
        self.logged.zero_()
        for part, num_tokens in enumerate(self.rows):
            with torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False):
                found = losses_of(self.model, *self.buffers[3 * part : 3 * part + 3])
            wanted = found.language + MTP_SHARE * found.draft + INDEX_SHARE * found.index
            (SHARES[num_tokens] * wanted).backward()
            self.logged[part] += found.language.detach()
            self.logged[3] += found.draft.detach() * SHARES[num_tokens]
            self.logged[4] += found.index.detach() * SHARES[num_tokens]
        torch.nn.utils.clip_grad_norm_(self.clipped, MAX_GRAD_NORM, foreach=True)
        self.optimizer.step()
        self.balance()

    @torch.no_grad()
    def balance(self) -> None:
        """Raise the bias of experts with too few tokens, lower it for those with too many."""
        for router in self.routers:
            scarce = (router.loads.mean() - router.loads).sign()
            router.e_score_correction_bias += self.bias_step * scarce
            router.loads.zero_()

    def enter(self, sparse: bool, quantised: bool) -> None:
        """Switch the stage; the old graph no longer describes the step."""
        self.model.sparse = sparse
        for experts in self.experts:
            experts.fake_quantise = fake_quantise_experts if quantised else None
        self.graph = None

    def fill(self, arrays: list[Tensor]) -> None:
        """Copy a step's batches where the step reads them."""
        for buffer, array in zip(self.buffers, arrays, strict=True):
            buffer.copy_(array, non_blocking=True)

    def step(self, arrays: list[Tensor]) -> None:
        """Run one step, captured where that is possible."""
        self.fill(arrays)
        self.model.sample_offset.fill_(random.randrange(SAMPLE_STRIDE))
        if self.device.type != "cuda":
            self.update()
            return
        if self.graph is None:
            self.capture()
        else:
            self.graph.replay()

    def capture(self) -> None:
        """Three ordinary steps on a side stream, as a recording asks for, then the recording."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.update()
        torch.cuda.current_stream().wait_stream(stream)
        self.optimizer.zero_grad(set_to_none=True)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.update()


def learning_rate(progress: float, num_steps: int) -> float:
    """Up, level, then straight down to zero."""
    rising = min(1.0, (num_steps + 1) / WARMUP_STEPS)
    falling = min(1.0, (1.0 - progress) / (1.0 - LEVEL_UNTIL))
    return PEAK_LR * rising * max(0.0, falling)


@dataclass
class Clock:
    """How far the run is, in its own time."""

    seconds: float
    began: float = field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began

    @property
    def progress(self) -> float:
        """0 at the start, 1 at the end."""
        return min(1.0, self.elapsed / self.seconds)


def log_line(trainer: Trainer, clock: Clock, num_steps: int) -> str:
    """Losses by row length, and the speed so far."""
    *language, draft, index = trainer.logged.tolist()
    tokens = sum(rows * length for length, rows in trainer.rows.items()) * num_steps
    record = {
        "step": num_steps,
        "seconds": round(clock.elapsed, 1),
        "progress": round(clock.progress, 3),
        "loss": dict(zip(trainer.rows, (round(x, 4) for x in language), strict=True)),
        "draft": round(draft, 4),
        "index": round(index, 4),
        "tokens_per_s": round(tokens / clock.elapsed),
    }
    return json.dumps(record)


def train(trainer: Trainer, loader: DataLoader[list[Tensor]], clock: Clock, out: Path) -> int:
    """Until the clock has run down; returns the number of steps."""
    stage, num_steps, log = (False, False), 0, (out / "log.jsonl").open("a")
    trainer.enter(*stage)
    for arrays in loader:
        progress = clock.progress
        if progress >= 1.0:
            break
        wanted = (progress >= SPARSE_FROM, progress >= QUANTISED_FROM)
        if wanted != stage:
            stage = wanted
            trainer.enter(*stage)
        trainer.lr.fill_(learning_rate(progress, num_steps))
        if progress >= BIAS_FROZEN_FROM:
            trainer.bias_step.zero_()
        trainer.step(arrays)
        num_steps += 1
        if num_steps % LOG_EVERY == 0:
            line = log_line(trainer, clock, num_steps)
            print(line, flush=True)
            log.write(line + "\n")
            log.flush()
    return num_steps


def report(trainer: Trainer, folder: Path, out: Path, count: int) -> None:
    """Examine the bf16 weights as they are and with NVFP4 experts."""
    tensors = to_tensors(trainer.model)
    trainer.enter(sparse=True, quantised=False)
    judge = Abacus(trainer.model.config).to(trainer.device)
    examiner = Examiner(judge, Writer.load(folder), trainer.device, tokens_per_batch=65536)
    results = {}
    for name, weights in (("nvfp4", quantise_experts(tensors)), ("bf16", tensors)):
        from_tensors(weights, judge)
        results[name] = [score.row() for score in examine(examiner, KINDS, count)]
        for row in results[name]:
            print(name, json.dumps(row), flush=True)
    (out / "scores.json").write_text(json.dumps(results, indent=1) + "\n")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="with config.json and tokenizer.json")
    parser.add_argument("out", type=Path, help="for weights, log and scores")
    parser.add_argument("--minutes", type=float, default=8.5)
    parser.add_argument("--workers", type=int, default=12, help="processes that make data")
    parser.add_argument("--count", type=int, default=300, help="held-out problems of each kind")
    parser.add_argument("--shards", type=int, default=1, help="files to spread the weights over")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="rows of a step, relative")
    return parser.parse_args()


def main() -> None:
    """Train, save, examine."""
    arguments = parse_arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = {tokens: max(1, round(count * arguments.scale)) for tokens, count in ROWS.items()}
    model = Abacus(ModelConfig.load(arguments.folder), FAST)
    model.initialise(arguments.seed)
    trainer = Trainer(model.to(device).train(), device, rows)
    steps = Steps(arguments.folder, rows, arguments.seed)
    loader = DataLoader(
        steps, batch_size=None, num_workers=arguments.workers, pin_memory=device.type == "cuda"
    )
    clock = Clock(60 * arguments.minutes)
    num_steps = train(trainer, loader, clock, arguments.out)
    print(f"{num_steps} steps in {clock.elapsed:.0f} s", flush=True)
    save_bf16(to_tensors(model), arguments.folder, arguments.out, arguments.shards)
    if arguments.count:
        report(trainer, arguments.folder, arguments.out, arguments.count)


if __name__ == "__main__":
    main()
