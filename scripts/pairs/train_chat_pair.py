"""Trains the chat pair that edge-mtp ships: the reference pair, taught a few hundred short answers and to say what it does not know.

    python scripts/pairs/train_chat_pair.py --output /tmp/chat-pair --minutes 30 --drafter-minutes 10

Needs the `train` extra (pip install -e '.[train]'). Runs on a CPU within the given time.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from tokenizers import Tokenizer
from torch import nn

from edge_export.checkpoint.sources import reference_pair
from refpair import tokenizer as gemma_tokenizer
from refpair.checkpoint import load_drafter, load_target, load_tokenizer, log, save_model, write_measured
from refpair.drafter import answer_loss, draft_states, target_rows
from refpair.evaluate import measure_acceptance
from refpair.questions import HELD_OUT_PERCENT, SHARES, UNKNOWN, Conversations, Questions, Turn, facts
from refpair.target import train_for

# With names in braces for what was measured.
CARD = Path(__file__).parent / "refpair" / "chat_card.md"
KINDS = {
    **{"call": "functions and methods", "word": "keywords", "module": "modules", "idea": "ideas and terms", "pair": "differences"},
    **{"error": "errors", "howto": "how to, in Python", "tool": "how to, with edge-mtp", "say": "about edge-mtp", "talk": "small talk"},
    **{"unit": "units", "unknown": "what it does not know"},
}
STAGES = ("target", "drafter", "evaluate")
SEED = 20261125
LENGTH, BATCH = 128, 8
DRAFT_STEPS, DRAFT_LENGTH = 4, 3
ASKED = 60
END = "<turn|>"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a model begins, where it goes, and the tokenizer of both."""

    begin: Path
    output: Path
    tokenizer: Tokenizer


def place(output: Path, role: str) -> Place:
    """What is trained further: the model of this role in `output`, or the shipped one."""
    shipped = dict(zip(("target", "drafter"), reference_pair(), strict=True))[role]
    begin = output / role if (output / role).is_dir() else shipped
    return Place(begin=begin, output=output / role, tokenizer=load_tokenizer(shipped))


def save(model: nn.Module, where: Place) -> None:
    """Writes the model with its tokenizer."""
    save_model(model, where.output)
    if where.begin != where.output:
        gemma_tokenizer.copy(where.begin, where.output)
    # As instruction-tuned checkpoints have it: the end of a turn ends an answer. Greedy, as a model this small errs when it samples.
    ends = [where.tokenizer.token_to_id(token) for token in ("<eos>", END)]
    config = {"bos_token_id": 2, "do_sample": False, "eos_token_id": ends, "pad_token_id": 0}
    (where.output / "generation_config.json").write_text(json.dumps(config, indent=2) + "\n")


def train(model: nn.Module, minutes: float, peak: float, loss_of: Callable[[], torch.Tensor]) -> tuple[int, float]:
    """Takes steps of Adam for `minutes`, its rate by the clock; returns their number and their minutes of processor time."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=peak, betas=(0.9, 0.98), weight_decay=0.0)
    optimizer.param_groups[0]["peak"] = peak
    processor = time.process_time()
    steps = train_for(minutes, model, [optimizer], lambda _: loss_of(), warm_up=0.03, cool_down=0.5, report=log)
    return steps, (time.process_time() - processor) / 60


def target_stage(output: Path, minutes: float) -> None:
    """Teaches the reference target the answers: cross-entropy of the answers' tokens alone."""
    where = place(output, "target")
    model = load_target(where.begin)
    cap = model.config.final_logit_softcapping
    data = Conversations(where.tokenizer, Questions(SEED), LENGTH, SEED)

    def loss() -> torch.Tensor:
        ids, written = (torch.from_numpy(each) for each in data.batch(BATCH))
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1][written[:, 1:]]
        logits = cap * torch.tanh(model.lm_head(hidden).float() / cap)
        return nn.functional.cross_entropy(logits, ids[:, 1:][written[:, 1:]])

    training = train(model, minutes, 1.5e-3, loss)
    save(model, where)
    write_trained(output, "target", training, minutes, model)


def drafter_stage(output: Path, minutes: float) -> None:
    """Teaches the reference drafter to foresee these answers, on the trained target's rows."""
    where = place(output, "drafter")
    target, drafter = load_target(output / "target"), load_drafter(where.begin)
    target.requires_grad_(False)
    data = Conversations(where.tokenizer, Questions(SEED + 1), LENGTH, SEED + 1)

    def loss() -> torch.Tensor:
        ids, written = (torch.from_numpy(each) for each in data.batch(BATCH))
        return answer_loss(drafter, draft_states(drafter, target, ids, target_rows(target, ids), DRAFT_STEPS), ids, written)

    training = train(drafter, minutes, 1e-3, loss)
    save(drafter, where)
    write_trained(output, "drafter", training, minutes, drafter)


@torch.no_grad()
def evaluate_stage(output: Path) -> None:
    """Asks questions that were held out of training; an answer is right if every token is. Measures drafts on the right ones."""
    where = place(output, "target")
    target = load_target(where.output)
    drafter = load_drafter(output / "drafter") if (output / "drafter").is_dir() else None
    measured: dict[str, Any] = {"facts": len(facts()), "asked": ASKED, "right": {}, "wrong": []}
    proposed = accepted = 0
    for kind in SHARES:
        right, turns = 0, distinct(Questions(SEED + 2).turns(held_out=True, kind=kind), ASKED)
        for turn in turns:
            if not answers(target, where.tokenizer, turn):
                measured["wrong"].append([turn.question, reply(target, where.tokenizer, turn.question), turn.answer])
                continue
            right += 1
            if drafter is not None:
                counts = drafts_of(target, drafter, where.tokenizer, turn)
                proposed, accepted = proposed + counts[0], accepted + counts[1]
        measured["right"][kind] = [right, len(turns)]
        log({"kind": kind, "right": right, "of": len(turns)})
    measured["acceptance"] = round(accepted / proposed, 4) if proposed else None
    write_measured(output, "answers", measured)
    write_card(output, measured)


def distinct(turns: Iterator[Turn], count: int) -> list[Turn]:
    """The first `count` turns of different questions, or fewer where there are no more."""
    different: dict[str, Turn] = {}
    for _ in range(50 * count):
        if len(different) == count:
            break
        turn = next(turns)
        different.setdefault(turn.question, turn)
    return list(different.values())


def asked(tokenizer: Tokenizer, question: str) -> list[int]:
    """The prompt of a question, as the chat template writes it."""
    return [2, *tokenizer.encode(f"<|turn>user\n{question}<turn|>\n<|turn>model\n", add_special_tokens=False).ids]


def with_answer(tokenizer: Tokenizer, turn: Turn) -> tuple[list[int], torch.Tensor]:
    """The prompt, and prompt and answer [1, tokens]."""
    prompt = asked(tokenizer, turn.question)
    return prompt, torch.tensor([[*prompt, *tokenizer.encode(turn.answer + END, add_special_tokens=False).ids]])


def answers(target: Any, tokenizer: Tokenizer, turn: Turn) -> bool:
    """Whether greedy text is the answer: each of its tokens is the best one after those before it."""
    prompt, tokens = with_answer(tokenizer, turn)
    best = target(input_ids=tokens, use_cache=False).logits[0].argmax(-1)
    return bool((best[len(prompt) - 1 : -1] == tokens[0, len(prompt) :]).all())


def reply(target: Any, tokenizer: Tokenizer, question: str, limit: int = 80) -> str:
    """The target's greedy answer."""
    ids = torch.tensor([asked(tokenizer, question)])
    end = tokenizer.token_to_id(END)
    written = target.generate(ids, max_new_tokens=limit, do_sample=False, eos_token_id=end, pad_token_id=0)[0, ids.shape[1] :]
    return str(tokenizer.decode([token for token in written.tolist() if token != end]))


def drafts_of(target: Any, drafter: Any, tokenizer: Tokenizer, turn: Turn) -> tuple[int, int]:
    """Proposed and accepted drafts of DRAFT_LENGTH on an answer, with the sparse head."""
    prompt, tokens = with_answer(tokenizer, turn)
    measured = measure_acceptance(target, drafter, tokens.numpy(), len(prompt), DRAFT_LENGTH)
    return measured.rounds * DRAFT_LENGTH, sum(measured.by_position)


def write_card(output: Path, measured: dict[str, Any]) -> None:
    """Writes README.md from what the stages measured."""
    trained = {role: json.loads((output / f"{role}.measured.json").read_text()) for role in ("target", "drafter")}
    rows = "\n".join(f"| {KINDS[kind]} | {right} | {of} |" for kind, (right, of) in measured["right"].items())
    runs = {f"{role}_runs": " and ".join(f"{minutes:g}" for minutes in each["runs"]) for role, each in trained.items()}
    facts = {**trained, **runs, **measured, "rows": rows, "held": HELD_OUT_PERCENT, "unknown": UNKNOWN, "length": DRAFT_LENGTH}
    (output / "README.md").write_text(CARD.read_text().format(**facts))


def write_trained(output: Path, role: str, training: tuple[int, float], minutes: float, model: nn.Module) -> None:
    """Keeps what the training of a role took, in steps and minutes of processor time, with that of earlier runs into the same folder."""
    path = output / f"{role}.measured.json"
    before: dict[str, Any] = {"steps": 0, "runs": [], "processor_minutes": 0.0}
    if path.is_file():
        before = json.loads(path.read_text())
    steps = before["steps"] + training[0]
    measured = {
        "steps": steps,
        "tokens": steps * BATCH * LENGTH,
        "runs": [*before["runs"], minutes],
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "processor_minutes": round(before["processor_minutes"] + training[1], 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "seed": SEED,
    }
    write_measured(output, role, measured)


@click.command(context_settings={"show_default": True})
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Folder for target/, drafter/ and what was measured.")
@click.option("--minutes", default=30.0, help="Wall time for the target.")
@click.option("--drafter-minutes", default=10.0, help="Wall time for the drafter.")
@click.option("--stage", "stages", multiple=True, type=click.Choice(STAGES), default=STAGES, help="Run only these, in order.")
@click.option("--threads", default=1, help="Threads for torch.")
def main(output: Path, minutes: float, drafter_minutes: float, stages: tuple[str, ...], threads: int) -> None:
    """Train the chat pair, beginning with the shipped reference pair."""
    torch.manual_seed(SEED)
    torch.set_num_threads(threads)
    output.mkdir(parents=True, exist_ok=True)
    if "target" in stages:
        target_stage(output, minutes)
    if "drafter" in stages:
        drafter_stage(output, drafter_minutes)
    if "evaluate" in stages:
        evaluate_stage(output)


if __name__ == "__main__":
    main()
