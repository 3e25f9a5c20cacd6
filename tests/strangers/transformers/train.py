import os
import time

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 320

    def __getitem__(self, index):
        time.sleep(0.003)
        return {"input_ids": torch.arange(8) + index % 20, "labels": index % 2}


if __name__ == "__main__":
    set_seed(0)
    config = BertConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
    )
    arguments = TrainingArguments(
        "output",
        num_train_epochs=16,
        per_device_train_batch_size=8,
        save_steps=20,
        save_total_limit=2,
        logging_steps=20,
        report_to=[],
        disable_tqdm=True,
        dataloader_num_workers=1,
        use_cpu=True,
    )
    trainer = Trainer(model=BertForSequenceClassification(config), args=arguments, train_dataset=Numbers())
    last = get_last_checkpoint("output") if os.path.isdir("output") else None
    trainer.train(resume_from_checkpoint=last)
    trainer.save_model("output/final")
