"""The training with Lightning on two processes: python lightning_training.py FOLDER STRATEGY [HOSTS].

Over HOSTS a launcher starts the processes. Each rank leaves its outcome in FOLDER/RANK.json.
"""

import json
import pathlib
import sys

import lightning
import torch
import training


class Module(lightning.LightningModule):
    def __init__(self, folder):
        super().__init__()
        self.folder = folder
        self.model = training.make_model()

    def training_step(self, batch, index):
        loss = training.loss_of(self.model, batch)
        self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return training.make_optimizer(self)

    def train_dataloader(self):
        """Lightning's own sampler shuffles; in order, two ranks see what one process with both batches sees."""
        sampler = torch.utils.data.DistributedSampler(training.data(), shuffle=False)
        return torch.utils.data.DataLoader(training.data(), training.BATCH, sampler=sampler)

    def on_fit_end(self):
        """Still in the process that trained, wherever it was started."""
        result = training.outcome(self.model)
        result["gathered"] = self.all_gather(torch.tensor(self.global_rank)).tolist()
        result["logged"] = self.trainer.callback_metrics["loss"].item()
        pathlib.Path(self.folder, f"{self.global_rank}.json").write_text(json.dumps(result))


def train(folder, strategy, hosts=1):
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2 // int(hosts), num_nodes=int(hosts), strategy=strategy,
        max_epochs=training.EPOCHS, default_root_dir=folder, use_distributed_sampler=False,
        logger=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(folder))


if __name__ == "__main__":
    train(*sys.argv[1:])
