"""The training with Hugging Face accelerate: python accelerate_training.py FOLDER, under any launcher.

Each rank leaves its outcome in FOLDER/RANK.json.
"""

import json
import pathlib
import sys

import torch
import training
from accelerate import Accelerator


def train(folder):
    accelerator = Accelerator(cpu=True)
    model = training.make_model()
    odd = torch.utils.data.DataLoader(torch.arange(21), 4)  # padded for equal shares; gathering drops the padding
    model, optimizer, batches, odd = accelerator.prepare(model, training.make_optimizer(model), training.loader(), odd)
    for epoch in range(training.EPOCHS):
        for batch in batches:
            optimizer.zero_grad()
            accelerator.backward(training.loss_of(model, batch))
            optimizer.step()
        if epoch == training.EPOCHS // 2:  # what was saved is what goes on
            accelerator.save_state(f"{folder}/state")
            accelerator.wait_for_everyone()
            with torch.no_grad():
                next(model.parameters()).add_(1)
            accelerator.load_state(f"{folder}/state")
    result = training.outcome(accelerator.unwrap_model(model))
    result["gathered"] = torch.cat([accelerator.gather_for_metrics(numbers) for numbers in odd]).tolist()
    result["mean"] = accelerator.reduce(torch.tensor(accelerator.process_index + 1.0), "mean").item()
    result["objects"] = accelerator.gather_for_metrics([f"rank {accelerator.process_index}"], use_gather_object=True)
    pathlib.Path(folder, f"{accelerator.process_index}.json").write_text(json.dumps(result))
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    train(sys.argv[1])
