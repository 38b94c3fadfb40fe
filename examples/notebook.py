"""Train from Python with a custom model, rows, loss and callback. Run `python examples/notebook.py RUN_FOLDER`."""

import sys
from types import SimpleNamespace

import torch

import omnizoo


class Tiny(torch.nn.Module):
    _no_split_modules = ("Linear",)  # the unit of FSDP sharding

    def __init__(self, width=32, vocabulary=512):
        super().__init__()
        self.table, self.head = torch.nn.Embedding(vocabulary, width), torch.nn.Linear(width, vocabulary)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, 3 * width) for _ in range(2))

    def forward(self, input_ids, logits_to_keep, **pack):
        x = self.table(input_ids)
        for layer in self.layers:
            x = x + omnizoo.attend(*layer(x)[:, None].chunk(3, -1), **pack).flatten(2)
        return SimpleNamespace(logits=self.head(x[:, logits_to_keep]))


class Modesty(omnizoo.Loss):
    def from_logits(self, logits, batch):  # keeps the probability of every token above zero
        return batch.sum(-logits.log_softmax(-1).mean(-1))


class Farewell(omnizoo.Callback):
    def on_end(self, event):
        print(f"The run ended at step {event.step}: {event.outcome}")


torch.manual_seed(0)
settings = {"model": {"tokenizer": "examples/data/tiny/tokenizer"}, "data": {"pack_tokens": 64}}
settings |= {"checkpoint": {"every": 5}, "log": {"dir": sys.argv[1]}}
modesty = {"kind": "__main__:Modesty", "weight": 0.01}
settings |= {"train": {"steps": 40, "losses": [{"kind": "cross_entropy"}, modesty]}}
rows = [{"text": f"{a} and {b} make {a + b}"} for a in range(30) for b in range(30)]
print(omnizoo.train(settings, model=Tiny(), data=rows, callbacks=[Farewell()]).checkpoint)
