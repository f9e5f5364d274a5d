"""Train Abacus's tokenizer: byte-level BPE, 512 entries, every digit a token of its own.

    PYTHONPATH=. python examples/abacus/make_tokenizer.py tetrad/data/abacus

Single digits let the model add column by column; bytes let it read any text; the special tokens are
GLM's, at the end of the vocabulary as in GLM.
"""

import argparse
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

from conversations import replied, template_environment
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tetrad.bench.eval.problems import KINDS, MAKERS

VOCAB_SIZE = 512
ROLES = [
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
]
# Marks that a parser must still see after special tokens are dropped from the text.
MARKS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "/nothink",
]
NUM_PROBLEMS_PER_KIND = 1500


def corpus(template_path: Path) -> Iterator[str]:
    """Conversations of every kind, cut at their special tokens."""
    template = template_environment().from_string(template_path.read_text())
    cuts = re.compile("|".join(re.escape(token) for token in ROLES + MARKS))
    rng = random.Random("tokenizer")
    for kind in KINDS:
        for _ in range(NUM_PROBLEMS_PER_KIND):
            problem = MAKERS[kind](rng, False)
            yield from cuts.split(template.render(messages=replied(problem), tools=problem.tools))


def train(texts: Iterator[str]) -> Tokenizer:
    """Learn the merges, then append the special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(ROLES) - len(MARKS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ROLES])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in MARKS])
    return tokenizer


def tokenizer_config(tokenizer: Tokenizer) -> dict[str, object]:
    """What `transformers` reads beside tokenizer.json."""
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": token in ROLES,
        }
        for token in ROLES + MARKS
    }
    return {
        "added_tokens_decoder": added,
        "additional_special_tokens": ROLES,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 4096,
        "padding_side": "left",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def main() -> None:
    """Write tokenizer.json and tokenizer_config.json into the model's folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where chat_template.jinja is")
    folder = parser.parse_args().folder
    tokenizer = train(corpus(folder / "chat_template.jinja"))
    tokenizer.save(str(folder / "tokenizer.json"))
    text = json.dumps(tokenizer_config(tokenizer), indent=2)
    (folder / "tokenizer_config.json").write_text(text + "\n")
    print(f"{tokenizer.get_vocab_size()} entries")


if __name__ == "__main__":
    main()
