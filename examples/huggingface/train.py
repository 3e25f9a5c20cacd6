"""Hugging Face's Trainer on a data set of `datasets`, with torchrelay's callback, which saves when asked to stop.

hpc submit -N 2 --gpus-per-node 4 --data DATA --python ENV/bin/python -- examples/huggingface/train.py {data} {run_dir}

DATA is what `save_to_disk` has written: a data set with a column `text`, such as wikitext or a CSV of your own.
A preemption or the time limit costs no step; a crash or a lost node costs the steps since the last checkpoint, at most
`save_steps`.
"""

import argparse
from pathlib import Path

import torch
from datasets import load_from_disk
from torchrelay.transformers import RelayTrainerCallback
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

LENGTH = 32


def tokens(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
    """The bytes of the texts, in pieces of one length; a tokenizer would stand here."""
    data = "\n".join(rows["text"]).encode()
    pieces = [list(data[start : start + LENGTH]) for start in range(0, len(data) - LENGTH + 1, LENGTH)]
    return {"input_ids": pieces, "labels": pieces}


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()

    use_cpu = not torch.cuda.is_available()
    output = args.run_dir / "output"
    arguments = TrainingArguments(
        output_dir=str(output), num_train_epochs=args.epochs, per_device_train_batch_size=16, logging_steps=1,
        save_steps=100, save_total_limit=2, use_cpu=use_cpu, ddp_backend="gloo" if use_cpu else "nccl",
        report_to=[], disable_tqdm=True, dataloader_pin_memory=not use_cpu,
    )  # fmt: skip
    data = load_from_disk(args.data)
    data = data.map(tokens, batched=True, remove_columns=data.column_names, keep_in_memory=True)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2))
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[RelayTrainerCallback()])
    newest = get_last_checkpoint(str(output)) if output.is_dir() else None
    trainer.train(resume_from_checkpoint=newest)


if __name__ == "__main__":
    main()
